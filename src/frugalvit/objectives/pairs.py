"""Drloc's pairs of grid positions: m of them for every image, uniform and with replacement (§4).

They are drawn as numbers of cells, which is one operation; where a cell lies can be compiled with the loss.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

Size = tuple[int, int]
Device = torch.device | str | None


def draw_pairs(
    batch: int,
    size: Size,
    pairs: int,
    *,
    generator: Generator | None = None,
    device: Device = None,
) -> tuple[Tensor, Tensor]:
    """``pairs`` pairs of grid positions per image, uniform and with replacement: two (B, m, 2) tensors of (row, col).

    Drawn on ``device``; with a generator of another device they are drawn there and moved.
    """
    source = generator.device if generator is not None else device
    cells = draw_cells(batch, size, pairs, generator, source)
    first, second = positions(cells, size[1]).to(device=device, non_blocking=True)
    return first, second


def draw_cells(batch: int, size: Size, pairs: int, generator: Generator | None, device: Device) -> Tensor:
    """The cells of the pairs' first and second positions, counted row by row: (2, B, m)."""
    cells, shape = size[0] * size[1], (2, batch, pairs)
    if generator is None:  # not as a keyword: with it the compiler takes no batch whose size is yet to come
        return torch.randint(cells, shape, device=device)
    return torch.randint(cells, shape, generator=generator, device=device)


def positions(cells: Tensor, width: int) -> Tensor:
    """Cells (...) of a grid of this width -> (..., 2), (row, col)."""
    return torch.stack((cells // width, cells % width), dim=-1)
