"""Load a trained model with its preprocessing and class names: fv.load."""

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
from frugalvit.engine.hardware import cpu_settings, numbered_device
from frugalvit.errors import UserError, to_count
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.features import Features
from frugalvit.tasks.classification.predict import answer_features, class_names


class ReadyModel(nn.Module):
    """A network with its preprocessing, class names, and a record of its training."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.backbone: Backbone = model.backbone
        self.classes = model.classes
        self.name, self.meta, self.calibration = model.name, model.meta, model.calibration
        self.model, self.pixels = model, model.transform.pixels

    def transform(self, pictures: Any) -> Tensor:
        """Preprocess images as in evaluation: one image or a list of them -> (B, C, h, w).

        An image is a path, the bytes of a file, a PIL image, a uint8 array (H, W) or (H, W, C), or a tensor (C, H, W).
        For a model of 16-bit or multi-channel images, arrays and tensors hold the values of such files.
        A column of a table or a generator counts as a list.
        """
        inputs = as_list(pictures)
        if not inputs:
            raise UserError("The list of images is empty: give at least one.")
        weight = next(self.parameters())
        return torch.cat([self.model.transform.image(image, weight.device) for image in inputs]).to(weight.dtype)

    def features(self, images: Tensor) -> Features:
        """Compute the features of (B, C, h, w): grid (B, D, h', w') and pooled (B, D)."""
        with cpu_settings(next(self.parameters()).device):
            return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (B, classes), or pooled features (B, D) if there is no classifier."""
        with cpu_settings(next(self.parameters()).device):
            pooled = self.backbone(images).pooled
            return self.backbone.classify(pooled) if self.backbone.num_classes else pooled

    def predict(self, pictures: Any, top: int = 5, batch: int = 64) -> list[list[tuple[str, float]]]:
        """Return the ``top`` classes or labels of each image with their probabilities; or the name and the number.

        Probabilities are calibrated if the model is.

        The model predicts in eval mode, ``batch`` images at a time.
        """
        return [
            [(class_names(self.model)[0], answer["value"])]
            if "value" in answer
            else [(guess["class"], guess["probability"]) for guess in answer["predictions"]]
            for answer in self.answer(pictures, None, top, batch)
        ]

    @torch.inference_mode()
    def answer(
        self, pictures: Any, coverage: float | None = 0.9, top: int = 5, batch: int = 64
    ) -> list[dict[str, Any]]:
        """Return the entries of ``frugalvit predict --json`` for each image: classes, set, distance to training.

        The model must be calibrated: a run with a val split, a saved probe, or their export.
        """
        if not self.backbone.num_classes:
            raise UserError(f"{self.name} has no classifier; use features() instead.")
        top, batch = to_count("top", top), to_count("batch", batch)
        inputs, answers = as_list(pictures), []
        with eval_no_grad(self):
            for first in range(0, len(inputs), batch):
                pooled = self.features(self.transform(inputs[first : first + batch])).pooled
                answers += answer_features(self.model, pooled, top=top, coverage=coverage)
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
    """Load a model in eval mode from a run, a checkpoint, an exported folder, or by a name.

    device:   "auto" chooses the best one
    img_size: another input size than the model's own
    backbone: the architecture of a bare checkpoint

    torch's random state and settings do not change.
    """
    size = None if img_size is None else to_size(img_size)
    with hardware.preserve_onednn(), torch.random.fork_rng(devices=[]):
        kind, number = numbered_device(device)
        target = f"{kind}:{number}" if number else kind
        return ReadyModel(load_model(str(model), target, img_size=size, architecture=backbone)).eval()
