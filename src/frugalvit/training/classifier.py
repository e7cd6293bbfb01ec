"""A trained classifier: the model with the names of its classes, and its answers as probabilities."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from frugalvit.backbones.base import Backbone
from frugalvit.console import shown
from frugalvit.errors import UserError
from frugalvit.training.devices import pick_device
from frugalvit.training.models import Model, described_by, load_model


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
        return f"it finds {finds}, with 'frugalvit {task} predict {shown(where)} IMAGE…'"
    if task == "pretrain":
        return f"it was pre-trained without labels. 'frugalvit train LABELLED_IMAGES/ --init {shown(where)}' adds one"
    return f"it gives features only. 'frugalvit train LABELLED_IMAGES/ --init {shown(where)}' adds one"
