"""``frugalvit eval``: how often a trained classifier is right on labelled images, and what it takes for what."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.probe import EvalConfig
from frugalvit.config.run import same_value
from frugalvit.config.train import TrainConfig
from frugalvit.data import DatasetSplits, open_data
from frugalvit.data.dataset import ImageDataset, join
from frugalvit.data.formats.table import WANTED_COLUMN
from frugalvit.data.webdataset.streaming_dataset import should_stream
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import described_by
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.metrics import classification_scores, rank_classes, wilson_interval
from frugalvit.probing.splits import make_extractor
from frugalvit.tasks.classification.predict import class_probabilities, load_classifier, nonfinite_message
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, utf8_safe, write_text
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize, truncate_list

_WORST = 10  # classes that the table names
_SUREST = 5  # mistakes that it names
_TAKEN_FOR = 3  # other classes that --json names for each


def evaluate(config: EvalConfig) -> CommandResult:
    """Top-1 with its 95 % interval, top-5 and mean per class, the classes most often missed and the surest mistakes."""
    began = time.monotonic()
    out = _free(config.out)
    model, names = load_classifier(config.model, config.device, config.img_size)
    source, learned = _open(config, names, str(model.meta.get("data")))
    split, examples = _asked(source, config.split)
    numbers = _numbers(config.model, names, source, examples)
    if learned and split in ("train", "all"):
        console.warning(f"{config.model} {learned} these images ({split}): its scores on others will be lower")
    extractor = make_extractor(model, config, "pooled")
    label = f"{source.name} {split}"
    found = extractor(examples, label)
    assert found.labels is not None
    truth = numbers[found.labels]
    views = [found, extractor(examples, label, mirrored=True)] if config.mirror else [found]
    seen = [view.features.to(extractor.device) for view in views]
    with torch.inference_mode():
        answers, plain = (class_probabilities(model.backbone, *looks).cpu() for looks in (seen, seen[:1]))
    if not bool(answers.isfinite().all()):
        raise UserError(nonfinite_message(config.model))
    ranked = rank_classes(answers)
    scores = _scores(ranked, truth)
    summary: dict[str, Any] = {"model": config.model, "data": source.name, **scores}
    shown = {"": scores}
    if config.mirror:
        summary["without_mirror"] = _scores(rank_classes(plain), truth)
        shown = {"with mirror images": scores, "without": summary["without_mirror"]}
    per_class = _per_class(ranked[:, 0], truth, names)
    mistakes = _mistakes(found, answers, ranked[:, 0], truth, names)
    summary |= {
        "scored_on": split,
        "scored_images": len(truth),
        "left_out": len(found.bad),
        "per_class": per_class,
        "surest_mistakes": mistakes[: _SUREST * 4],
        "seconds": round(time.monotonic() - began, 2),
    }
    notes = list(source.notes)
    if out is not None:
        write_text(out, _csv(found, answers, ranked[:, 0], truth, names))
        notes.append(f"the answer to every image: {out}")
        summary["out"] = str(out)
    title = f"{config.model} on {source.name}, {split}: {pluralize(len(truth), 'image')}"
    return CommandResult(summary, [_score_table(shown, title), *_where_wrong(per_class, mistakes)], notes)


def _free(out: str | None) -> Path | None:
    """Where the answers go; what cannot be written is said before the work."""
    if out is None:
        return None
    path = Path(out)
    if path.suffix.lower() != ".csv":
        raise UserError(f"{path}: the answers go into a file that ends with .csv.")
    if path.exists():
        raise UserError(f"{path} is already there and is not overwritten; choose another name with -o.")
    make_folder(path.parent)
    return path


def _open(config: EvalConfig, names: tuple[str, ...], learned: str) -> tuple[DatasetSplits, str]:
    """The data, and a word where the model has learned from some of them: a run's own are read as it read them.

    ``names`` are the model's classes, ``learned`` the name of the data that it had. Of shards that a run read in
    passing it held whole shards out, which are not told apart here.
    """
    where = described_by(Path(config.model)) or Path(config.model)
    run = where.parent if where.name == "model" else where
    theirs = _config_of(run)
    if theirs is not None:
        same = same_value("data", config.data, theirs.data)
        if should_stream(config.data, theirs.stream):
            if same:
                return _read(config, theirs, "given"), "has learned from"
        elif same:
            return _read(config, theirs, theirs.split), "has learned from"
        elif (source := _with_content(config, theirs, run)) is not None:
            return source, "has learned from"
    source = open_data(config.data, split="given", root=config.root, classes=config.classes)
    if source.classes is None:
        source = _one_class(config, names) or source
    alike = source.name == learned and source.classes == names
    return source, f"was taught with data of this name ({learned}), and may have learned from" if alike else ""


def _config_of(run: Path) -> TrainConfig | None:
    """What a run was asked; nothing of an exported folder, or of somebody else's file of that name."""
    try:
        return TrainConfig.from_run(run / "config.yaml") if (run / "config.yaml").is_file() else None
    except UserError:
        return None


def _read(config: EvalConfig, theirs: TrainConfig, split: str) -> DatasetSplits:
    return open_data(
        config.data,
        split=split,
        val_fraction=theirs.val_fraction,
        root=config.root or theirs.root,
        classes=config.classes or theirs.classes,
    )


def _with_content(config: EvalConfig, theirs: TrainConfig, run: Path) -> DatasetSplits | None:
    """The data as the run read its own, if they are the same: named from another folder, moved, or a copy."""
    content = (read_json(run / "data.json", dict) or {}).get("content")
    try:
        source = _read(config, theirs, theirs.split)
    except UserError:  # without the classes that the run chose, say
        return None
    train = source.splits.get("train")
    return source if train is not None and train.fingerprint(times=False) == content else None


