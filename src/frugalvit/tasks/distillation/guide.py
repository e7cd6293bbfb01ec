"""Guide: a trained network whose token grid a supervised run learns at first (``frugalvit train --guide MODEL``)."""

import torch
from torch import Tensor, nn

from frugalvit.engine.schedule import Schedule
from frugalvit.features import Features
from frugalvit.objectives import FeatureDistillation
from frugalvit.tasks.distillation.teacher import Teacher


class Guide(nn.Module):
    """The grid term of distillation as a further loss; ``weight`` falls to 0 within the run."""

    def __init__(self, teacher: Teacher, dim: int, weight: Schedule) -> None:
        super().__init__()
        self.source, self.weight = teacher, weight
        self.head = FeatureDistillation(dim, teacher.network.dim, pooled_weight=0.0)

    def targets(self, images: Tensor, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the grid to learn and the weight of the loss; None after the weight has reached 0."""
        if not self.weight.at(step):
            return None, None
        return self.source(images).grid, images.new_full((), self.weight.at(step), dtype=torch.float32)

    def loss(self, features: Features, grid: Tensor | None, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted loss, and the loss to log."""
        if grid is None or weight is None:
            # DDP needs the same parameters on every rank and step: these take part with weight zero.
            return 0.0 * torch.stack([parameter.sum() for parameter in self.head.parameters()]).sum(), {}
        loss = self.head.losses(features, Features(grid, features.pooled))["loss"]
        return weight * loss, {"guide_loss": loss.detach()}
