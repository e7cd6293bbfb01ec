"""``frugalvit predict``: the classes, labels or number of images, with a model's names and preprocessing."""

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
from frugalvit.tasks.classification.target import Target, load_target
from frugalvit.utils.console import shell_quote
from frugalvit.utils.tables import CommandResult, Table, as_csv


def predict(config: PredictConfig) -> CommandResult:
    """Return the most probable classes of images, their labels, or their number."""
    model, classes = load_classifier(config.model, config.device)
    target = load_target(model, classes)
    inputs = InputImages(config.images)
    rows: list[dict[str, Any]] = []
    device = next(model.backbone.parameters()).device
    for part in inputs.batches(config.batch, "predicting", model.transform.pixels):
        images = torch.cat([model.transform.image(image.pixels) for image in part]).to(device)
        with torch.inference_mode():
            views = [images, images.flip(-1)] if config.mirror else [images]
            answers = mean_answers(target, model.backbone, *(model.backbone(view).pooled for view in views))
        if not bool(answers.isfinite().all()):
            raise UserError(nonfinite_message(config.model))
        facts = target.describe(answers, config.top)
        rows += [{"image": str(image.path), **answer} for image, answer in zip(part, facts, strict=True)]
    data = {"predictions": rows, "unreadable": inputs.unreadable}
    if config.format == "csv":
        return CommandResult(data, [], [_csv(rows, target).rstrip("\n")])
    ranks = [f"{rank}." for rank in range(1, min(config.top, len(classes)) + 1)]
    heading = {"class": ranks, "labels": ["labels", *ranks], "number": list(classes)}[target.kind]
    return CommandResult(data, [Table(["image", *heading], [[row["image"], *_cells(row)] for row in rows])])


def _cells(facts: dict[str, Any]) -> list[str]:
    """Return the number or the labels of an image, then its most probable classes."""
    texts = [f"{facts['value']:.4g}"] if "value" in facts else ["|".join(facts["labels"])] if "labels" in facts else []
    return texts + [f"{guess['class']} {guess['probability']:.1%}" for guess in facts.get("predictions", ())]


def _csv(rows: list[dict[str, Any]], target: Target) -> str:
    if target.kind == "number":
        return as_csv(["image", *target.classes], [[row["image"], f"{row['value']:.6g}"] for row in rows])
    present = ["present"] if target.kind == "labels" else []  # 1 if the label is above its threshold
    cells = [
        [row["image"], rank, name, f"{guess['probability']:.6f}", *(int(name in row["labels"]) for _ in present)]
        for row in rows
        for rank, guess in enumerate(row["predictions"], 1)
        for name in [guess["class"]]
    ]
    return as_csv(["image", "rank", "class", "probability", *present], cells)


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


def mean_answers(target: Target, backbone: Backbone, *views: Tensor) -> Tensor:
    """Return the probabilities or values (B, K), averaged over views, from pooled features (B, D) per view."""
    return torch.stack([target.answers(backbone.classify(pooled).float()) for pooled in views]).mean(0)


def nonfinite_message(where: str | Path) -> str:
    """Return the error text for a model with non-finite outputs."""
    return (
        f"The outputs of {where} are non-finite: its training diverged. Train it again with a lower --lr or "
        "--precision 32."
    )
