"""Drloc in a run: its head, and the pairs of one batch.

Pairs are drawn for the whole batch, of which a process takes those of its own images: N processes judge the very pairs
that one process would, and a resumed run the pairs it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frugalvit.config.train import DrlocConfig
from frugalvit.data.rng import generator_for
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.objectives.localization import draw_cells, positions

Pairs = Tensor | None
"""The cells of the pairs' first and second tokens, (2, B, m); None where every pair is judged."""


@dataclass(frozen=True)
class BatchShard:
    """Which equal part of every batch this process has."""

    seed: int = 0
    rank: int = 0
    world: int = 1


def make_head(settings: DrlocConfig, dim: int, largest: tuple[int, int]) -> RelativeLocalization:
    """The loss for final grids of this width and of at most this size, its hidden layers in the run's precision."""
    variant, grid_size = settings.variant, settings.grid_size
    assert variant != "auto" and grid_size != "auto"  # pyright: ignore[reportUnnecessaryComparison]
    if grid_size is None and variant in ("ce", "reg"):
        grid_size = largest  # kept as it is: it is as large as its classes are many
    width = settings.head_width(dim)
    return RelativeLocalization(dim, variant, settings.pairs, width, grid_size, settings.form, precision="autocast")


def pair_generator(number: int, share: BatchShard, device: torch.device) -> torch.Generator:
    """What the pairs of the run's batch of this number are drawn with."""
    return torch.Generator(device).manual_seed(generator_for(share.seed, "pairs", number).initial_seed())


def draw(
    head: RelativeLocalization,
    grid_size: tuple[int, int],
    images: int,
    share: BatchShard,
    generator: torch.Generator,
    views: int = 1,
) -> Pairs:
    """The pairs of this process' ``images``, views · B of them, for grids of this size."""
    if head.pairs == "all":
        return None
    size = head.pooled_size(*grid_size)
    drawn = draw_cells(images * share.world, size, head.pairs, generator, generator.device)
    if share.world == 1:
        return drawn
    each = images // views
    mine = slice(share.rank * each, (share.rank + 1) * each)
    return drawn.unflatten(1, (views, -1))[:, :, mine].flatten(1, 2)


def loss_at(head: RelativeLocalization, grid: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Loss and error in cells of a grid (B, D, h, w) at these pairs."""
    if pairs is None:
        return head.measure(grid)
    first, second = positions(pairs, head.pooled_size(grid.shape[2], grid.shape[3])[1])
    return head.measure_at(grid, first, second)


def measure(
    localization: DenseLocalization, grids: Sequence[Tensor], number: int, share: BatchShard
) -> tuple[Tensor, Tensor]:
    """Loss of the grids (B, C_l, h_l, w_l) of all blocks at pairs drawn for each; the last one's error."""
    generator = pair_generator(number, share, grids[0].device)
    return localization.apply_per_level(
        grids,
        lambda head, grid: loss_at(head, grid, draw(head, (grid.shape[2], grid.shape[3]), len(grid), share, generator)),
    )
