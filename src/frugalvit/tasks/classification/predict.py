"""``frugalvit predict``: classify images with a trained model, its class names and its preprocessing."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frugalvit.backbones.base import Backbone
from frugalvit.backbones.registry import is_model_name
from frugalvit.backbones.weights.published import has_published
from frugalvit.config.train import PredictConfig
from frugalvit.data.image_inputs import InputImages
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model, described_by, load_model
from frugalvit.runs.run_folder import read_summary
from frugalvit.utils.console import shell_quote
from frugalvit.utils.tables import CommandResult, Table, as_csv


def predict(config: PredictConfig) -> CommandResult:
    """Return the most probable classes of images."""
    model, classes = load_classifier(config.model, config.device)
    inputs = InputImages(config.images)
    rows: list[dict[str, Any]] = []
    device = next(model.backbone.parameters()).device
    for part in inputs.batches(config.batch, "predicting", model.transform.pixels):
        images = torch.cat([model.transform.image(image.pixels) for image in part]).to(device)
        with torch.inference_mode():
            views = [images, images.flip(-1)] if config.mirror else [images]
            probabilities = class_probabilities(model.backbone, *(model.backbone(view).pooled for view in views))
        if not bool(probabilities.isfinite().all()):
            raise UserError(nonfinite_message(config.model))
        highest, labels = probabilities.topk(min(config.top, len(classes)), dim=1)
        for image, row, best in zip(part, highest.tolist(), labels.tolist(), strict=True):
            guesses = [{"class": classes[i], "probability": p} for i, p in zip(best, row, strict=True)]
            rows.append({"image": str(image.path), "predictions": guesses})
    data = {"predictions": rows, "unreadable": inputs.unreadable}
    if config.format == "csv":
        return CommandResult(data, [], [_csv(rows)])
    cells = [[row["image"], *(f"{g['class']} {g['probability']:.1%}" for g in row["predictions"])] for row in rows]
    columns = ["image", *(f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1))]
    return CommandResult(data, [Table(columns, cells)])


def _csv(rows: list[dict[str, Any]]) -> str:
    cells = [
        [row["image"], rank, guess["class"], f"{guess['probability']:.6f}"]
        for row in rows
        for rank, guess in enumerate(row["predictions"], 1)
    ]
    return as_csv(["image", "rank", "class", "probability"], cells).rstrip("\n")


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
    return model, model.classes or tuple(str(i) for i in range(model.backbone.num_classes))


def class_probabilities(backbone: Backbone, *views: Tensor) -> Tensor:
    """Return the class probabilities (B, C), averaged over views, from pooled features (B, D) per view."""
    return torch.stack([backbone.classify(pooled).float().softmax(1) for pooled in views]).mean(0)


def nonfinite_message(where: str | Path) -> str:
    """Return the error text for a model with non-finite outputs."""
    return (
        f"The outputs of {where} are non-finite: its training diverged. Train it again with a lower --lr or "
        "--precision 32."
    )
