"""InstanceTask: label-free pre-training of small data, in which every image is a class of its own."""

import copy
from typing import Any

import numpy as np
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.loader import Batch
from frugalvit.engine.ema import EMA
from frugalvit.errors import UserError
from frugalvit.objectives import InstanceClassification
from frugalvit.tasks.pretraining.task import FeatureTask


class InstanceTask(FeatureTask):
    """A student that names its training images, and the EMA of its weights, which is the result."""

    def __init__(self, student: Backbone, images: int, ema: float, weight_decay: float) -> None:
        super().__init__(student, weight_decay)
        self.instances = InstanceClassification(student.pooled_dim, images)
        self.ema = ema
        self.average = copy.deepcopy(student).requires_grad_(False)
        self.average_update = EMA(self.average, student, buffers=True)

    @property
    def result(self) -> Backbone:
        return self.average

    def step_inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        """Return the arguments of :meth:`compute_losses`."""
        return batch.images, batch.targets

    def compute_losses(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the loss of mixed images and their soft targets (B, N)."""
        return {"loss": self.instances(self.student(images), targets)}

    def after_step(self, step: int, skipped: Tensor | None = None) -> None:
        # A low momentum early on keeps the random start out of a short run's average.
        self.average_update.update(min(self.ema, (1 + step) / (10 + step)), skipped)


def number_images(images: ImageDataset) -> ImageDataset:
    if images.streaming is not None:
        raise UserError("--method instances needs access to single images: use --stream false.")
    numbered = copy.copy(images)
    numbered.labels = np.arange(len(images))
    return numbered
