"""Masks are cropped and pasted exactly where their boxes are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from frugalvit.tasks.detection.masks import crop_masks, mask_loss, paste_masks


def slowly_pasted(mask: Tensor, box: list[float], size: tuple[int, int]) -> Tensor:
    """The oracle: bilinear interpolation of a mask (m, m) at every pixel centre, with zeros around the mask."""
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
@given(size=st.tuples(st.integers(1, 20), st.integers(1, 20)), cells=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_masks_are_interpolated_at_pixel_centres(size: tuple[int, int], cells: int, seed: int) -> None:
    """Boxes of all sizes, also over the border. Values within rounding of 0.5 are not compared."""
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
def test_a_full_mask_fills_exactly_its_box(precision: torch.dtype) -> None:
    boxes = torch.tensor([[10.0, 20, 20, 30], [0, 0, 40, 50], [3, 4, 4, 5], [10.4, 10.4, 12.6, 12.6], [5.6, 5, 6.4, 9]])
    with torch.autocast("cpu", torch.bfloat16):  # which would round where a pixel lies
        found = paste_masks(torch.ones(5, 1, 28, 28, dtype=precision), boxes, (50, 40))
    wanted = torch.zeros(5, 50, 40, dtype=torch.bool)
    wanted[0, 20:30, 10:20] = wanted[1] = wanted[2, 4, 3] = wanted[3, 10:13, 10:13] = True
    assert torch.equal(found, wanted), "the last is narrower than a pixel and holds no centre"
    assert paste_masks(torch.ones(0, 1, 28, 28), boxes[:0], (50, 40)).shape == (0, 50, 40)


def test_interpolation_equals_torch() -> None:
    torch.manual_seed(0)
    mask, (left, top, right, bottom) = torch.rand(1, 1, 28, 28), (13.3, 7.7, 91.2, 60.1)
    rows, columns = (torch.arange(70) + 0.5 - top) / (bottom - top), (torch.arange(100) + 0.5 - left) / (right - left)
    grid = torch.stack(torch.meshgrid(2 * rows - 1, 2 * columns - 1, indexing="ij")[::-1], -1)[None]
    wanted = F.grid_sample(mask, grid, align_corners=False)[0, 0]
    found = paste_masks(mask, torch.tensor([[left, top, right, bottom]]), (70, 100))[0]
    clear = (wanted - 0.5).abs() > 1e-4
    assert torch.equal(found[clear], (wanted >= 0.5)[clear]) and 0 < found.sum() < found.numel()


def slowly_cut(mask: Tensor, box: list[float], side: int) -> Tensor:
    """The oracle: a cell is the mean of samples spread evenly in it, at most a pixel apart."""
    height, width = mask.shape
    left, top, right, bottom = box
    high, wide = (bottom - top) / side, (right - left) / side
    down, across = math.ceil(high), math.ceil(wide)
    values = torch.zeros(side, side)
    for row in range(side):
        for column in range(side):
            for i in range(down):
                for j in range(across):
                    y = top + high * (row + (i + 0.5) / down) - 0.5
                    x = left + wide * (column + (j + 0.5) / across) - 0.5
                    for p in (math.floor(y), math.floor(y) + 1):
                        for q in (math.floor(x), math.floor(x) + 1):
                            pixel = mask[min(max(p, 0), height - 1), min(max(q, 0), width - 1)]
                            values[row, column] += (1 - abs(y - p)) * (1 - abs(x - q)) * pixel / (down * across)
    return values


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=4), side=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_loss_and_gradients_equal_a_loop(counts: list[int], side: int, seed: int) -> None:
    """With three regions for every object of an image."""
    random = torch.Generator().manual_seed(seed)
    targets, regions, owners = [], [], []
    for count in counts:
        low = torch.rand(3 * count, 2, generator=random) * 6
        regions.append(torch.cat([low, low + 0.2 + torch.rand(3 * count, 2, generator=random) * 2.8], 1))
        owners.append(torch.randint(0, max(1, count), (3 * count,), generator=random))
        masks = torch.randint(0, 2, (count, 9, 12), generator=random, dtype=torch.uint8)
        targets.append({"labels": torch.randint(1, 4, (count,), generator=random), "masks": masks})
    weights = torch.randn(4, 4 * side * side, generator=random, requires_grad=True)
    logits = (torch.cat(regions) @ weights / 5).view(-1, 4, side, side)
    loss = mask_loss(logits, regions, owners, targets)
    terms = []
    for target, boxes, owner in zip(targets, regions, owners, strict=True):
        for box, one in zip(boxes, owner.tolist(), strict=True):
            cells = slowly_cut(target["masks"][one].float(), box.tolist(), side)
            logit = (box @ weights / 5).view(4, side, side)[target["labels"][one]]
            terms.append(-(cells * F.logsigmoid(logit) + (1 - cells) * F.logsigmoid(-logit)).mean())
    slow = torch.stack(terms).mean() if terms else weights.sum() * 0
    assert torch.allclose(loss, slow, atol=1e-5)
    fast, loop = (torch.autograd.grad(part, weights)[0] for part in (loss, slow))
    assert torch.allclose(fast, loop, atol=1e-5)


@pytest.mark.parametrize("box", [(30, 20, 54, 44), (0, 0, 28, 28), (7, 5, 91, 61)])
def test_cropping_and_pasting_keeps_positions(box: tuple[int, int, int, int]) -> None:
    """A frame with a hole, cropped and pasted back; a shift of half a pixel would show."""
    left, top, right, bottom = box
    mask = torch.zeros(1, 70, 100, dtype=torch.uint8)
    mask[0, top:bottom, left:right] = 1
    mask[0, top + 8 : bottom - 8, left + 8 : right - 8] = 0
    boxes = torch.tensor([box], dtype=torch.float32)
    cut = crop_masks(mask, torch.tensor([0]), boxes, 28)
    assert torch.allclose(cut, cut.flip(1, 2), atol=1e-4)
    again = paste_masks(cut[None], boxes, (70, 100))
    overlap = (again & mask.bool()).sum() / (again | mask.bool()).sum()
    assert overlap > 0.97
