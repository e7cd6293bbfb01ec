"""``frugalvit predict``: the classes of images, with the names and the preprocessing a model was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from frugalvit import console
from frugalvit.config.train import PredictConfig
from frugalvit.data.decode import decode
from frugalvit.data.listing import list_images
from frugalvit.errors import UserError
from frugalvit.results import Result, Table
from frugalvit.training.models import load_model
from frugalvit.training.setup import pick_device


def predict(config: PredictConfig) -> Result:
    """The most probable classes of images, with the names and the preprocessing the model was trained with."""
    model = load_model(config.model, pick_device(config.device))
    if not model.backbone.num_classes:
        raise UserError(
            f"{config.model} has no classifier: it was pre-trained without labels. Train it with --init first."
        )
    classes = model.classes or tuple(str(i) for i in range(model.backbone.num_classes))
    paths: list[str] = []
    for word in config.images:
        path = Path(word)
        if path.is_dir():
            paths += list_images(str(path)).images
        elif path.exists():
            paths.append(word)
        else:
            raise UserError(f"There is no image {word}.")
    if not paths:
        raise UserError(f"{config.images[0]} holds no images.")
    rows: list[dict[str, Any]] = []
    device = next(model.backbone.parameters()).device
    starts = range(0, len(paths), config.batch)
    for start in console.progress(starts, label="predicting"):
        part = paths[start : start + config.batch]
        images = torch.cat([model.transform.image(decode(path)) for path in part]).to(device)
        with torch.inference_mode():
            logits = model.backbone.classify(model.backbone(images).pooled)
        chances, best = logits.float().softmax(1).topk(min(config.top, len(classes)), dim=1)
        for path, row_chances, row_best in zip(part, chances.tolist(), best.tolist(), strict=True):
            guesses = [{"class": classes[i], "probability": p} for i, p in zip(row_best, row_chances, strict=True)]
            rows.append({"image": path, "predictions": guesses})
    if config.format == "csv":
        lines = ["image,rank,class,probability"]
        for row in rows:
            lines += [
                f'"{row["image"]}",{rank},"{g["class"]}",{g["probability"]:.6f}'
                for rank, g in enumerate(row["predictions"], 1)
            ]
        return Result({"predictions": rows}, [], ["\n".join(lines)])
    cells = [[row["image"], *(f"{g['class']} {g['probability']:.1%}" for g in row["predictions"])] for row in rows]
    columns = ["image", *(f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1))]
    return Result({"predictions": rows}, [Table(columns, cells)])
