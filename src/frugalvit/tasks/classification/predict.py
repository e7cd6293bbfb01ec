"""``frugalvit predict``: the classes of images, with the names and the preprocessing a model was trained with."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frugalvit.backbones.base import Backbone
from frugalvit.config.train import PredictConfig
from frugalvit.data.image_inputs import InputImages
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model, described_by, load_model
from frugalvit.utils.console import shell_quote
from frugalvit.utils.tables import CommandResult, Table


def predict(config: PredictConfig) -> CommandResult:
    """The most probable classes of images, with the names and the preprocessing the model was trained with."""
    model, classes = load_classifier(config.model, config.device)
    given = InputImages(config.images)
    rows: list[dict[str, Any]] = []
    device = next(model.backbone.parameters()).device
    for part in given.batches(config.batch, "predicting", model.transform.enough):
        images = torch.cat([model.transform.image(image.pixels) for image in part]).to(device)
        with torch.inference_mode():
            views = [images, images.flip(-1)] if config.mirror else [images]
            found = chances(model.backbone, *(model.backbone(view).pooled for view in views))
        if not bool(found.isfinite().all()):
            raise UserError(not_finite(config.model))
        likely, best = found.topk(min(config.top, len(classes)), dim=1)
        for image, row_chances, row_best in zip(part, likely.tolist(), best.tolist(), strict=True):
            guesses = [{"class": classes[i], "probability": p} for i, p in zip(row_best, row_chances, strict=True)]
            rows.append({"image": str(image.path), "predictions": guesses})
    data = {"predictions": rows, "unreadable": given.unreadable}
    if config.format == "csv":
        return CommandResult(data, [], [_csv(rows)])
    cells = [[row["image"], *(f"{g['class']} {g['probability']:.1%}" for g in row["predictions"])] for row in rows]
    columns = ["image", *(f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1))]
    return CommandResult(data, [Table(columns, cells)])


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "probability"])
    for row in rows:
        for rank, guess in enumerate(row["predictions"], 1):
            writer.writerow([row["image"], rank, guess["class"], f"{guess['probability']:.6f}"])
    return text.getvalue().rstrip("\n")


def load_classifier(
    where: str, device: str, img_size: int | tuple[int, int] | None = None
) -> tuple[Model, tuple[str, ...]]:
    """The model and the names of its classes, their numbers where it has none; refused where it tells no classes."""
    if Path(where).is_file() and described_by(Path(where)) is None:
        raise UserError(f"{where} is a bare file, which names no classes: give its run or an exported folder.")
    model = load_model(where, pick_device(device), img_size=img_size)
    if not model.backbone.num_classes:
        raise UserError(f"{where} has no classifier: {_what_instead(where, model.meta.get('task'))}.")
    return model, model.classes or tuple(str(i) for i in range(model.backbone.num_classes))


def chances(backbone: Backbone, *views: Tensor) -> Tensor:
    """The probability of every class (B, C), from the pooled features (B, D) of one or several views of each image."""
    found = [backbone.classify(pooled).float().softmax(1) for pooled in views]
    return torch.stack(found).mean(0)


def not_finite(where: str | Path) -> str:
    """The line for a model whose answers are no numbers."""
    return (
        f"The answers of {where} are not finite: its training went wrong (numbers grew beyond all bounds), and nothing "
        "follows from them. Train it again with a lower --lr or --precision 32."
    )


def _what_instead(where: str, task: object) -> str:
    """What to do with a model that was not trained to tell classes apart, by what it was trained for."""
    if not Path(where).exists():  # a name of 'frugalvit list models'
        return f"it is a network without training. 'frugalvit train LABELLED_IMAGES/ --backbone {where}' trains one"
    if task in ("detect", "segment"):
        finds = {"detect": "objects", "segment": "the class of every pixel"}[str(task)]
        return f"it finds {finds}, with 'frugalvit {task} predict {shell_quote(where)} IMAGE…'"
    if task == "pretrain":
        return f"it was pre-trained without labels. 'frugalvit train LABELLED_IMAGES/ --init {shell_quote(where)}' adds one"
    return f"it gives features only. 'frugalvit train LABELLED_IMAGES/ --init {shell_quote(where)}' adds one"
