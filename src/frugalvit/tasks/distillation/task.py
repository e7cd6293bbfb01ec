"""DistillationTask: a student learns the features that a frozen teacher has of the same images."""

from typing import Any

from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.data.loader import Batch
from frugalvit.features import Features
from frugalvit.objectives import FeatureDistillation
from frugalvit.tasks.distillation.teacher import CachedTargets, Teacher
from frugalvit.tasks.pretraining.task import FeatureTask


class DistillationTask(FeatureTask):
    """Student, frozen teacher, and the loss between their features. ``cached`` replaces the teacher's forward pass."""

    cached: CachedTargets | None = None

    def __init__(self, student: Backbone, teacher: Teacher, objective: FeatureDistillation, decay: float) -> None:
        super().__init__(student, decay)
        # Not named "teacher": weights of that name in a checkpoint are the network to export.
        self.frozen_teacher, self.objective = teacher, objective

    def step_inputs(self, batch: Batch, step: int) -> tuple[Any, ...]:
        """Return the images, and the targets if they are cached."""
        if self.cached is None:
            return (batch.images,)
        batches: Any = self.batches  # Batches of a store: a stream has no numbered images
        flips = batches.augment.flips(batches.augment_draws(batch.number))
        return batch.images, *self.cached.at(batch.index, flips, batch.images.device)

    def compute_losses(self, images: Tensor, *cached: Tensor) -> dict[str, Tensor]:
        """Compute the losses to the teacher's features, or to the cached grid and pooled features."""
        targets = Features(*cached) if cached else self.frozen_teacher(images)
        return self.objective.losses(self.student(images), targets)

    def compile_with(self, graphs: bool) -> None:
        super().compile_with(graphs)
        self.frozen_teacher.network.compile(dynamic=False)