def _one_class(config: EvalConfig, names: tuple[str, ...]) -> DatasetSplits | None:
    """Images in one folder that is called like a class of the model: are all of them recognised?"""
    try:
        source = open_data(config.data, split="given", root=config.root, classes=config.classes, labels="folders")
    except UserError:
        return None
    return source if source.classes and set(source.classes) <= set(names) else None


def _asked(source: DatasetSplits, split: str) -> tuple[str, ImageDataset]:
    """The images to look at and what to call them; refused where they have no labels."""
    there = source.splits
    if split == "auto":
        split = next((name for name in ("test", "val") if name in there), "all")
    if split != "all" and split not in there:
        raise UserError(f"{source.location} has no {split} split, only {', '.join(there)}.")
    examples = join(*there.values()) if split == "all" else there[split]
    if examples.targets is not None:
        raise UserError(f"{source.location} has several labels an image, and a classifier gives one.")
    if examples.labels is None or source.classes is None:
        raise UserError(
            f"{source.location} has no labels to compare with: put the images into one folder per class, or give a CSV "
            f"with a column {WANTED_COLUMN}. 'frugalvit predict' names classes without."
        )
    return split, examples


def _numbers(model: str, names: tuple[str, ...], source: DatasetSplits, examples: ImageDataset) -> Tensor:
    """The model's number of every class of the data, (C,): names decide. -1 where it has none and no image either."""
    assert source.classes is not None and examples.labels is not None
    numbers = [names.index(name) if name in names else -1 for name in source.classes]
    present = np.unique(examples.labels)
    unknown = [source.classes[label] for label in present if numbers[label] < 0]
    if unknown:
        raise UserError(
            f"{source.location} has {truncate_list(unknown)}, which {model} does not know: it tells {truncate_list(names)} apart. Both "
            "must call the same things the same; --classes FILE keeps only the classes that it names."
        )
    return torch.tensor(numbers)


def _scores(ranked: Tensor, truth: Tensor) -> dict[str, Any]:
    right = int((ranked[:, 0] == truth).sum())
    return classification_scores(ranked, truth) | {"top1_interval": list(wilson_interval(right, len(truth)))}


def _score_table(shown: dict[str, dict[str, Any]], title: str) -> Table:
    """A row for each way to look at the images; one way needs no name."""
    columns = ["", "top-1", "95 % interval", "top-5", "mean per class"]
    rows: list[list[object]] = []
    for name, scores in shown.items():
        low, high = scores["top1_interval"]
        rows.append([name, scores["top1"], f"{low:.1f} to {high:.1f}", scores["top5"], scores["mean_per_class"]])
    return Table(columns, rows, title) if len(rows) > 1 else Table(columns[1:], [rows[0][1:]], title)


def _per_class(predicted: Tensor, truth: Tensor, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Of every class that has images: how many, how many right, and what others were taken for; worst first."""
    found: list[dict[str, Any]] = []
    for number in truth.unique().tolist():
        answers = predicted[truth == number]
        right = int((answers == number).sum())
        counts = torch.bincount(answers[answers != number], minlength=len(names))
        others = [i for i in counts.argsort(descending=True, stable=True)[:_TAKEN_FOR].tolist() if counts[i]]
        taken_for = {names[i]: int(counts[i]) for i in others}
        found.append({"class": names[number], "images": len(answers), "right": right, "taken_for": taken_for})
    return sorted(found, key=lambda entry: (entry["right"] / entry["images"], -entry["images"]))


def _mistakes(
    found: FeatureSet, answers: Tensor, predicted: Tensor, truth: Tensor, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Wrong answers, the surest first: the model's faults, and those of labels."""
    sureness = answers.gather(1, predicted[:, None])[:, 0]
    wrong = (predicted != truth).nonzero()[:, 0]
    order = wrong[sureness[wrong].argsort(descending=True, stable=True)]
    return [
        {
            "image": utf8_safe(found.names[i]),
            "class": names[int(truth[i])],
            "predicted": names[int(predicted[i])],
            "probability": float(sureness[i]),
        }
        for i in order.tolist()
    ]


def _where_wrong(per_class: list[dict[str, Any]], mistakes: list[dict[str, Any]]) -> list[Table]:
    """Nothing where nothing is wrong."""
    missed = [entry for entry in per_class if entry["right"] < entry["images"]][:_WORST]
    if not missed:
        return []
    rows: list[list[object]] = [
        [
            entry["class"],
            entry["images"],
            100 * entry["right"] / entry["images"],
            ", ".join(f"{name} ({count})" for name, count in entry["taken_for"].items()),
        ]
        for entry in missed
    ]
    sure: list[list[object]] = [
        [one["image"], one["class"], f"{one['predicted']} {one['probability']:.1%}"] for one in mistakes[:_SUREST]
    ]
    return [
        Table(["class", "images", "right, %", "taken for"], rows, "classes most often missed"),
        Table(["image", "class", "taken for"], sure, "surest mistakes: look whether the label is right"),
    ]


def _csv(found: FeatureSet, answers: Tensor, predicted: Tensor, truth: Tensor, names: tuple[str, ...]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "class", "predicted", "probability", "right"])
    sureness = answers.gather(1, predicted[:, None])[:, 0].tolist()
    for name, label, answer, chance in zip(found.names, truth.tolist(), predicted.tolist(), sureness, strict=True):
        writer.writerow([utf8_safe(name), names[label], names[answer], f"{chance:.6f}", int(label == answer)])
    return text.getvalue()
