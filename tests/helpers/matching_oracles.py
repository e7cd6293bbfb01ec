"""The view and region losses as the paper's formulas: loops over images, pairs and regions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from frugalvit.features import Features

Crops = dict[str, Any]


def view_oracle(
    student: Sequence[Tensor], teacher: Sequence[Tensor], center: Tensor, student_temp: float, teacher_temp: float
) -> Tensor:
    """Eq. 1 over logits (B, K) per crop."""
    losses = []
    for t, teacher_logits in enumerate(teacher):
        for s, student_logits in enumerate(student):
            if s == t:
                continue
            per_image = []
            for b in range(len(teacher_logits)):
                p_t = ((teacher_logits[b] - center) / teacher_temp).softmax(0)
                p_s = (student_logits[b] / student_temp).softmax(0)
                per_image.append(-(p_t * p_s.log()).sum())
            losses.append(torch.stack(per_image).mean())
    return torch.stack(losses).mean()


def best_match(student_region: Tensor, teacher_grid: Tensor) -> int:
    """argmax_j of the cosine between a region (D) and the regions of a grid (D, h, w), row by row."""
    regions = teacher_grid.flatten(1).T
    similarity = [torch.cosine_similarity(student_region, region, dim=0).item() for region in regions]
    return int(np.argmax(similarity))


def region_oracle(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    student_grids: Sequence[Tensor],
    teacher_grids: Sequence[Tensor],
    center: Tensor,
    student_temp: float,
    teacher_temp: float,
) -> Tensor:
    """Eq. 2 over logits (B, T, K) and grids (B, D, h, w) per crop."""
    losses = []
    for t, teacher_logits in enumerate(teacher):
        for s, student_logits in enumerate(student):
            if s == t:
                continue
            per_image = []
            for b in range(len(teacher_logits)):
                per_region = []
                for i, region in enumerate(student_grids[s][b].flatten(1).T):
                    j = best_match(region, teacher_grids[t][b])
                    p_j = ((teacher_logits[b, j] - center) / teacher_temp).softmax(0)
                    p_i = (student_logits[b, i] / student_temp).softmax(0)
                    per_region.append(-(p_j * p_i.log()).sum())
                per_image.append(torch.stack(per_region).mean())
            losses.append(torch.stack(per_image).mean())
    return torch.stack(losses).mean()


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def crop_sets(draw: Any, dim: int = 6, prototypes: int = 7) -> Crops:
    """Random sets of crops of different sizes: one to three global ones, up to three local ones."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    global_sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
    local_sizes = draw(st.lists(SIZES, min_size=0 if len(global_sizes) > 1 else 1, max_size=3))
    batch = draw(st.integers(1, 3))

    def grids(sizes: list[tuple[int, int]]) -> list[Tensor]:
        return [torch.randn(batch, dim, *size, dtype=torch.float64) for size in sizes]

    def logits(sizes: list[tuple[int, int]]) -> list[Tensor]:
        return [torch.randn(batch, h * w, prototypes, dtype=torch.float64) for h, w in sizes]

    sizes = global_sizes + local_sizes
    return {
        "student_grids": grids(sizes),
        "teacher_grids": grids(global_sizes),
        "student_logits": [part.requires_grad_() for part in logits(sizes)],
        "teacher_logits": logits(global_sizes),
        "center": torch.randn(prototypes, dtype=torch.float64) * 0.1,
    }


def features_of(grids: Sequence[Tensor]) -> list[Features]:
    return [Features(grid, grid.mean((2, 3))) for grid in grids]


def golden_crops(arrays: dict[str, np.ndarray]) -> dict[str, list[Tensor]]:
    """b_ddino's crop-major rows as one tensor per crop: three images, two global (7×7) and four local (3×3) crops."""

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(arrays[name].astype(np.float32))

    def regions(name: str, crops: int) -> list[Tensor]:
        rows = tensor(name)
        parts = list(rows[: 2 * 3 * 49].view(2, 3, 49, -1))
        return parts + list(rows[2 * 3 * 49 :].view(crops - 2, 3, 9, rows.shape[1])) if crops > 2 else parts

    def grids(name: str, crops: int) -> list[Tensor]:
        sides = [7, 7] + [3] * (crops - 2)
        return [part.mT.unflatten(2, (side, side)) for part, side in zip(regions(name, crops), sides, strict=True)]

    return {
        "student_views": list(tensor("s_cls").view(6, 3, -1)),
        "teacher_views": list(tensor("t_cls").view(2, 3, -1)),
        "student_regions": regions("s_reg", 6),
        "teacher_regions": regions("t_reg", 2),
        "student_grids": grids("s_fea", 6),
        "teacher_grids": grids("t_fea", 2),
    }
