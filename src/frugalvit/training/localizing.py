"""Drloc's pairs of one step: drawn for the whole batch, of which a process takes those of its own images.

So N processes judge the very pairs that one process would, and a resumed run the pairs it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frugalvit.data.randomness import generator_for
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.objectives.localization import draw_pairs


@dataclass(frozen=True)
class Share:
    """Which equal part of every batch this process has."""

    seed: int = 0
    rank: int = 0
    world: int = 1


def measure(
    localization: RelativeLocalization | DenseLocalization,
    grids: Tensor | Sequence[Tensor],
    step: int,
    share: Share,
    views: int = 1,
) -> tuple[Tensor, Tensor]:
    """Loss and error in cells of the grids (views · B, D, h, w), the images of one view after those of another."""
    device = grids.device if isinstance(grids, Tensor) else grids[0].device
    generator = torch.Generator(device).manual_seed(generator_for(share.seed, "pairs", step).initial_seed())

    def one(head: RelativeLocalization, grid: Tensor) -> tuple[Tensor, Tensor]:
        if head.pairs == "all":
            return head.measure(grid)
        size = head.pooled_size(grid.shape[-2], grid.shape[-1])
        images = len(grid) // views
        mine = slice(share.rank * images, (share.rank + 1) * images)
        drawn = draw_pairs(len(grid) * share.world, size, head.pairs, generator=generator, device=device)
        first, second = (ends.unflatten(0, (views, -1))[:, mine].flatten(0, 1) for ends in drawn)
        return head.measure_at(grid, first, second)

    if isinstance(localization, RelativeLocalization):
        assert isinstance(grids, Tensor)
        return one(localization, grids)
    answers = [one(head, grid) for head, grid in zip(localization.levels, grids, strict=True)]  # type: ignore[arg-type]
    return torch.stack([loss for loss, _ in answers]).sum(), answers[-1][1]
