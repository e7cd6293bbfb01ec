"""Every batched operation against torchvision's functional; policies against timm and torchvision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import chisquare, ks_2samp
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from frugalvit.config.data import AugmentConfig, CropsConfig
from frugalvit.data import color, geometry
from frugalvit.data.augment import EvalTransform, MultiCrop, TrainAugment, local_crop_size
from frugalvit.data.policies import ColorJitter, RandAugment, Step, run_steps
from frugalvit.data.randomness import generator_for, ship, uniform
from frugalvit.errors import UserError

LEVEL = 1 / 255
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def pictures(count: int = 6, height: int = 24, width: int = 20, seed: int = 0) -> Tensor:
    """uint8: noise, a gradient, a flat one, one of few values: what breaks histograms and hues."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (max(count, 6), 3, height, width), generator=generator, dtype=torch.uint8)
    images[1] = torch.linspace(0, 255, width).round().to(torch.uint8)
    images[2] = 77
    images[3] = images[3] // 128 * 100
    images[4] = images[4, :1]
    return images[:count]


GRADED: dict[str, tuple[Callable, Callable, list[float]]] = {
    "brightness": (color.brightness, functional.adjust_brightness, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "contrast": (color.contrast, functional.adjust_contrast, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "saturation": (color.saturation, functional.adjust_saturation, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "hue": (color.hue, functional.adjust_hue, [-0.5, -0.1, 0.0, 0.05, 0.31, 0.5]),
    "sharpness": (color.sharpness, functional.adjust_sharpness, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "solarize": (color.solarize, functional.solarize, [0.0, 26 * LEVEL, 128 * LEVEL, 0.7, 1.0, 100 * LEVEL]),
}
PLAIN: dict[str, tuple[Callable, Callable]] = {
    "invert": (color.invert, functional.invert),
    "autocontrast": (color.autocontrast, functional.autocontrast),
    "equalize": (color.equalize, functional.equalize),
    "grayscale": (color.grayscale, lambda image: functional.rgb_to_grayscale(image, 3)),
}


@DEVICES
@pytest.mark.parametrize("name", GRADED)
def test_graded_operations(name: str, device: str) -> None:
    ours, theirs, strengths = GRADED[name]
    images = pictures()
    result = ours((images.float() / 255).to(device), torch.tensor(strengths, device=device)).cpu()
    for image, strength, mine in zip(images, strengths, result, strict=True):
        torch.testing.assert_close(mine, theirs(image.float() / 255, strength), atol=1e-4, rtol=0)
        whole = math.ceil(strength * 255 - 1e-6) if name == "solarize" else strength
        # torchvision's uint8 contrast truncates the grey values, then the result: the only one off by two levels.
        allowed = 2 if name == "contrast" else 1
        assert ((mine * 255).round() - theirs(image, whole).float()).abs().max() <= allowed


@DEVICES
@pytest.mark.parametrize("name", PLAIN)
def test_plain_operations(name: str, device: str) -> None:
    ours, theirs = PLAIN[name]
    images = pictures()
    result = ours((images.float() / 255).to(device)).cpu()
    for image, mine in zip(images, result, strict=True):
        assert ((mine * 255).round() - theirs(image).float()).abs().max() <= 1


@DEVICES
def test_posterize(device: str) -> None:
    images, bits = pictures(9), torch.arange(9)
    result = color.posterize((images.float() / 255).to(device), bits.to(device)).cpu()
    for image, kept, mine in zip(images, bits.tolist(), result, strict=True):
        assert torch.equal((mine * 255).round().to(torch.uint8), functional.posterize(image, kept))


def test_solarize_add() -> None:
    images = pictures(2)
    result = color.solarize_add(images.float() / 255, torch.tensor([50.0, 110.0]) / 255)
    for image, amount, mine in zip(images, (50, 110), result, strict=True):
        theirs = auto_augment.solarize_add(Image.fromarray(image.permute(1, 2, 0).numpy()), amount)
        assert (mine.permute(1, 2, 0) * 255 - torch.from_numpy(np.array(theirs))).abs().max() < 1e-3


@DEVICES
@pytest.mark.parametrize("size", [(24, 24), (40, 15)])
@pytest.mark.parametrize("kernel", [3, 13, 23])
def test_gaussian_blur(size: tuple[int, int], kernel: int, device: str) -> None:
    images = pictures(6, *size)
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.5, 2.0, 0.3])
    result = color.gaussian_blur((images.float() / 255).to(device), sigma.to(device), kernel).cpu()
    for image, spread, mine in zip(images, sigma.tolist(), result, strict=True):
        theirs = functional.gaussian_blur(image.float() / 255, [kernel, kernel], [spread, spread])
        torch.testing.assert_close(mine, theirs, atol=1e-5 if device == "cpu" else LEVEL, rtol=0)


def test_other_channel_counts_pass() -> None:
    images = torch.rand(2, 5, 8, 8)
    half = torch.tensor([0.5, 0.5])
    for operation in (color.brightness, color.contrast, color.saturation, color.hue, color.sharpness, color.posterize):
        assert operation(images, half).shape == images.shape
    assert torch.equal(color.hue(images, half), images)


@DEVICES
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_affine_operations(mode: str, device: str) -> None:
    """Rotation, shears from the corner and translations, as torchvision's affine with the same meaning."""
    images = pictures(5, 24, 18).float() / 255
    fill = torch.tensor([0.4, 0.5, 0.6])
    one = torch.ones(1)
    maps = torch.cat(
        [
            geometry.rotation(one * 20),
            geometry.shear_x(one * 0.3, 24),
            geometry.shear_y(one * -0.2, 18),
            geometry.translation(one * 4, one * 0),
            geometry.translation(one * 0, one * -3.25),
        ]
    )
    result = geometry.affine(images.to(device), maps.to(device), fill.to(device), mode).cpu()
    interpolation = InterpolationMode(mode)

    def theirs(image: Tensor, **changes: object) -> Tensor:
        still = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
        return functional.affine(image, **(still | changes), interpolation=interpolation, fill=fill.tolist())

    expected = [
        functional.rotate(images[0], 20, interpolation=interpolation, fill=fill.tolist()),
        theirs(images[1], shear=[math.degrees(math.atan(-0.3)) * -1, 0.0], center=[0, 0]),
        theirs(images[2], shear=[0.0, math.degrees(math.atan(-0.2))], center=[0, 0]),
        theirs(images[3], translate=[-4, 0]),
        theirs(images[4], translate=[0, 3.25]),
    ]
    for number, (mine, other) in enumerate(zip(result, expected, strict=True)):
        if mode == "nearest":  # a pixel exactly between two may fall either way
            assert ((mine - other).abs() > 1e-4).float().mean() < 0.02, number
        else:
            torch.testing.assert_close(mine, other, atol=1e-3, rtol=0, msg=f"operation {number}")


def test_shears_and_translations_turn_as_pils() -> None:
    """The direction of every affine operation is PIL's, whose bilinear filter differs at the border only."""
    image = pictures(6, 40, 32)[5:].float() / 255
    image = color.gaussian_blur(image, torch.tensor([2.0]), 13)
    photo = Image.fromarray((image[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy())
    fill = (128, 128, 128)
    keywords = {"resample": Image.Resampling.BILINEAR, "fillcolor": fill}
    one = torch.ones(1)
    pairs = [
        (geometry.rotation(one * 15), auto_augment.rotate(photo, 15, **dict(keywords))),
        (geometry.shear_x(one * 0.2, 40), auto_augment.shear_x(photo, 0.2, **dict(keywords))),
        (geometry.shear_y(one * 0.2, 32), auto_augment.shear_y(photo, 0.2, **dict(keywords))),
        (geometry.translation(one * 8, one * 0), auto_augment.translate_x_rel(photo, 0.25, **dict(keywords))),
        (geometry.translation(one * 0, one * 10), auto_augment.translate_y_rel(photo, 0.25, **dict(keywords))),
    ]
    for maps, theirs in pairs:
        ours = geometry.affine(image, maps, torch.full((3,), 128 / 255))[0].permute(1, 2, 0) * 255
        difference = (ours - torch.from_numpy(np.array(theirs)).float()).abs()
        assert (difference > 2).float().mean() < 0.08


# Policies


def test_jitter_takes_torchvisions_ranges_and_all_orders() -> None:
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


def test_jitter_of_no_strength_is_left_out() -> None:
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
    torch.testing.assert_close(maps[0, 0], geometry.rotation(torch.tensor([30 * level]))[0])
    torch.testing.assert_close(maps[1, 1], geometry.shear_x(torch.tensor([-0.3 * level]), 40)[0])
    torch.testing.assert_close(maps[2, 0], geometry.shear_y(torch.tensor([0.3 * level]), 20)[0])
    assert maps[3, 0, 2] == pytest.approx(0.45 * level * 20) and maps[4, 1, 5] == pytest.approx(-0.45 * level * 40)


def test_rand_augment_magnitudes() -> None:
    numbers = uniform(5000, 1, torch.Generator().manual_seed(0))[:, 0]
    normal = np.random.default_rng(0).normal(9, 0.5, 5000).clip(0, 10)
    assert ks_2samp(RandAugment(deviation=0.5).magnitudes(numbers), normal).pvalue > 1e-3
    flat = RandAugment(deviation=math.inf).magnitudes(numbers)
    assert flat.min() < 0.05 and flat.max() > 8.95 and flat.mean() == pytest.approx(4.5, abs=0.1)


def test_steps_touch_only_their_rows() -> None:
    images = torch.rand(4, 3, 8, 8)
    out = run_steps(
        images.clone(), [Step("invert", torch.tensor([1, 3])), Step("equalize", torch.tensor([], dtype=torch.long))]
    )
    torch.testing.assert_close(out[[0, 2]], images[[0, 2]])
    torch.testing.assert_close(out[[1, 3]], 1 - images[[1, 3]])


def test_erasing_is_distributed_as_timms() -> None:
    count, size = 3000, (32, 40)
    numbers = uniform(count, geometry.ERASING_COLUMNS, torch.Generator().manual_seed(0))
    ours = geometry.erasing_boxes(numbers, size, (0.02, 1 / 3), (0.3, 1 / 0.3))
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


@DEVICES
def test_erasing_fills_the_box_with_noise(device: str) -> None:
    images = torch.zeros(3, 3, 20, 20, device=device)
    boxes = torch.tensor([[2.0, 3, 10, 12], [0, 0, 0, 5], [10, 10, 10, 10]], device=device)
    out = geometry.erase(images, boxes, torch.tensor([0, 5, 77777], device=device)).cpu()
    assert (out[0, :, 2:12, 3:15] != 0).all() and int((out[0] != 0).sum()) == 3 * 120
    assert not out[1].any()
    noise = out[2, :, 10:, 10:]
    assert abs(float(noise.mean())) < 0.25 and 0.8 < float(noise.std()) < 1.2
    assert not torch.equal(noise[0], noise[1])


# Whole transforms


def sizes_of(images: Tensor) -> Tensor:
    return torch.tensor([images.shape[-2:]]).expand(len(images), 2)


def test_train_augment_shapes_and_repeatability() -> None:
    images = pictures(6, 40, 40)
    augment = TrainAugment(AugmentConfig(grayscale=0.3, blur=0.3, jitter=(0.4, 0.4, 0.2, 0.1)), (48, 36))
    first = augment(images, sizes_of(images), torch.Generator().manual_seed(5))
    again = augment(images, sizes_of(images), torch.Generator().manual_seed(5))
    other = augment(images, sizes_of(images), torch.Generator().manual_seed(6))
    assert first.shape == (6, 3, 48, 36) and torch.equal(first, again) and not torch.equal(first, other)


def test_train_augment_of_rows_is_rows_of_the_augment() -> None:
    """What makes ranks share a batch: an image's result does not depend on its neighbours."""
    images = pictures(6, 40, 40)
    augment = TrainAugment(AugmentConfig(jitter=(0.4, 0.4, 0.2, 0.1), blur=0.5, grayscale=0.5), 40)
    numbers = uniform(6, augment.columns, torch.Generator().manual_seed(0))
    whole = augment.apply(images, sizes_of(images), numbers)
    part = augment.apply(images[3:], sizes_of(images)[3:], numbers[3:])
    torch.testing.assert_close(whole[3:], part, atol=1e-5, rtol=1e-5)


def quiet(**changes: object) -> AugmentConfig:
    return AugmentConfig(**({"operations": 0, "erasing": 0.0, "flip": 0.0} | changes))


def test_small_images_are_shifted_not_resized() -> None:
    images = pictures(6, 32, 32)
    augment = TrainAugment(quiet(), 32, mean=(0, 0, 0), std=(1, 1, 1))
    out = augment(images, sizes_of(images), torch.Generator().manual_seed(0))
    assert augment.crop == "padded"
    padded = functional.pad(images[0].float() / 255, [4])
    candidates = [padded[:, t : t + 32, left : left + 32] for t in range(9) for left in range(9)]
    assert any(torch.allclose(out[0], candidate) for candidate in candidates)


def test_larger_images_are_resized_before_they_are_shifted() -> None:
    images = pictures(2, 48, 64)
    out = TrainAugment(quiet(crop="padded", padding=0), 32, (0, 0, 0), (1, 1, 1))(
        images, sizes_of(images), torch.Generator()
    )
    resized = v2.CenterCrop(32)(v2.Resize(32, interpolation=InterpolationMode.BICUBIC)(images.float() / 255)).clamp(
        0, 1
    )
    torch.testing.assert_close(out, resized, atol=LEVEL, rtol=0)


def test_center_crop_only_flips() -> None:
    images = pictures(2, 40, 40)
    out = TrainAugment(quiet(crop="center", flip=1.0), 40, (0, 0, 0), (1, 1, 1))(
        images, sizes_of(images), torch.Generator()
    )
    torch.testing.assert_close(out, images.flip(-1).float() / 255)


def test_normalisation_dtype_and_memory_format() -> None:
    images = pictures(2, 40, 40)
    keywords = {"dtype": torch.bfloat16, "channels_last": True}
    out = TrainAugment(quiet(), 40, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), **keywords)(
        images, sizes_of(images), torch.Generator()
    )
    assert out.dtype == torch.bfloat16 and out.is_contiguous(memory_format=torch.channels_last)
    plain = TrainAugment(quiet(), 40, (0, 0, 0), (1, 1, 1))(images, sizes_of(images), torch.Generator())
    expected = (plain - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


def test_autocast_changes_nothing() -> None:
    images = pictures(4, 40, 40)
    for transform in (TrainAugment(AugmentConfig(blur=1.0), 36), MultiCrop(CropsConfig(local_crops=1), 24)):
        plain = transform(images, sizes_of(images), torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            within = transform(images, sizes_of(images), torch.Generator().manual_seed(0))
        for a, b in zip(plain, within, strict=True):
            assert torch.equal(a, b)


def test_multi_crop_gives_global_crops_first() -> None:
    images = pictures(4, 50, 60)
    crops = MultiCrop(CropsConfig(local_crops=3), (32, 48))(images, sizes_of(images), torch.Generator().manual_seed(0))
    assert [tuple(crop.shape) for crop in crops] == [(4, 3, 32, 48)] * 2 + [(4, 3, 16, 24)] * 3
    only = MultiCrop(CropsConfig(local_crops=0, global_crops=3), 32)(images, sizes_of(images), torch.Generator())
    assert [tuple(crop.shape) for crop in only] == [(4, 3, 32, 32)] * 3


@pytest.mark.parametrize(("size", "expected"), [(224, 96), (64, 24), (32, 16), (448, 192), (8, 8)])
def test_local_size_follows_the_paper(size: int, expected: int) -> None:
    assert local_crop_size(CropsConfig(), (size, size)) == (expected, expected)
    assert local_crop_size(CropsConfig(local_size=(20, 30)), (size, size)) == (20, 30)


def test_multi_crop_probabilities_per_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blur 1.0 / 0.1 / 0.5, solarise 0.2 on the second global crop only, grey 0.2, jitter 0.8."""
    seen: list[list[Step]] = []
    import frugalvit.data.augment as module

    def record(images: Tensor, steps: list[Step], **_: object) -> Tensor:
        seen.append(steps)
        return images

    monkeypatch.setattr(module, "run_steps", record)
    batch = 500
    images = torch.zeros(batch, 3, 8, 8, dtype=torch.uint8)
    MultiCrop(CropsConfig(), 8)(images, sizes_of(images), torch.Generator().manual_seed(0))
    for steps, views in zip(seen, (2, 8), strict=True):
        rows = {step.operation: step.rows for step in steps if step.operation in ("blur", "solarize", "grayscale")}
        share = {name: torch.bincount(r // batch, minlength=views) / batch for name, r in rows.items()}
        expected_blur = [1.0, 0.1] if views == 2 else [0.5] * 8
        expected_solar = [0.0, 0.2] if views == 2 else [0.0] * 8
        torch.testing.assert_close(share["blur"], torch.tensor(expected_blur), atol=0.08, rtol=0)
        torch.testing.assert_close(share["solarize"], torch.tensor(expected_solar), atol=0.08, rtol=0)
        torch.testing.assert_close(share["grayscale"], torch.full((views,), 0.2), atol=0.08, rtol=0)
        jittered = sum(len(s.rows) for s in steps if s.operation in ColorJitter.names) / 4 / batch / views
        assert jittered == pytest.approx(0.8, abs=0.05)


def test_evaluation_equals_torchvision_and_takes_single_images() -> None:
    image = pictures(6, 300, 260)[5]
    transform = EvalTransform(96)
    ours = transform(image[None], torch.tensor([[300, 260]]))
    resize = v2.Resize(int(256 / 224 * 96), interpolation=InterpolationMode.BICUBIC)
    theirs = v2.CenterCrop(96)(resize(image.float() / 255)).clamp(0, 1)
    theirs = functional.normalize(theirs, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[None]
    assert (ours - theirs).abs().max() < LEVEL / 0.224
    photo = Image.fromarray(image.permute(1, 2, 0).numpy())
    torch.testing.assert_close(transform.image(photo), ours)
    torch.testing.assert_close(transform.image(np.array(photo)), ours)
    assert transform.image(np.array(photo)[..., 0]).shape == (1, 3, 96, 96)
    again = EvalTransform(**transform.spec() | {"out_size": tuple(transform.spec()["out_size"])})
    torch.testing.assert_close(again.image(photo), ours)


def test_evaluation_up_to_64_pixels_sees_the_whole_image() -> None:
    assert EvalTransform(64).resize_ratio == 1.0 and EvalTransform(65).resize_ratio == pytest.approx(256 / 224)
    image = pictures(1, 64, 64)
    out = EvalTransform(64, (0, 0, 0), (1, 1, 1))(image, torch.tensor([[64, 64]]))
    torch.testing.assert_close(out, image.float() / 255)


def test_one_channel_networks_see_grey() -> None:
    image = pictures(1, 64, 64)
    out = EvalTransform(64, mean=(0.5,), std=(0.25,))(image, torch.tensor([[64, 64]]))
    assert out.shape == (1, 1, 64, 64)


def test_mistakes_are_said() -> None:
    with pytest.raises(UserError, match="positive pixels"):
        EvalTransform(0)
    with pytest.raises(UserError, match="at least 1"):
        EvalTransform(64, resize_ratio=0.5)
    with pytest.raises(UserError, match="std"):
        EvalTransform(64, mean=(0.5,), std=(0.0,))


def test_generators_differ_by_seed_purpose_and_number() -> None:
    def first(*key: object) -> float:
        return torch.rand((), generator=generator_for(*key)).item()

    keys = [(0, "order", 0), (1, "order", 0), (0, "augment", 0), (0, "order", 1)]
    values = [first(*key) for key in keys]
    assert len(set(values)) == 4 and values == [first(*key) for key in keys]


@pytest.mark.gpu
def test_ship_packs_many_tensors() -> None:
    tensors = [torch.arange(5), torch.rand(3, 2), torch.tensor([True, False, True]), torch.rand(2, dtype=torch.float64)]
    for tensor, arrived in zip(tensors, ship(tensors, torch.device("cuda")), strict=True):
        assert arrived.is_cuda and torch.equal(arrived.cpu(), tensor)


@pytest.mark.gpu
def test_device_and_cpu_agree_and_never_wait() -> None:
    images = pictures(8, 64, 64)
    sizes = sizes_of(images)
    for make in (lambda: TrainAugment(AugmentConfig(), 64), lambda: MultiCrop(CropsConfig(), 64)):
        transform = make()
        numbers = uniform(8, transform.columns, torch.Generator().manual_seed(0))
        there = images.cuda()
        transform.apply(there, sizes, numbers)
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_device = transform.apply(there, sizes, numbers)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        on_cpu = transform.apply(images, sizes, numbers)
        for a, b in zip(
            [on_device] if isinstance(on_device, Tensor) else on_device,
            [on_cpu] if isinstance(on_cpu, Tensor) else on_cpu,
            strict=True,
        ):
            difference = (a.cpu() - b).abs()
            # Thresholds (posterise, equalise, solarise) may fall to the other side for a pixel or two.
            assert (difference > 3 * LEVEL / 0.22).float().mean() < 0.01
