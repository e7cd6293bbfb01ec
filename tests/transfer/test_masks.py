"""Masks of boxes lie where their boxes do: in pictures, pixel by pixel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from frugalvit.transfer.masks import paste_masks


def slowly_pasted(mask: Tensor, box: list[float], size: tuple[int, int]) -> Tensor:
    """The mask (m, m) at every pixel's centre: four cells around it, each by its nearness; zeros beyond the mask."""
    cells = len(mask)
    left, top, right, bottom = box
    values = torch.zeros(size)
    for row in range(size[0]):
        for column in range(size[1]):
            y = (row + 0.5 - top) / (bottom - top) * cells - 0.5
            x = (column + 0.5 - left) / (right - left) * cells - 0.5
            for i in (math.floor(y), math.floor(y) + 1):
                for j in (math.floor(x), math.floor(x) + 1):
                    if 0 <= i < cells and 0 <= j < cells:
                        values[row, column] += (1 - abs(y - i)) * (1 - abs(x - j)) * mask[i, j]
    return values


@settings(deadline=None, max_examples=25)
@given(
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    cells=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_pixels_are_read_at_their_centres(size: tuple[int, int], cells: int, seed: int) -> None:
    """Boxes of all sizes, over the border too; pixels within rounding of a half may fall to either side."""
    random = torch.Generator().manual_seed(seed)
    low = torch.rand(3, 2, generator=random) * 20 - 5
    boxes = torch.cat([low, low + 0.1 + torch.rand(3, 2, generator=random) * 20], 1)
    masks = torch.rand(3, 1, cells, cells, generator=random)
    found = paste_masks(masks, boxes, size)
    assert found.shape == (3, *size) and found.dtype == torch.bool
    for inside, mask, box in zip(found, masks, boxes.tolist(), strict=True):
        wanted = slowly_pasted(mask[0], box, size)
        clear = (wanted - 0.5).abs() > 1e-4
        assert torch.equal(inside[clear], (wanted >= 0.5)[clear])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_full_mask_fills_its_box_and_no_more(precision: torch.dtype) -> None:
    boxes = torch.tensor([[10.0, 20, 20, 30], [0, 0, 40, 50], [3, 4, 4, 5], [10.4, 10.4, 12.6, 12.6], [5.6, 5, 6.4, 9]])
    with torch.autocast("cpu", torch.bfloat16):  # which would round where a pixel lies
        found = paste_masks(torch.ones(5, 1, 28, 28, dtype=precision), boxes, (50, 40))
    wanted = torch.zeros(5, 50, 40, dtype=torch.bool)
    wanted[0, 20:30, 10:20] = wanted[1] = wanted[2, 4, 3] = wanted[3, 10:13, 10:13] = True
    assert torch.equal(found, wanted), "the last is narrower than a pixel and holds no centre"
    assert paste_masks(torch.ones(0, 1, 28, 28), boxes[:0], (50, 40)).shape == (0, 50, 40)


def test_interpolation_is_torchs() -> None:
    torch.manual_seed(0)
    mask, (left, top, right, bottom) = torch.rand(1, 1, 28, 28), (13.3, 7.7, 91.2, 60.1)
    rows, columns = (torch.arange(70) + 0.5 - top) / (bottom - top), (torch.arange(100) + 0.5 - left) / (right - left)
    grid = torch.stack(torch.meshgrid(2 * rows - 1, 2 * columns - 1, indexing="ij")[::-1], -1)[None]
    wanted = F.grid_sample(mask, grid, align_corners=False)[0, 0]
    found = paste_masks(mask, torch.tensor([[left, top, right, bottom]]), (70, 100))[0]
    clear = (wanted - 0.5).abs() > 1e-4
    assert torch.equal(found[clear], (wanted >= 0.5)[clear]) and 0 < found.sum() < found.numel()
