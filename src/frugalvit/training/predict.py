"""``frugalvit predict``: the classes of images, with the names and the preprocessing a model was trained with."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import torch

from frugalvit.config.train import PredictConfig
from frugalvit.console import shown
from frugalvit.errors import UserError
from frugalvit.results import Result, Table
from frugalvit.training.devices import pick_device
from frugalvit.training.given import Given
from frugalvit.training.models import load_model


def predict(config: PredictConfig) -> Result:
    """The most probable classes of images, with the names and the preprocessing the model was trained with."""
    if Path(config.model).is_file():
        raise UserError(f"{config.model} is a bare file, which names no classes: give its run or an exported folder.")
    model = load_model(config.model, pick_device(config.device))
    if not model.backbone.num_classes:
        raise UserError(f"{config.model} has no classifier: {_what_instead(config.model, model.meta.get('task'))}.")
    classes = model.classes or tuple(str(i) for i in range(model.backbone.num_classes))
    given = Given(config.images)
    rows: list[dict[str, Any]] = []
    device = next(model.backbone.parameters()).device
    for part in given.batches(config.batch, "predicting", model.transform.enough):
        images = torch.cat([model.transform.image(image.pixels) for image in part]).to(device)
        with torch.inference_mode():
            logits = model.backbone.classify(model.backbone(images).pooled)
        chances, best = logits.float().softmax(1).topk(min(config.top, len(classes)), dim=1)
        for image, row_chances, row_best in zip(part, chances.tolist(), best.tolist(), strict=True):
            guesses = [{"class": classes[i], "probability": p} for i, p in zip(row_best, row_chances, strict=True)]
            rows.append({"image": str(image.path), "predictions": guesses})
    data = {"predictions": rows, "unreadable": given.unreadable}
    if config.format == "csv":
        return Result(data, [], [_csv(rows)])
    cells = [[row["image"], *(f"{g['class']} {g['probability']:.1%}" for g in row["predictions"])] for row in rows]
    columns = ["image", *(f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1))]
    return Result(data, [Table(columns, cells)])


def _what_instead(where: str, task: object) -> str:
    """What to do with a model that was not trained to tell classes apart, by what it was trained for."""
    if not Path(where).exists():  # a name of 'frugalvit list models'
        return f"it is a network without training. 'frugalvit train LABELLED_IMAGES/ --backbone {where}' trains one"
    if task in ("detect", "segment"):
        finds = {"detect": "objects", "segment": "the class of every pixel"}[str(task)]
        return f"it finds {finds}, with 'frugalvit {task} predict {shown(where)} IMAGE…'"
    if task == "pretrain":
        return f"it was pre-trained without labels. 'frugalvit train LABELLED_IMAGES/ --init {shown(where)}' adds one"
    return f"it gives features only. 'frugalvit train LABELLED_IMAGES/ --init {shown(where)}' adds one"


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "probability"])
    for row in rows:
        for rank, guess in enumerate(row["predictions"], 1):
            writer.writerow([row["image"], rank, guess["class"], f"{guess['probability']:.6f}"])
    return text.getvalue().rstrip("\n")
