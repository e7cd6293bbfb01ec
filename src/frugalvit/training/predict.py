"""``frugalvit predict``: the classes of images, with the names and the preprocessing a model was trained with."""

from __future__ import annotations

import csv
import io
from typing import Any

import torch

from frugalvit.config.train import PredictConfig
from frugalvit.errors import UserError
from frugalvit.results import Result, Table
from frugalvit.training.classifier import chances, load_classifier, not_finite
from frugalvit.training.given import Given


def predict(config: PredictConfig) -> Result:
    """The most probable classes of images, with the names and the preprocessing the model was trained with."""
    model, classes = load_classifier(config.model, config.device)
    given = Given(config.images)
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
        return Result(data, [], [_csv(rows)])
    cells = [[row["image"], *(f"{g['class']} {g['probability']:.1%}" for g in row["predictions"])] for row in rows]
    columns = ["image", *(f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1))]
    return Result(data, [Table(columns, cells)])


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "probability"])
    for row in rows:
        for rank, guess in enumerate(row["predictions"], 1):
            writer.writerow([row["image"], rank, guess["class"], f"{guess['probability']:.6f}"])
    return text.getvalue().rstrip("\n")
