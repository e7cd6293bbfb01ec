"""Region matching: each student region predicts the teacher's distribution of its best match.

EsViT (Li et al., 2022) section 2.2 and Algorithm 1. For a pair of crops with regions z_i (student) and z_j (teacher),

    M_R(s, t) = -1/T Σ_i p_{j*} · log p_i,   j* = argmax_j cos(z_i, z_j)      (2)
    L_R = 1/|P| Σ_{(s,t) in P} M_R(s, t)

Regions are matched on backbone features, before the head and without gradient. p_j is centered and sharpened as in
view_matching.py, with a separate head and center. Algorithm 1 matches by plain dot products; Eq. 2, the released code
and this module use the cosine.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives.checks import check_crops
from frugalvit.objectives.matching import Matching, count_pairs, cross_entropy, teacher_probs, teachers_of


@torch.no_grad()
def match_regions(student_grid: Tensor, teacher_grid: Tensor) -> Tensor:
    """Match student to teacher regions: (B, D, h, w), (B, D, h', w') -> flat indices (B, h·w)."""
    return _match_all([student_grid], [teacher_grid])[0]


def region_loss(
    student_logits: Sequence[Tensor],
    teacher_logits: Sequence[Tensor],
    student_grids: Sequence[Tensor],
    teacher_grids: Sequence[Tensor],
    *,
    center: Tensor,
    student_temp: float = 0.1,
    teacher_temp: float | Tensor = 0.04,
) -> Tensor:
    """Return L_R over lists with one entry per crop: logits (B, T, K) and grids (B, D, h, w).

    T = h·w, row by row. The teacher's crops are the student's first, in order. Sizes and number of crops are free.
    """
    pairs = count_pairs(len(student_logits), len(teacher_logits))
    for name, logits, grids in (
        ("student_logits", student_logits, student_grids),
        ("teacher_logits", teacher_logits, teacher_grids),
    ):
        check_crops(name, logits, 3, len(student_logits[0]), student_logits[0].shape[-1], axis=-1)
        if [crop.shape[1] for crop in logits] != [grid.shape[2:].numel() for grid in grids]:
            raise UserError(f"{name} and grids do not fit: use one grid per crop, with one cell per region.")
    sizes = [logits.shape[1] for logits in student_logits]
    with torch.autocast(student_logits[0].device.type, enabled=False), torch.no_grad():
        targets = [teacher_probs(logits, center, teacher_temp) for logits in teacher_logits]
        matches = [match.split(sizes, dim=1) for match in _match_all(student_grids, teacher_grids)]
    loss = student_logits[0].new_zeros((), dtype=torch.float32)
    for crop, logits in enumerate(student_logits):
        target = None  # Σ_t p_{j*(t)}
        for t in teachers_of(crop, len(targets)):
            matched = torch.take_along_dim(targets[t], matches[t][crop][..., None], dim=1)
            target = matched if target is None else target + matched
        if target is not None:
            loss = loss + cross_entropy(logits, target, student_temp).mean()
    return loss / pairs


class RegionMatching(Matching):
    """L_R on ``Features.grid``; see :class:`Matching` for the options."""

    level = "grid"

    def _rows(self, features: Features) -> Tensor:
        return features.grid.flatten(2).transpose(1, 2)

    def _plain_loss(
        self,
        student_logits: Sequence[Tensor],
        teacher_logits: Sequence[Tensor],
        student_features: Sequence[Features],
        teacher_features: Sequence[Features],
        teacher_temp: float | Tensor,
    ) -> Tensor:
        return region_loss(
            student_logits,
            teacher_logits,
            [crop.grid for crop in student_features],
            [crop.grid for crop in teacher_features],
            center=self.center,
            student_temp=self.student_temp,
            teacher_temp=teacher_temp,
        )

    @torch.no_grad()
    def assignment(self, student_features: Sequence[Features], teacher_features: Sequence[Features]) -> Tensor:
        student_grids = [crop.grid for crop in student_features]
        teacher_grids = [crop.grid for crop in teacher_features]
        batch, pairs = len(student_grids[0]), count_pairs(len(student_grids), len(teacher_grids))
        precise = {
            "dtype": torch.promote_types(student_grids[0].dtype, torch.float32),
            "device": student_grids[0].device,
        }
        blocks = []
        for t, match in enumerate(_match_all(student_grids, teacher_grids)):
            weights = []
            for crop, grid in enumerate(student_grids):
                regions = grid.shape[2:].numel()
                weights.append(torch.full((regions,), 0.0 if crop == t else 1 / (batch * pairs * regions), **precise))
            weight = torch.cat(weights)[None, :, None].expand(batch, -1, 1)
            block = torch.zeros(*match.shape, teacher_grids[t].shape[2:].numel(), **precise)
            blocks.append(block.scatter_(2, match[..., None], weight))
        return torch.cat(blocks, dim=2)

    def _extra_health(
        self, assignment: Tensor, student_features: Sequence[Features], teacher_features: Sequence[Features]
    ) -> dict[str, Tensor]:
        """Return match_entropy: how evenly matches spread over the teacher's regions, 0 (one region) to 1."""
        student_sizes = [crop.grid.shape[2:].numel() for crop in student_features]
        teacher_sizes = [crop.grid.shape[2:].numel() for crop in teacher_features]
        entropies = []
        for t, block in enumerate(assignment.split(teacher_sizes, dim=2)):
            for crop, pair in enumerate(block.split(student_sizes, dim=1)):
                max_regions = min(student_sizes[crop], teacher_sizes[t])
                if crop != t and max_regions > 1:
                    shares = pair.sum(1) / pair.sum((1, 2))[:, None]
                    entropies.append(torch.special.entr(shares).sum(1).mean() / math.log(max_regions))
        return {"match_entropy": torch.stack(entropies).mean()} if entropies else {}


def _match_all(student_grids: Sequence[Tensor], teacher_grids: Sequence[Tensor]) -> list[Tensor]:
    """Return the best region of each teacher crop for every student region, (B, ΣT), by one product."""
    batch, width = student_grids[0].shape[:2]
    for name, grids in (("student grids", student_grids), ("teacher grids", teacher_grids)):
        check_crops(name, grids, 4, batch, width)
    dtype = torch.float32
    for grid in (*student_grids, *teacher_grids):
        dtype = torch.promote_types(dtype, grid.dtype)
    with torch.autocast(student_grids[0].device.type, enabled=False):
        student, teacher = (
            torch.cat([grid.flatten(2) for grid in grids], dim=2).to(dtype) for grids in (student_grids, teacher_grids)
        )
        similarity = F.normalize(student, dim=1).mT @ F.normalize(teacher, dim=1)  # (B, ΣT, ΣT')
        sizes = [grid.shape[2:].numel() for grid in teacher_grids]
        return [block.argmax(2) for block in similarity.split(sizes, dim=2)]
