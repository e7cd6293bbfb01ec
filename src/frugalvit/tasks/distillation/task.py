"""DistillationTask: a student learns the features that a frozen teacher has of the same images."""

from typing import Any

import torch
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

    def forward(self, batch: Batch, step: int) -> dict[str, Tensor]:
        return self.compute_losses(batch.images, *self._targets(batch))

    def compute_losses(self, images: Tensor, grid: Tensor, pooled: Tensor) -> dict[str, Tensor]:
        """Compute the losses to the targets ``grid`` and ``pooled``."""
        return self.objective.losses(self.student(images), Features(grid, pooled))

    def _targets(self, batch: Batch) -> Features:
        if self.cached is None:
            return self.frozen_teacher(batch.images)
        batches: Any = self.batches  # Batches of a store: a stream has no numbered images
        flips = batches.augment.flips(batches.augment_draws(batch.number))
        return self.cached.at(batch.index, flips, batch.images.device)

    def compile_with(self, graphs: bool) -> None:
        """Compile the student's step and the teacher. Evaluations run the plain student."""
        self.compute_losses = torch.compile(self.compute_losses, dynamic=False)
        self.frozen_teacher.network.compile(dynamic=False)

    @property
    def cuda_graphs_blocker(self) -> str:
        return "the teacher is not part of a step's graph"
