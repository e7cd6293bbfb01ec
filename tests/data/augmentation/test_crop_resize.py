"""Crops against torchvision's functional, and the distribution of boxes against RandomResizedCrop."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from frugalvit.data.augmentation import crop_resize as crops
from frugalvit.data.augmentation.crop_resize import (
    RANDOM_BOX_COLUMNS,
    boxes_from_uniform,
    center_boxes,
    crop_resize,
    pad_crop,
)
from frugalvit.data.rng import uniform
from helpers.augment_images import DEVICES, LEVEL

BOTH = pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])


def noise(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)


def same_sizes(images: Tensor) -> Tensor:
    return torch.tensor([images.shape[-2:]]).expand(len(images), 2)


def random_resized_boxes(
    sizes: Tensor, scale: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator
) -> Tensor:
    return boxes_from_uniform(sizes, scale, ratio, uniform(len(sizes), RANDOM_BOX_COLUMNS, generator))


def one_by_one(images: Tensor, boxes: Tensor, flips: Tensor, out: tuple[int, int], interpolation: str) -> Tensor:
    results = []
    for image, box, flip in zip(images, boxes.int().tolist(), flips, strict=True):
        mode = InterpolationMode(interpolation)
        cut = functional.resized_crop(image, *box, size=list(out), interpolation=mode, antialias=True)
        results.append(cut.flip(-1) if flip else cut)
    return torch.stack(results)


@BOTH
@DEVICES
@pytest.mark.parametrize(
    ("height", "width", "out"), [(64, 64, (64, 64)), (120, 80, (32, 48)), (37, 50, (96, 40)), (5, 9, (24, 24))]
)
def test_equals_torchvision(height: int, width: int, out: tuple[int, int], interpolation: str, device: str) -> None:
    images = noise(6, height, width)
    generator = torch.Generator().manual_seed(1)
    boxes = random_resized_boxes(same_sizes(images), (0.08, 1.0), (3 / 4, 4 / 3), generator)
    flips = torch.tensor([True, False] * 3)
    ours = crop_resize(images.to(device), same_sizes(images), boxes, flips, out, interpolation).cpu()
    floats = one_by_one(images.float() / 255, boxes, flips, out, interpolation).clamp(0, 1)
    torch.testing.assert_close(ours, floats, atol=1e-5 if device == "cpu" else LEVEL, rtol=0)


@given(
    height=st.integers(4, 60),
    width=st.integers(4, 60),
    out=st.tuples(st.integers(2, 40), st.integers(2, 40)),  # torch's own result is wrong for a width of one pixel
    low=st.floats(0.01, 1.0),
    seed=st.integers(0, 10**6),
)
def test_any_shape_equals_torchvision(height: int, width: int, out: tuple[int, int], low: float, seed: int) -> None:
    images = noise(2, height, width, seed)
    boxes = random_resized_boxes(same_sizes(images), (low, 1.0), (0.5, 2.0), torch.Generator().manual_seed(seed))
    flips = torch.tensor([False, True])
    ours = crop_resize(images, same_sizes(images), boxes, flips, out, "bicubic")
    theirs = one_by_one(images.float() / 255, boxes, flips, out, "bicubic").clamp(0, 1)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_several_views_at_once() -> None:
    images, generator = noise(3, 40, 30), torch.Generator().manual_seed(0)
    sizes = same_sizes(images)
    boxes = torch.stack([random_resized_boxes(sizes, (0.2, 1), (0.75, 1.5), generator) for _ in range(4)], 1)
    flips = torch.rand(3, 4, generator=generator) < 0.5
    together = crop_resize(images, sizes, boxes, flips, (16, 24), "bicubic")
    assert together.shape == (4, 3, 3, 16, 24)
    for view in range(4):
        alone = crop_resize(images, sizes, boxes[:, view], flips[:, view], (16, 24), "bicubic")
        torch.testing.assert_close(together[view], alone)


def test_matrix_products_equal_weighted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU and the CPU path are the same linear map."""
    images, generator = noise(3, 40, 30), torch.Generator().manual_seed(0)
    sizes = same_sizes(images)
    boxes = torch.stack([random_resized_boxes(sizes, (0.2, 1), (0.75, 1.5), generator) for _ in range(2)], 1)
    flips = torch.tensor([[True, False]] * 3)
    by_taps = crop_resize(images, sizes, boxes, flips, (16, 24), "bicubic")
    monkeypatch.setattr(crops, "_by_taps", crops._by_products)
    torch.testing.assert_close(crop_resize(images, sizes, boxes, flips, (16, 24), "bicubic"), by_taps)


