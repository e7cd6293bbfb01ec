"""Distillation of features: a student learns the pooled features and the token grid of a frozen teacher.

Targets are layer-normalized, as in Feature Distillation (Wei et al. 2022, arXiv:2205.14141). Teacher and student see
the same view of an image, as in Beyer et al. 2022 (arXiv:2106.05237).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives.registry import Objective, ObjectiveContext, register_objective


def distillation_targets(teacher: Features, grid_size: tuple[int, int]) -> Features:
    """Return what a student with a grid of ``grid_size`` cells learns: LN(pooled) and R(LN(grid)), in float32.

    LN: layer norm over the channels of each vector, without weights
    R:  bilinear resampling with an antialiasing filter; it does nothing if the grid has this size
    """
    channels_last = teacher.grid.float().permute(0, 2, 3, 1)
    grid = F.layer_norm(channels_last, channels_last.shape[-1:]).permute(0, 3, 1, 2)
    if (grid.shape[2], grid.shape[3]) != grid_size:
        grid = F.interpolate(grid.contiguous(), grid_size, mode="bilinear", antialias=True)
    pooled = teacher.pooled.float()
    return Features(grid, F.layer_norm(pooled, pooled.shape[-1:]))


@register_objective("distillation")
class FeatureDistillation(Objective):
    """L = w_g · l(P_g s_g, R(LN(t_g))) + w_p · l(P_p s_p, LN(t_p)), with l the mean of the smooth L1 distance.

    s, t: the student's and the teacher's Features (grid and pooled); R and LN: see ``distillation_targets``
    P:    a linear map from the student's width to the teacher's; it is used in training only

    dim, teacher_dim:               channels of the two grids
    pooled_dim, teacher_pooled_dim: width of the two pooled features, if it is another
    grid_weight, pooled_weight:     w_g and w_p
    """

    def __init__(
        self,
        dim: int,
        teacher_dim: int | None = None,
        pooled_dim: int | None = None,
        teacher_pooled_dim: int | None = None,
        grid_weight: float = 1.0,
        pooled_weight: float = 1.0,
    ) -> None:
        super().__init__(dim)
        if grid_weight < 0 or pooled_weight < 0 or not grid_weight + pooled_weight > 0:
            raise UserError(f"grid_weight {grid_weight} and pooled_weight {pooled_weight}: one must be above 0.")
        self.grid_weight, self.pooled_weight = grid_weight, pooled_weight
        teacher_dim = teacher_dim or dim
        self.grid_map = nn.Linear(dim, teacher_dim) if grid_weight else None
        self.pooled_map = nn.Linear(pooled_dim or dim, teacher_pooled_dim or teacher_dim) if pooled_weight else None

    def forward(self, features: Features, context: ObjectiveContext) -> Tensor:
        if context.teacher is None:
            raise UserError("The objective 'distillation' needs a teacher, which this command does not have.")
        targets = distillation_targets(context.teacher, (features.grid.shape[2], features.grid.shape[3]))
        return self.losses(features, targets)["loss"]

    def losses(self, features: Features, targets: Features) -> dict[str, Tensor]:
        """Return ``loss`` and its parts, which are logged. ``targets`` are those of ``distillation_targets``."""
        parts: dict[str, Tensor] = {}
        total = features.grid.new_zeros((), dtype=torch.float32)
        if self.grid_map is not None:
            answer = self.grid_map(features.grid.permute(0, 2, 3, 1))
            loss = F.smooth_l1_loss(answer.float(), targets.grid.permute(0, 2, 3, 1).float())
            parts["grid_loss"], total = loss.detach(), total + self.grid_weight * loss
        if self.pooled_map is not None:
            loss = F.smooth_l1_loss(self.pooled_map(features.pooled).float(), targets.pooled.float())
            parts["pooled_loss"], total = loss.detach(), total + self.pooled_weight * loss
        return {"loss": total, **parts}
