"""``frugalvit predict``: classify images with a trained model, its class names and its preprocessing."""

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
from frugalvit.utils.console import shell_quote
from frugalvit.utils.tables import CommandResult, Table, as_csv


def predict(config: PredictConfig) -> CommandResult:
    """Return the most probable classes of images."""
    model, classes = load_classifier(config.model, config.device)
    calibration = check_coverage(model, config.coverage, config.mirror)
    inputs = InputImages(config.images)
    rows: list[dict[str, Any]] = []
    device = next(model.backbone.parameters()).device
    for part in inputs.batches(config.batch, "predicting"):
        images = torch.cat([model.transform.image(image.pixels) for image in part]).to(device)
        with torch.inference_mode():
            views = [images, images.flip(-1)] if config.mirror else [images]
            pooled = [model.backbone(view).pooled for view in views]
            answers = answer_features(model, *pooled, top=config.top, coverage=config.coverage)
        rows += [{"image": str(image.path)} | answer for image, answer in zip(part, answers, strict=True)]
    data = {"predictions": rows, "unreadable": inputs.unreadable, "calibrated": calibration is not None}
    if config.format == "csv":
        return CommandResult(data, [], [_csv(rows)])
    cells = [[row["image"], *(f"{g['class']} {g['probability']:.1%}" for g in row["predictions"])] for row in rows]
    columns = ["image", *(f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1))]
    notes = []
    if config.coverage is not None and calibration is not None:
        columns.append(f"{config.coverage:.0%} set")
        cells = [[*cell, ", ".join(row["set"]) or "none"] for cell, row in zip(cells, rows, strict=True)]
        if calibration.top1 > 100 * config.coverage:
            sure = f"{calibration.top1:.1f} % of held-out images"
            notes.append(f"the first answer alone is right on {sure}: some sets are empty")
    if any(row["unlike_training"] for row in rows):
        columns.append("unlike training")
        cells = [[*cell, row["unlike_training"]] for cell, row in zip(cells, rows, strict=True)]
    return CommandResult(data, [Table(columns, cells)], notes)


def answer_features(model: Model, *views: Tensor, top: int = 5, coverage: float | None = None) -> list[dict[str, Any]]:
    """Answer from the pooled features (B, D) of each view. What was not requested, or not calibrated, is None.

    predictions:     {"class", "probability"} of the most probable classes, the highest first
    set:             the classes among which the right one is, with the requested coverage; it may be empty
    distance:        to the training images
    unlike_training: whether the distance is larger than for 95 % of the held-out images
    """
    calibration, names = check_coverage(model, coverage, len(views) > 1), class_names(model)
    probabilities = class_probabilities(model, *views)
    sure, order = probabilities.sort(stable=True, dim=1, descending=True)
    distances = calibration.distances(views[0]) if calibration is not None else []
    answers = []
    for values, numbers, distance in zip_longest(sure.tolist(), order.tolist(), distances):
        ranked = [{"class": names[i], "probability": p} for i, p in zip(numbers, values, strict=True)]
        answers.append({"predictions": ranked[:top], "set": None, "distance": distance, "unlike_training": None})
        if calibration is not None and coverage is not None:
            lowest = calibration.lowest_probability(coverage)
            answers[-1]["set"] = [guess["class"] for guess in ranked if guess["probability"] >= lowest]
        if calibration is not None and distance is not None:
            answers[-1]["unlike_training"] = calibration.is_unlike(distance)
    return answers


def check_coverage(model: Model, coverage: float | None, mirror: bool = False) -> Calibration | None:
    """Return the calibration. Raises ``UserError`` if the model cannot answer with sets of this coverage."""
    if coverage is None:
        return model.calibration
    if not 0 < coverage <= 0.99:
        raise UserError(f"coverage = {coverage:g} is not above 0 and at most 0.99.")
    if model.calibration is None:
        raise UserError(
            f"{model.name} is not calibrated, so --coverage {coverage:g} is impossible. Train with a val split or "
            "save a probe, and use the run or an exported folder at its own image size."
        )
    if mirror:
        raise UserError("--coverage and --mirror cannot be combined: the sets were measured without mirror images.")
    return model.calibration


def class_names(model: Any) -> tuple[str, ...]:
    """Return the class names, or class numbers if the model has no names."""
    return model.classes or tuple(str(i) for i in range(model.backbone.num_classes))


def _csv(rows: list[dict[str, Any]]) -> str:
    columns, cells = ["image", "rank", "class", "probability"], []
    for row in rows:
        for rank, guess in enumerate(row["predictions"], 1):
            cells.append([row["image"], rank, guess["class"], f"{guess['probability']:.6f}"])
            if row["set"] is not None:
                cells[-1].append(int(guess["class"] in row["set"]))
    has_sets = bool(rows) and rows[0]["set"] is not None
    return as_csv([*columns, "in_set"] if has_sets else columns, cells).rstrip("\n")


def load_classifier(
    where: str, device: str, img_size: int | tuple[int, int] | None = None
) -> tuple[Model, tuple[str, ...]]:
    """Load a classifier; return the model and its class names, or class numbers if it has no names."""
    is_name = not Path(where).exists() and is_model_name(where) and has_published(where)  # random weights are no use
    model = load_model(where, pick_device(device), img_size=img_size, pretrained=is_name)
    if not model.backbone.num_classes:
        option = f"{'--init' if Path(where).exists() else '--backbone'} {shell_quote(where)}"
        raise UserError(f"{where} has no classifier. 'frugalvit train LABELLED_IMAGES/ {option}' trains one.")
    if model.classes is None and Path(where).is_file() and described_by(Path(where)) is None:
        raise UserError(f"{where} is a bare weight file without class names. Use its run or an exported folder.")
    return model, class_names(model)


def class_probabilities(model: Model, *views: Tensor) -> Tensor:
    """Return the class probabilities (B, C), averaged over views, from pooled features (B, D) per view."""
    temperature = 1.0 if model.calibration is None else model.calibration.temperature
    parts = [(model.backbone.classify(pooled).float() / temperature).softmax(1) for pooled in views]
    if not bool((probabilities := torch.stack(parts).mean(0)).isfinite().all()):
        raise UserError(nonfinite_message(model.name))
    return probabilities


def nonfinite_message(where: str | Path) -> str:
    """Return the error text for a model with non-finite outputs."""
    return (
        f"The outputs of {where} are non-finite: its training diverged. Train it again with a lower --lr or "
        "--precision 32."
    )
