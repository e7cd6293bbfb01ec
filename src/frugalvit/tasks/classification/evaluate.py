"""``frugalvit eval``: scores of a model on labelled images, and its most frequent confusions."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.probe import EvalConfig
from frugalvit.config.train import TrainConfig, same_value
from frugalvit.data import DatasetSplits, open_data
from frugalvit.data.dataset import ImageDataset, join
from frugalvit.data.formats.csv import WANTED_COLUMN
from frugalvit.data.webdataset.streaming_dataset import should_stream
from frugalvit.errors import UserError
from frugalvit.experiment.calibration import Calibration, measure_calibration
from frugalvit.experiment.load_model import described_by
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.floor import check_floor, describe_floor
from frugalvit.probing.metrics import classification_scores, rank_classes, score_facts
from frugalvit.probing.splits import HELD_OUT, make_extractor
from frugalvit.runs import layout
from frugalvit.runs.run_folder import read_summary
from frugalvit.tasks.classification.predict import check_coverage, load_classifier, mean_answers
from frugalvit.tasks.classification.target import StoredTarget, Target, load_target
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, utf8_safe, write_text
from frugalvit.utils.intervals import wilson_interval
from frugalvit.utils.scores import read_scores, score_table
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize, truncate_list

IMAGENET_CLASS = re.compile(r"n\d{8} ")
_SHOWN_CLASSES = 10
_SHOWN_MISTAKES = 5
_SHOWN_CONFUSIONS = 3  # per class, for --json


def evaluate(config: EvalConfig) -> CommandResult:
    """Compute the scores with 95 % intervals (top-1, or mAP, or R²); list the worst classes or labels, and mistakes."""
    started, out = time.monotonic(), None if config.out is None else Path(config.out)
    if out is not None:
        if out.exists():
            raise UserError(f"{out} already exists. Choose another name with -o.")
        make_folder(out.parent)
    model, names = load_classifier(config.model, config.device, config.img_size)
    target, calibration = load_target(model, names), check_coverage(model, config.coverage, config.mirror)
    source, run, split, examples, numbers = open_scored(config, target)
    stored = (read_summary(run) if run else None) or {}
    is_probe = stored.get("task") == "probe" and "test" in source.splits  # a probe with a test split also uses val
    learned_val = is_probe or stored.get("learned_val")
    if run is not None and split in ("train", "all", *(["val"] if learned_val else [])):
        console.warning(f"{config.model} was trained on these images ({split}): its scores on new images will be lower")
    extractor = make_extractor(model, config, "pooled")
    label = f"{source.name} {split}"
    features = extractor(examples, label)
    views = [features, extractor(examples, label, mirrored=True)] if config.mirror else [features]
    inputs = [view.features.to(extractor.device) for view in views]
    with torch.inference_mode():
        probabilities, plain = (mean_answers(model, *part).cpu() for part in (inputs, inputs[:1]))
        untempered = mean_answers(replace(model, calibration=None), *inputs).cpu()
    title = f"{config.model} on {source.name}, {split}: {pluralize(len(features), 'image')}"
    title += ", with mirror images" if config.mirror else ""
    summary: dict[str, Any] = {"model": config.model, "data": source.name}
    if isinstance(target, StoredTarget):
        scores, table, predictions = _judge_stored(target, probabilities, features, numbers, split)
        summary |= scores | {"left_out": len(features.bad), "seconds": round(time.monotonic() - started, 2)}
        return _result(summary, [score_table(read_scores(summary), title), table], source.notes, out, predictions)
    assert features.labels is not None
    truth = numbers[features.labels]
    ranked = rank_classes(probabilities)
    scores = _scores(ranked, truth, len(names))
    summary |= scores
    if config.mirror:
        summary["without_mirror"] = _scores(rank_classes(plain), truth, len(names))
    per_class = _per_class(ranked[:, 0], truth, names)
    after, before = (measure_calibration(part, truth) for part in (probabilities, untempered))
    summary |= {"ece": after["error"], "ece_before": before["error"], "reliability": after["bins"]}
    rows = _predictions(features.names, probabilities, ranked[:, 0], truth, names)
    mistakes = sorted((row for row in rows if row["class"] != row["predicted"]), key=lambda row: -row["probability"])
    summary |= {
        **(where := {"scored_on": split, "scored_images": len(truth)}),
        "left_out": len(features.bad),
        "per_class": per_class,
        "surest_mistakes": mistakes[: _SHOWN_MISTAKES * 4],
        "seconds": round(time.monotonic() - started, 2),
    }
    notes = list(source.notes)
    if (floor := stored.get("floor")) and where == {name: stored.get(name) for name in where}:
        summary |= {"floor": floor, "alarms": check_floor(scores["top1"], floor)}
        notes += [f"floor: {describe_floor(floor, scores['top1'])}", *(f"alarm: {text}" for text in summary["alarms"])]
    how = "not calibrated" if calibration is None else f"{before['error']:.1f} without the temperature; {calibration}"
    notes.append(f"confidence is {after['error']:.1f} points from accuracy (ECE), {how}")
    if config.coverage is not None and calibration is not None:
        summary["sets"] = _score_sets(probabilities, truth, config.coverage, calibration)
        notes.append(
            "sets for {asked:g} %: {inside:.1f} % hold the right class; a set has {classes:.2f} classes on average; "
            "{empty:.1f} % of the sets are empty".format(**summary["sets"])
        )
    if calibration is not None and (distances := calibration.distances(inputs[0])):
        summary["unlike_training"] = 100 * sum(map(calibration.is_unlike, distances)) / len(distances)
        notes.append(f"unlike training: {summary['unlike_training']:.1f} % of the images; about 5 % is usual")
    tables = [score_table(read_scores(summary), title)]
    if config.mirror:
        tables.append(score_table(read_scores(summary["without_mirror"] | where), "without mirror images"))
    bars: list[list[object]] = [
        [f"{row['confidence']:.1f}", f"{row['accuracy']:.1f}", row["images"], "█" * round(row["accuracy"] / 5)]
        for row in after["bins"]
    ]
    tables.append(Table(["confidence, %", "right, %", "images", ""], bars, "reliability"))
    columns = ["image", "class", "predicted", "probability", "right"]
    cells = [[*texts, f"{sure:.6f}", int(texts[1] == texts[2])] for *texts, sure in (row.values() for row in rows)]
    tables += _mistake_tables(per_class, mistakes)
    return _result(summary, tables, notes, out, as_csv(columns, cells))


def _judge_stored(
    target: StoredTarget, answers: Tensor, features: FeatureSet, numbers: Tensor, split: str
) -> tuple[dict[str, Any], Table, str]:
    """Return the scores of labels or numbers, a table of them, and the answers to all images as CSV."""
    truth = features.targets
    assert truth is not None
    truth = align_labels(truth, numbers, len(target.classes)) if target.kind == "labels" else truth
    scores = target.make_scores(len(truth), answers.device)
    scores.put(answers, truth, torch.arange(len(truth)))
    table, texts = target.answer_table(answers, truth), zip(target.texts(truth), target.texts(answers), strict=True)
    rows: list[list[object]] = [[utf8_safe(name), *text] for name, text in zip(features.names, texts, strict=True)]
    facts = {name: value for name, value in scores.facts(split).items() if name != "pseudo_values"}
    facts |= {"target": target.kind, "per_class": {"columns": table.columns, "rows": table.rows}}
    return scores.summary() | facts, table, as_csv(["image", target.column, "predicted"], rows)


def _result(
    summary: dict[str, Any], tables: list[Table], notes: list[str], out: Path | None, predictions: str
) -> CommandResult:
    """Write the predictions, if they are wanted, and return what the command prints."""
    if out is not None:
        write_text(out, predictions)
        notes = [*notes, f"predictions of all images: {out}"]
        summary["out"] = str(out)
    return CommandResult(summary, tables, notes)


def align_labels(targets: Tensor, numbers: Tensor, labels: int) -> Tensor:
    """Return the targets (N, K) of a model's labels; numbers: (C,) of the data's labels. Others are unknown, -1."""
    known = numbers >= 0
    aligned = targets.new_full((len(targets), labels), -1)
    aligned[:, numbers[known]] = targets[:, known]
    return aligned


def _score_sets(probabilities: Tensor, truth: Tensor, coverage: float, calibration: Calibration) -> dict[str, float]:
    """Measure the sets of classes: how often they hold the right class, and their sizes."""
    inside = probabilities >= calibration.lowest_probability(coverage)
    parts = {"inside": 100 * inside.gather(1, truth[:, None]), "classes": inside.sum(1), "empty": 100 * ~inside.any(1)}
    return {"asked": 100 * coverage} | {name: part.double().mean().item() for name, part in parts.items()}


def open_scored(config: EvalConfig, target: Target) -> tuple[DatasetSplits, Path | None, str, ImageDataset, Tensor]:
    """Open the images to score: the data, the run if it knows them, the split, its images, and the model's labels."""
    source, run = _open(config, target.kind)
    split, examples = _select_split(source, config.split)
    is_number = target.kind == "number"
    numbers = torch.zeros(1) if is_number else _match_classes(config.model, target.classes, source, examples)
    return source, run, split, examples, numbers


