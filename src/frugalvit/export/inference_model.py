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
from frugalvit.tasks.classification.predict import nonfinite_message
from frugalvit.tasks.classification.target import load_target


class ReadyModel(nn.Module):
    """A network with its preprocessing, class names, and a record of its training."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.backbone: Backbone = model.backbone
        self.classes = model.classes
        self.name, self.meta = model.name, model.meta
        self._transform = model.transform
        self.pixels = model.transform.pixels
        self.target = load_target(model, model.classes or ())

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
        return torch.cat([self._transform.image(image, weight.device) for image in inputs]).to(weight.dtype)

    def features(self, images: Tensor) -> Features:
        """Compute the features of (B, C, h, w): grid (B, D, h', w') and pooled (B, D)."""
        with cpu_settings(next(self.parameters()).device):
            return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (B, classes), or pooled features (B, D) if there is no classifier."""
        with cpu_settings(next(self.parameters()).device):
            pooled = self.backbone(images).pooled
            return self.backbone.classify(pooled) if self.backbone.num_classes else pooled

    @torch.inference_mode()
    def predict(self, pictures: Any, top: int = 5, batch: int = 64) -> list[list[tuple[str, float]]]:
        """Return the ``top`` classes or labels of each image with their probabilities; or the name and the number.

        The model predicts in eval mode, ``batch`` images at a time.
        """
        if not self.backbone.num_classes:
            raise UserError(f"{self.name} has no classifier; use features() instead.")
        top, batch = to_count("top", top), to_count("batch", batch)
        inputs = as_list(pictures)
        names = self.classes or tuple(str(index) for index in range(self.backbone.num_classes))
        predictions: list[list[tuple[str, float]]] = []
        with eval_no_grad(self):
            for first in range(0, len(inputs), batch):
                logits = self(self.transform(inputs[first : first + batch])).float()
                if not bool(logits.isfinite().all()):
                    raise UserError(nonfinite_message(self.name))
                probabilities, best = self.target.answers(logits).topk(min(top, len(names)), dim=1)
                for row in zip(best.tolist(), probabilities.tolist(), strict=True):
                    predictions.append([(names[index], probability) for index, probability in zip(*row, strict=True)])
        return predictions

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
