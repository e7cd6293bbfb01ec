"""Colour jitter, RandAugment and erasing against timm and torchvision."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, ks_2samp
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from torchvision.transforms.v2 import functional

from frugalvit.data.augmentation import operations
from frugalvit.data.augmentation.randaugment import ColorJitter, RandAugment, Step, run_steps
from frugalvit.data.rng import uniform
from helpers.augment_images import DEVICES, pictures


def test_jitter_has_torchvisions_ranges_and_all_orders() -> None:
    numbers = uniform(6000, ColorJitter.columns, torch.Generator().manual_seed(0))
    steps = ColorJitter((0.4, 0.4, 0.2, 0.1), 0.8).plan(numbers)
    sequences: dict[int, list[str]] = {}
    strengths: dict[str, list[float]] = {name: [] for name in ColorJitter.names}
    for step in steps:
        for row in step.rows.tolist():
            sequences.setdefault(row, []).append(step.operation)
        strengths[step.operation] += step.strength.tolist()
    assert len(sequences) == pytest.approx(4800, abs=120)
    orders = Counter(tuple(sequence) for sequence in sequences.values())
    assert len(orders) == 24 and chisquare(list(orders.values())).pvalue > 1e-3
    limits = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "saturation": (0.8, 1.2), "hue": (-0.1, 0.1)}
    for name, (low, high) in limits.items():
        reference = np.random.default_rng(0).uniform(low, high, 5000)
        assert ks_2samp(strengths[name], reference).pvalue > 1e-3


def test_jitter_equals_torchvision_image_by_image() -> None:
    images = pictures().float() / 255
    numbers = uniform(len(images), ColorJitter.columns, torch.Generator().manual_seed(3))
    steps = ColorJitter((0.4, 0.4, 0.2, 0.1), 0.8).plan(numbers)
    result = run_steps(images.clone(), steps)
    expected = images.clone()
    one = {"brightness": functional.adjust_brightness, "contrast": functional.adjust_contrast}
    one |= {"saturation": functional.adjust_saturation, "hue": functional.adjust_hue}
    for step in steps:
        for row, strength in zip(step.rows.tolist(), step.strength.tolist(), strict=True):
            expected[row] = one[step.operation](expected[row], strength)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    assert not torch.equal(result, images)


def test_jitter_without_strength_is_left_out() -> None:
    assert {s.operation for s in ColorJitter((0, 0.4, 0, 0), 1.0).plan(uniform(20, 9, torch.Generator()))} == {
        "contrast"
    }


def test_rand_augment_draws_timms_operations() -> None:
    timm_names = [op.name for op in auto_augment.rand_augment_transform("rand-m9-mstd0.5-inc1").ops]
    assert len(timm_names) == len(RandAugment.names) == 15
    count = 4000
    policy = RandAugment()
    numbers = uniform(count, policy.columns, torch.Generator().manual_seed(0))
    drawn = Counter()
    for step in policy.plan(numbers, (32, 32)):
        drawn[step.operation] += len(step.rows)
    assert sum(drawn.values()) == pytest.approx(count, rel=0.05)  # two operations, each with probability one half
    expected = sum(drawn.values()) / 15
    observed = [drawn[name] for name in drawn if name != "affine"]
    assert chisquare([*observed, drawn["affine"]], [expected] * len(observed) + [5 * expected]).pvalue > 1e-3


TIMM = {
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize_add": "SolarizeAdd",
    "saturation": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
}


@pytest.mark.parametrize("magnitude", [0.0, 3.3, 9.0, 10.0])
def test_rand_augment_strengths_are_timms(magnitude: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RandAugment(layers=1, probability=1.0, magnitude=magnitude, deviation=0.0)
    numbers = torch.zeros(30, 4, dtype=torch.float64)
    numbers[:, 1] = (torch.arange(30) // 2 + 0.5) / 15  # every operation twice,
    numbers[:, 3] = torch.arange(30) % 2 * 0.9 + 0.05  # with both signs
    steps = {step.operation: step for step in policy.plan(numbers, (40, 20))}
    for name, timm_name in TIMM.items():
        for sign, mine in zip((0.05, 0.95), steps[name].strength.tolist(), strict=True):
            monkeypatch.setattr(auto_augment.random, "random", lambda sign=sign: sign)
            (theirs,) = auto_augment.LEVEL_TO_ARG[timm_name](magnitude, {})
            if name == "solarize":
                assert round(mine * 255 + 0.5) == theirs
            elif name == "solarize_add":
                assert round(mine * 255) == theirs
            else:
                assert mine == pytest.approx(theirs, abs=1e-6)
    maps = steps["affine"].strength.view(5, 2, 6)
    level = magnitude / 10
    torch.testing.assert_close(maps[0, 0], operations.rotation(torch.tensor([30 * level]))[0])
    torch.testing.assert_close(maps[1, 1], operations.shear_x(torch.tensor([-0.3 * level]), 40)[0])
    torch.testing.assert_close(maps[2, 0], operations.shear_y(torch.tensor([0.3 * level]), 20)[0])
    assert maps[3, 0, 2] == pytest.approx(0.45 * level * 20) and maps[4, 1, 5] == pytest.approx(-0.45 * level * 40)


def test_rand_augment_magnitudes() -> None:
    numbers = uniform(5000, 1, torch.Generator().manual_seed(0))[:, 0]
    normal = np.random.default_rng(0).normal(9, 0.5, 5000).clip(0, 10)
    assert ks_2samp(RandAugment(deviation=0.5).magnitudes(numbers), normal).pvalue > 1e-3
    wide = RandAugment(deviation=5.0).magnitudes(numbers)
    assert (wide.min(), wide.max()) == (0, 10)
    flat = RandAugment(deviation=math.inf).magnitudes(numbers)
    assert flat.min() < 0.05 and flat.max() > 8.95 and flat.mean() == pytest.approx(4.5, abs=0.1)


def test_steps_touch_only_their_rows() -> None:
    images = torch.rand(4, 3, 8, 8)
    out = run_steps(
        images.clone(), [Step("invert", torch.tensor([1, 3])), Step("equalize", torch.tensor([], dtype=torch.long))]
    )
    torch.testing.assert_close(out[[0, 2]], images[[0, 2]])
    torch.testing.assert_close(out[[1, 3]], 1 - images[[1, 3]])


def test_erasing_distribution_is_timms() -> None:
    count, size = 3000, (32, 40)
    numbers = uniform(count, operations.ERASING_COLUMNS, torch.Generator().manual_seed(0))
    ours = operations.erasing_boxes(numbers, size, (0.02, 1 / 3), (0.3, 1 / 0.3))
    reference = RandomErasing(1.0, mode="const", device="cpu")
    areas, heights = [], []
    with torch.random.fork_rng():
        import random

        random.seed(0)
        for _ in range(count):
            erased = reference(torch.ones(1, *size))[0] == 0
            areas.append(int(erased.sum()))
            heights.append(int(erased.any(1).sum()))
    assert ks_2samp((ours[:, 2] * ours[:, 3]).numpy(), areas).pvalue > 1e-3
    assert ks_2samp(ours[:, 2].numpy(), heights).pvalue > 1e-3
    assert (ours[:, 0] + ours[:, 2] <= 32).all() and (ours[:, 1] + ours[:, 3] <= 40).all()


def test_erased_box_is_smaller_than_the_image() -> None:
    """As in timm, nothing is erased if every attempt is too large."""
    numbers = uniform(50, operations.ERASING_COLUMNS, torch.Generator().manual_seed(0))
    assert not operations.erasing_boxes(numbers, (20, 20), (1.0, 1.0), (1.0, 1.0))[:, 2].any()
    wide = operations.erasing_boxes(numbers, (20, 20), (0.5, 1.0), (0.5, 2.0))
    assert wide[:, 2].max() == 19 and wide[wide[:, 2] > 0, 3].max() == 19


@DEVICES
def test_erasing_fills_the_box_with_noise(device: str) -> None:
    images = torch.zeros(3, 3, 20, 20, device=device)
    boxes = torch.tensor([[2.0, 3, 10, 12], [0, 0, 0, 5], [10, 10, 10, 10]], device=device)
    out = operations.erase(images, boxes, torch.tensor([0, 5, 77777], device=device)).cpu()
    assert (out[0, :, 2:12, 3:15] != 0).all() and int((out[0] != 0).sum()) == 3 * 120
    assert not out[1].any()
    noise = out[2, :, 10:, 10:]
    assert abs(float(noise.mean())) < 0.25 and 0.8 < float(noise.std()) < 1.2
    assert not torch.equal(noise[0], noise[1])