def _open(config: EvalConfig, target: str) -> tuple[DatasetSplits, Path | None]:
    """Open the data; also return the run or saved probe if the model learned from it. It is split as in training.

    If a probe learned from train alone, the images that it held out are a split. The shards that a streamed run held
    out are not told apart here.
    """
    location = described_by(Path(config.model)) or Path(config.model)
    folder = location.parent if location.name == layout.MODEL else location
    run = TrainConfig.from_run(folder / layout.CONFIG) if (folder / layout.CONFIG).is_file() else None
    reading: dict[str, Any] = {"split": "given", "root": config.root, "classes": config.classes}
    is_known, held_out = False, set[str]()
    if (read_summary(folder) or {}).get("task") == "probe":
        facts = read_json(folder / layout.DATA, dict) or {}
        is_known, held_out = same_value("data", config.data, facts.get("data")), set(facts.get("held_out") or ())
    elif run is not None and same_value("data", config.data, run.data):
        is_known = True
        reading["split"] = "given" if should_stream(config.data, run.stream) else run.split
        reading |= {"val_fraction": run.val_fraction, "root": config.root or run.root}
        reading["classes"] = config.classes or run.classes
    source = open_data(config.data, target=target, **reading)
    if is_known and held_out:
        train = source.splits["train"]
        is_held_out = np.array([key in held_out for key in train.keys])
        source.splits |= {"train": train.subset(~is_held_out), HELD_OUT: train.subset(is_held_out)}
    return source, folder if is_known else None


