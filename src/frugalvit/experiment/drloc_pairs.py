"""Drloc inside a task: its head, and the token pairs of one batch.

Pairs are drawn for the full batch, and each rank takes those of its images: N ranks use the same pairs as one rank, and
a resumed run uses the same pairs as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frugalvit.config.train import DrlocConfig
from frugalvit.data.rng import generator_for
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.objectives.drloc import draw_cells, positions

Pairs = Tensor | None
"""Cells of the first and second tokens of the pairs, (2, B, m); None if all pairs are used."""


@dataclass(frozen=True)
class BatchShard:
    """Which equal part of every batch this rank has."""

    seed: int = 0
    rank: int = 0
    world: int = 1


def make_head(settings: DrlocConfig, dim: int, largest: tuple[int, int]) -> RelativeLocalization:
    """Build the loss for grids of ``dim`` channels and at most ``largest`` cells, hidden layers in autocast."""
    variant, grid_size = settings.variant, settings.grid_size
    if grid_size is None and variant in ("ce", "reg"):
        grid_size = largest  # the number of classes depends on it
    width = settings.head_width(dim)
    return RelativeLocalization(dim, variant, settings.pairs, width, grid_size, settings.form, precision="autocast")


def pair_generator(number: int, share: BatchShard, device: torch.device) -> torch.Generator:
    """Return the generator for the pairs of the run's batch ``number``."""
    return torch.Generator(device).manual_seed(generator_for(share.seed, "pairs", number).initial_seed())


def draw(
    head: RelativeLocalization,
    grid_size: tuple[int, int],
    images: int,
    share: BatchShard,
    generator: torch.Generator,
    views: int = 1,
) -> Pairs:
    """Draw the pairs of this rank's ``images`` (views · B) on grids of ``grid_size``."""
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
    """Return loss and error (in cells) of a grid (B, D, h, w) at these pairs."""
    if pairs is None:
        return head.measure(grid)
    first, second = positions(pairs, head.pooled_size(grid.shape[2], grid.shape[3])[1])
    return head.measure_at(grid, first, second)


def measure(
    localization: DenseLocalization, grids: Sequence[Tensor], number: int, share: BatchShard
) -> tuple[Tensor, Tensor]:
    """Return the loss of the grids (B, C_l, h_l, w_l) of all blocks at new pairs, and the error of the last."""
    generator = pair_generator(number, share, grids[0].device)
    return localization.apply_per_level(
        grids,
        lambda head, grid: loss_at(head, grid, draw(head, (grid.shape[2], grid.shape[3]), len(grid), share, generator)),
    )