def test_float_images_in_float_images_out() -> None:
    images = noise(2, 20, 20)
    sizes, boxes = same_sizes(images), torch.tensor([[2.0, 3, 10, 12], [0, 0, 20, 20]])
    from_bytes = crop_resize(images, sizes, boxes, None, (9, 9))
    torch.testing.assert_close(crop_resize(images.float() / 255, sizes, boxes, None, (9, 9)), from_bytes)


def test_cached_size_does_not_change_the_geometry() -> None:
    """A gradient cached at another aspect ratio gives the same crop as the original."""
    rows = torch.linspace(0, 255, 200)[:, None].expand(200, 120)
    columns = torch.linspace(0, 255, 120).expand(200, 120)
    original = torch.stack([rows, columns, rows / 2 + columns / 2]).round().to(torch.uint8)[None]
    stored = functional.resize(original, [64, 96], antialias=True)
    sizes, boxes = torch.tensor([[200, 120]]), torch.tensor([[40.0, 20, 100, 80]])
    cached = crop_resize(stored, sizes, boxes, None, (32, 32), "bilinear", border="image")
    native = crop_resize(original, sizes, boxes, None, (32, 32), "bilinear", border="image")
    assert (cached - native).abs().max() < 2.5 * LEVEL


@BOTH
@pytest.mark.parametrize(("size", "box", "pixel"), [(800, 797.0, 7), (80, 26.0, 3)], ids=["border", "inside"])
def test_boxes_smaller_than_a_stored_pixel(interpolation: Any, size: int, box: float, pixel: int) -> None:
    """A box whose edges round to the same stored pixel shows that pixel."""
    images, boxes = noise(1, 8, 8), torch.tensor([[box, box, 3, 3]])
    out = crop_resize(images, torch.tensor([[size, size]]), boxes, None, (4, 4), interpolation)
    expected = images[..., pixel : pixel + 1, pixel : pixel + 1].float() / 255
    torch.testing.assert_close(out, expected.expand(1, 3, 4, 4))


