"""``frugalvit predict``: the classes, labels or number of images, with a model's names and preprocessing."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frugalvit.backbones.registry import is_model_name
from frugalvit.backbones.weights.published import has_published
from frugalvit.config.train import PredictConfig
from frugalvit.data.image_inputs import InputImages
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.calibration import Calibration
from frugalvit.experiment.load_model import Model, described_by, load_model
from frugalvit.runs.run_folder import read_summary
from frugalvit.tasks.classification.target import Target, load_target
from frugalvit.utils.console import shell_quote
from frugalvit.utils.tables import CommandResult, Table, as_csv


def predict(config: PredictConfig) -> CommandResult:
    """Return the most probable classes of images, their labels, or their number."""
    model, classes = load_classifier(config.model, config.device)
    target, calibration = load_target(model, classes), check_coverage(model, config.coverage, config.mirror)
    inputs = InputImages(config.images)
    rows: list[dict[str, Any]] = []
    device = next(model.backbone.parameters()).device
    for part in inputs.batches(config.batch, "predicting", model.transform.pixels):
        images = torch.cat([model.transform.image(image.pixels) for image in part]).to(device)
        with torch.inference_mode():
            views = [images, images.flip(-1)] if config.mirror else [images]
            pooled = [model.backbone(view).pooled for view in views]
            answers = answer_features(model, *pooled, top=config.top, coverage=config.coverage)
        rows += [{"image": str(image.path)} | answer for image, answer in zip(part, answers, strict=True)]
    data = {"predictions": rows, "unreadable": inputs.unreadable, "calibrated": calibration is not None}
    if config.format == "csv":
        return CommandResult(data, [], [_csv(rows, target)])
    ranks = [f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1)]
    columns = ["image", *{"class": ranks, "labels": ["labels", *ranks], "number": list(classes)}[target.kind]]
    cells, notes = [[row["image"], *_cells(row)] for row in rows], []
    if config.coverage is not None and calibration is not None:
        columns.append(f"{config.coverage:.0%} set")
        cells = [[*cell, ", ".join(row["set"]) or "none"] for cell, row in zip(cells, rows, strict=True)]
        if calibration.top1 > 100 * config.coverage:
            often = f"the first class alone is right on {calibration.top1:.1f} % of held-out images"
            notes.append(f"{often}, more than --coverage: sets may be empty. Choose a higher --coverage")
    if any(row["unlike_training"] for row in rows):
        columns.append("unlike training")
        cells = [[*cell, row["unlike_training"]] for cell, row in zip(cells, rows, strict=True)]
    return CommandResult(data, [Table(columns, cells)], notes)


def answer_features(model: Model, *views: Tensor, top: int = 5, coverage: float | None = None) -> list[dict[str, Any]]:
    """Answer from the pooled features (B, D) of each view. What was not requested, or not calibrated, is None.

    predictions:     {"class", "probability"} of the most probable classes, the highest first
    labels, value:   the present labels, or the number, instead of or beside the classes
    set:             the classes among which the right one is, with the requested coverage; it may be empty
    distance:        to the training images
    unlike_training: whether the distance is larger than for 95 % of the held-out images
    """
    calibration, names = check_coverage(model, coverage, len(views) > 1), class_names(model)
    values = mean_answers(model, *views)
    distances = calibration.distances(views[0]) if calibration is not None else []
    answers = []
    for facts, row, distance in zip_longest(load_target(model, names).describe(values, top), values, distances):
        answers.append(facts | {"set": None, "distance": distance, "unlike_training": None})
        if calibration is not None and coverage is not None:
            inside = int((row >= calibration.lowest_probability(coverage)).sum())
            answers[-1]["set"] = [names[i] for i in row.argsort(descending=True, stable=True)[:inside].tolist()]
        if calibration is not None and distance is not None:
            answers[-1]["unlike_training"] = calibration.is_unlike(distance)
    return answers


def check_coverage(model: Model, coverage: float | None, mirror: bool = False) -> Calibration | None:
    """Return the calibration. Raises ``UserError`` if the model cannot answer with sets of this coverage."""
    if coverage is None:
        return model.calibration
    if not 0 < coverage <= 0.99:
        raise UserError(f"--coverage {coverage:g} must be above 0 and at most 0.99. Write 0.9 for 90 %.")
    if model.calibration is None:
        raise UserError(
            f"{model.name} is not calibrated, so --coverage {coverage:g} is impossible. Calibration needs one class "
            "per image, 20 images in val (--val-fraction) or a saved probe, and the image size of the training."
        )
    if mirror:
        raise UserError("--coverage and --mirror cannot be combined: the sets were measured without mirror images.")
    return model.calibration


def class_names(model: Any) -> tuple[str, ...]:
    """Return the class names, or class numbers if the model has no names."""
    return model.classes or tuple(str(i) for i in range(model.backbone.num_classes))


def _cells(facts: dict[str, Any]) -> list[str]:
    """Return the number or the labels of an image, then its most probable classes."""
    texts = [f"{facts['value']:.4g}"] if "value" in facts else ["|".join(facts["labels"])] if "labels" in facts else []
    return texts + [f"{guess['class']} {guess['probability']:.1%}" for guess in facts.get("predictions", ())]


def _csv(rows: list[dict[str, Any]], target: Target) -> str:
    if target.kind == "number":
        return as_csv(["image", *target.classes], [[row["image"], f"{row['value']:.6g}"] for row in rows]).rstrip("\n")
    chosen = {"present": "labels", "in_set": "set"}  # 1 if the label is above its threshold, or the class in the set
    chosen = {column: key for column, key in chosen.items() if rows and rows[0].get(key) is not None}
    cells = [
        [row["image"], rank, name, f"{guess['probability']:.6f}", *(int(name in row[key]) for key in chosen.values())]
        for row in rows
        for rank, guess in enumerate(row["predictions"], 1)
        for name in [guess["class"]]
    ]
    return as_csv(["image", "rank", "class", "probability", *chosen], cells).rstrip("\n")


def load_classifier(
    where: str, device: str, img_size: int | tuple[int, int] | None = None
) -> tuple[Model, tuple[str, ...]]:
    """Load a classifier; return the model and its class names, or class numbers if it has no names."""
    is_name = not Path(where).exists() and is_model_name(where) and has_published(where)  # random weights are no use
    if (kind := (read_summary(Path(where)) or {}).get("task")) in ("detect", "segment"):
        raise UserError(
            f"{where} is a run of '{kind} train'. Use 'frugalvit {kind} eval' or 'frugalvit {kind} predict'."
        )
    model = load_model(where, pick_device(device), img_size=img_size, pretrained=is_name)
    if not model.backbone.num_classes:
        option = f"{'--init' if Path(where).exists() else '--backbone'} {shell_quote(where)}"
        raise UserError(f"{where} has no classifier. 'frugalvit train LABELLED_IMAGES/ {option}' trains one.")
    if model.classes is None and Path(where).is_file() and described_by(Path(where)) is None:
        raise UserError(f"{where} is a bare weight file without class names. Use its run or an exported folder.")
    return model, class_names(model)


def mean_answers(model: Model, *views: Tensor) -> Tensor:
    """Return the probabilities or values (B, K), averaged over views, from pooled features (B, D) per view."""
    target = load_target(model, class_names(model))
    temperature = 1.0 if model.calibration is None else model.calibration.temperature
    parts = [target.answers(model.backbone.classify(pooled).float() / temperature) for pooled in views]
    if not bool((answers := torch.stack(parts).mean(0)).isfinite().all()):
        raise UserError(nonfinite_message(model.name))
    return answers


def nonfinite_message(where: str | Path) -> str:
    return (
        f"The outputs of {where} are non-finite: its training diverged. Train it again with a lower --lr or "
        "--precision 32."
    )
