"""Load a trained model with its preprocessing and class names: fv.load."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.backbones.base import Backbone
from frugalvit.backbones.factory import to_size
from frugalvit.backbones.timm_features import eval_no_grad
from frugalvit.data.image_inputs import as_list
from frugalvit.engine import hardware
from frugalvit.engine.hardware import cpu_settings
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model
from frugalvit.features import Features
from frugalvit.tasks.classification.predict import nonfinite_message


class ReadyModel(nn.Module):
    """A network with all that is needed to use it: preprocessing, class names, and what is known of its training."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.backbone: Backbone = model.backbone
        self.classes = model.classes
        self.name, self.meta = model.name, model.meta
        self._transform = model.transform

    def transform(self, pictures: Any) -> Tensor:
        """A path, a PIL image, a uint8 array (H, W) or (H, W, C), a tensor (C, H, W), or a list of them, as evaluated.

        Bytes are those of a file; a column of a table and a generator are lists too.

        -> (B, C, h, w)
        """
        given = as_list(pictures)
        if not given:
            raise UserError("there are no pictures in the list; give at least one.")
        weight = next(self.parameters())
        return torch.cat([self._transform.image(picture, weight.device) for picture in given]).to(weight.dtype)

    def features(self, images: Tensor) -> Features:
        """(B, C, h, w) -> grid (B, D, h', w') and pooled (B, D)."""
        with cpu_settings(next(self.parameters()).device):
            return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes); the pooled features (B, D) where there is no classifier."""
        with cpu_settings(next(self.parameters()).device):
            pooled = self.backbone(images).pooled
            return self.backbone.classify(pooled) if self.backbone.num_classes else pooled

    @torch.inference_mode()
    def predict(self, pictures: Any, top: int = 5, batch: int = 64) -> list[list[tuple[str, float]]]:
        """The most probable classes of each picture, with their probabilities, ``batch`` pictures at a time.

        In eval mode, whatever the model's own mode is.
        """
        if not self.backbone.num_classes:
            raise UserError(f"{self.name} has no classifier; it gives features only.")
        top, batch = _whole("top", top), _whole("batch", batch)
        given = as_list(pictures)
        names = self.classes or tuple(str(index) for index in range(self.backbone.num_classes))
        answers: list[list[tuple[str, float]]] = []
        with eval_no_grad(self):
            for first in range(0, len(given), batch):
                logits = self(self.transform(given[first : first + batch])).float()
                if not bool(logits.isfinite().all()):
                    raise UserError(nonfinite_message(self.name))
                chances, best = logits.softmax(1).topk(min(top, len(names)), dim=1)
                for row in zip(best.tolist(), chances.tolist(), strict=True):
                    answers.append([(names[index], chance) for index, chance in zip(*row, strict=True)])
        return answers

    def extra_repr(self) -> str:
        return f"name={self.name!r}, img_size={self.backbone.img_size}, num_classes={self.backbone.num_classes}"


def load(
    model: str | Path,
    device: str | torch.device = "cpu",
    *,
    img_size: int | Sequence[int] | None = None,
    backbone: str | None = None,
) -> ReadyModel:
    """The model that ``model`` names (a run, a checkpoint, an exported folder, a name), in eval mode.

    ``device`` "auto" is the best there is. ``backbone`` says what a bare checkpoint belongs to; ``img_size`` is another
    input size than the model's own. The caller's random numbers and settings of torch stay as they are.
    """
    from frugalvit.engine.hardware import numbered_device
    from frugalvit.experiment.load_model import load_model

    size = None if img_size is None else to_size(img_size)
    with hardware.preserve_onednn(), torch.random.fork_rng(devices=[]):
        kind, number = numbered_device(device)
        place = f"{kind}:{number}" if number else kind
        return ReadyModel(load_model(str(model), place, img_size=size, architecture=backbone)).eval()


def _whole(name: str, number: Any) -> int:
    """A whole number from 1 on, of Python's or anybody's kind."""
    with contextlib.suppress(TypeError):
        if not isinstance(number, bool) and operator.index(number) >= 1:
            return operator.index(number)
    raise UserError(f"{name}={number!r}: give a whole number, at least 1.")