@pytest.mark.parametrize(("height", "width"), [(100, 100), (60, 140), (500, 50)])
@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.05, 0.4), (3 / 4, 4 / 3))])
def test_box_distribution_is_torchvisions(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    count = 3000
    sizes = torch.tensor([[height, width]]).expand(count, 2)
    ours = random_resized_boxes(sizes, scale, ratio, torch.Generator().manual_seed(0)).numpy()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        crop = v2.RandomResizedCrop(8, scale=scale, ratio=ratio)
        drawn = [crop.make_params([torch.empty(3, height, width)]) for _ in range(count)]
    theirs = np.array([[d["top"], d["left"], d["height"], d["width"]] for d in drawn])
    assert (ours[:, 0] + ours[:, 2] <= height).all() and (ours[:, 1] + ours[:, 3] <= width).all()
    for column in range(4):
        assert ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3


@pytest.mark.parametrize("size", [(100, 200), (200, 100), (150, 150)])
@pytest.mark.parametrize("out", [(32, 64), (64, 32), (48, 48)])
def test_boxes_cover_their_share(size: tuple[int, int], out: tuple[int, int]) -> None:
    """The share shrinks if boxes of the input's shape cover less than square ones."""
    height, width = size

    def largest(shape: float) -> float:
        """Return the share of the image that the largest box with this aspect ratio covers."""
        wider = width / height / shape
        return min(wider, 1 / wider)

    room = min(1.0, largest(out[1] / out[0]) / largest(1.0))
    numbers = uniform(50, RANDOM_BOX_COLUMNS, torch.Generator().manual_seed(0))
    boxes = boxes_from_uniform(torch.tensor([size] * 50), (0.2, 0.2), (1.0, 1.0), numbers, out)
    assert (boxes[:, 2] * boxes[:, 3] / (height * width)).tolist() == pytest.approx([0.2 * room] * 50, rel=0.05)
    assert (boxes[:, 3] / boxes[:, 2]).tolist() == pytest.approx([out[1] / out[0]] * 50, rel=0.05)


def test_impossible_ratios_fall_back_to_the_centre() -> None:
    sizes = torch.tensor([[1000, 10], [10, 1000]])
    boxes = random_resized_boxes(sizes, (0.9, 1.0), (3 / 4, 4 / 3), torch.Generator().manual_seed(0))
    assert boxes.tolist() == [[493, 0, 13, 10], [0, 493, 10, 13]]


@pytest.mark.parametrize(
    ("height", "width", "out"), [(300, 400, 224), (400, 300, 224), (97, 131, 64), (32, 32, 32), (500, 375, 96)]
)
def test_evaluation_equals_resize_and_center_crop(height: int, width: int, out: int) -> None:
    image = noise(1, height, width)
    boxes = center_boxes(same_sizes(image), (out, out), 256 / 224)
    ours = crop_resize(image, same_sizes(image), boxes, None, (out, out), "bicubic", border="image")
    resize = v2.Resize(int(256 / 224 * out), interpolation=InterpolationMode.BICUBIC, antialias=True)
    theirs = v2.CenterCrop(out)(resize(image.float() / 255)).clamp(0, 1)
    assert (ours - theirs).abs().max() < LEVEL


@pytest.mark.parametrize(("out", "ratio"), [(100, 1.15), (224, 256 / 224), (32, 1.0)])
def test_resized_edges_round_as_in_torchvision(out: int, ratio: float) -> None:
    short, long = torch.meshgrid(torch.arange(20, 120), torch.arange(20, 240), indexing="ij")
    sizes = torch.stack([short.flatten(), long.flatten()], 1)
    sizes = sizes[sizes[:, 0] <= sizes[:, 1]]
    boxes = center_boxes(sizes, (out, out), ratio)
    new_short = int(ratio * out)
    new_long = torch.tensor([int(new_short * long / short) for short, long in sizes.tolist()])
    torch.testing.assert_close(boxes[:, 2], out * sizes[:, 0] / new_short)
    torch.testing.assert_close(boxes[:, 3], out * sizes[:, 1] / new_long)


def test_evaluation_of_a_rectangle_fits_inside() -> None:
    boxes = center_boxes(torch.tensor([[100, 100], [50, 300], [300, 50]]), (32, 64), 1.0)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= torch.tensor([100, 50, 300]) + 1e-3).all()
    assert (boxes[:, 1] + boxes[:, 3] <= torch.tensor([100, 300, 50]) + 1e-3).all()
    torch.testing.assert_close(boxes[:, 3] / boxes[:, 2], torch.full((3,), 2.0), rtol=0.03, atol=0)


def test_pad_crop_equals_torchvisions() -> None:
    images = noise(4, 12, 10)
    corners = torch.tensor([[0, 0], [8, 8], [4, 4], [3, 7]])
    flips = torch.tensor([False, True, False, True])
    ours = pad_crop(images, corners, flips, pad=4)
    for image, (top, left), flip, mine in zip(images, corners.tolist(), flips, ours, strict=True):
        theirs = functional.crop(functional.pad(image, [4]), top, left, 12, 10)
        assert torch.equal(mine, theirs.flip(-1) if flip else theirs)


@pytest.mark.parametrize(("size", "out_size"), [((200, 3), (32, 320)), ((3, 200), (128, 16))])
def test_no_crop_is_empty(size: tuple[int, int], out_size: tuple[int, int]) -> None:
    """Very thin images, and a rectangular input."""
    numbers = uniform(64, RANDOM_BOX_COLUMNS, torch.Generator().manual_seed(0))
    boxes = boxes_from_uniform(torch.tensor([size] * 64), (0.2, 1.0), (3 / 4, 4 / 3), numbers, out_size)
    assert boxes[:, 2:].min() >= 1
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor(size)).all()