def _select_split(source: DatasetSplits, split: str) -> tuple[str, ImageDataset]:
    """Return the name and the images of the split to score. Raises ``UserError`` without labels."""
    present = source.splits
    if split == "auto":
        split = next((name for name in ("test", "val", HELD_OUT) if name in present), "all")
    if split != "all" and split not in present:
        raise UserError(f"{source.location} has no {split} split, only {', '.join(present)}.")
    examples = join(*present.values()) if split == "all" else present[split]
    if examples.truth is None or source.classes is None:
        raise UserError(
            f"{source.location} has no labels. Put the images into one folder per class, or pass a CSV with a column "
            f"{WANTED_COLUMN}. Without labels, use 'frugalvit predict'."
        )
    return split, examples


def _match_classes(model: str, names: tuple[str, ...], source: DatasetSplits, examples: ImageDataset) -> Tensor:
    """Return the model's label (C,) of every class of the data, by name. An unknown class without images gets -1.

    ImageNet's classes are "n02123045 tabby, tabby cat"; its folders have the first word.
    """
    assert source.classes is not None and examples.truth is not None
    known = {name.partition(" ")[0]: number for number, name in enumerate(names) if IMAGENET_CLASS.match(name)}
    known |= {name: number for number, name in enumerate(names)}
    numbers = [known.get(name, -1) for name in source.classes]
    present = np.unique(examples.truth) if examples.targets is None else np.flatnonzero((examples.targets == 1).any(0))
    unknown = [source.classes[label] for label in present if numbers[label] < 0]
    if unknown:
        raise UserError(
            f"{source.location} has classes that {model} does not know: {truncate_list(unknown)}. The model knows "
            f"{truncate_list(names)}. Use the same names, or select classes with --classes FILE."
        )
    return torch.tensor(numbers)


def _scores(ranked: Tensor, truth: Tensor, classes: int) -> dict[str, Any]:
    right = int((ranked[:, 0] == truth).sum())
    facts = score_facts(ranked, truth, classes)
    return classification_scores(ranked, truth) | {"top1_interval": list(wilson_interval(right, len(truth)))} | facts


def _per_class(predicted: Tensor, truth: Tensor, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Count images, correct predictions and confusions of every class with images; worst first."""
    rows: list[dict[str, Any]] = []
    for number in truth.unique().tolist():
        answers = predicted[truth == number]
        right = int((answers == number).sum())
        counts = torch.bincount(answers[answers != number], minlength=len(names))
        others = [i for i in counts.argsort(descending=True, stable=True)[:_SHOWN_CONFUSIONS].tolist() if counts[i]]
        taken_for = {names[i]: int(counts[i]) for i in others}
        rows.append({"class": names[number], "images": len(answers), "right": right, "taken_for": taken_for})
    return sorted(rows, key=lambda row: (row["right"] / row["images"], -row["images"]))


def _predictions(
    images: Sequence[str], probabilities: Tensor, predicted: Tensor, truth: Tensor, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the class, the prediction and its probability of every image."""
    confidence = probabilities.gather(1, predicted[:, None])[:, 0].tolist()
    return [
        {"image": utf8_safe(image), "class": names[label], "predicted": names[answer], "probability": probability}
        for image, label, answer, probability in zip(
            images, truth.tolist(), predicted.tolist(), confidence, strict=True
        )
    ]


def _mistake_tables(per_class: list[dict[str, Any]], mistakes: list[dict[str, Any]]) -> list[Table]:
    """Build the tables of the worst classes and mistakes; none without mistakes."""
    missed = [entry for entry in per_class if entry["right"] < entry["images"]][:_SHOWN_CLASSES]
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
    confident: list[list[object]] = [
        [mistake["image"], mistake["class"], f"{mistake['predicted']} {mistake['probability']:.1%}"]
        for mistake in mistakes[:_SHOWN_MISTAKES]
    ]
    return [
        Table(["class", "images", "right, %", "taken for"], rows, "worst classes"),
        Table(["image", "class", "taken for"], confident, "most confident mistakes: check their labels"),
    ]
