"""Batched colour and affine operations against torchvision and PIL."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from frugalvit.config.data import AugmentConfig
from frugalvit.data.augmentation import operations
from frugalvit.data.augmentation.transforms import TrainAugment
from helpers.augment_images import DEVICES, LEVEL, pictures

GRADED: dict[str, tuple[Callable, Callable, list[float]]] = {
    "brightness": (operations.brightness, functional.adjust_brightness, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "contrast": (operations.contrast, functional.adjust_contrast, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "saturation": (operations.saturation, functional.adjust_saturation, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "hue": (operations.hue, functional.adjust_hue, [-0.5, -0.1, 0.0, 0.05, 0.31, 0.5]),
    "sharpness": (operations.sharpness, functional.adjust_sharpness, [0.0, 0.3, 1.0, 1.4, 1.9, 0.7]),
    "solarize": (operations.solarize, functional.solarize, [0.0, 26 * LEVEL, 128 * LEVEL, 0.7, 1.0, 100 * LEVEL]),
}
PLAIN: dict[str, tuple[Callable, Callable]] = {
    "invert": (operations.invert, functional.invert),
    "autocontrast": (operations.autocontrast, functional.autocontrast),
    "equalize": (operations.equalize, functional.equalize),
    "grayscale": (operations.grayscale, lambda image: functional.rgb_to_grayscale(image, 3)),
}


@DEVICES
@pytest.mark.parametrize("name", GRADED)
def test_graded_operations(name: str, device: str) -> None:
    ours, theirs, strengths = GRADED[name]
    images = pictures()
    result = ours((images.float() / 255).to(device), torch.tensor(strengths, device=device)).cpu()
    for image, strength, mine in zip(images, strengths, result, strict=True):
        torch.testing.assert_close(mine, theirs(image.float() / 255, strength), atol=1e-4, rtol=0)
        level = math.ceil(strength * 255 - 1e-6) if name == "solarize" else strength
        # torchvision's uint8 contrast truncates the grey values, then the result: the only one off by two levels.
        allowed = 2 if name == "contrast" else 1
        assert ((mine * 255).round() - theirs(image, level).float()).abs().max() <= allowed


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
    result = operations.posterize((images.float() / 255).to(device), bits.to(device)).cpu()
    for image, count, mine in zip(images, bits.tolist(), result, strict=True):
        assert torch.equal((mine * 255).round().to(torch.uint8), functional.posterize(image, count))


def test_solarize_add() -> None:
    images = pictures(2)
    result = operations.solarize_add(images.float() / 255, torch.tensor([50.0, 110.0]) / 255)
    for image, amount, mine in zip(images, (50, 110), result, strict=True):
        theirs = auto_augment.solarize_add(Image.fromarray(image.permute(1, 2, 0).numpy()), amount)
        assert (mine.permute(1, 2, 0) * 255 - torch.from_numpy(np.array(theirs))).abs().max() < 1e-3


@DEVICES
@pytest.mark.parametrize("size", [(24, 24), (40, 15)])
@pytest.mark.parametrize("kernel", [3, 13, 23])
def test_gaussian_blur(size: tuple[int, int], kernel: int, device: str) -> None:
    images = pictures(6, *size)
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.5, 2.0, 0.3])
    result = operations.gaussian_blur((images.float() / 255).to(device), sigma.to(device), kernel).cpu()
    for image, spread, mine in zip(images, sigma.tolist(), result, strict=True):
        theirs = functional.gaussian_blur(image.float() / 255, [kernel, kernel], [spread, spread])
        torch.testing.assert_close(mine, theirs, atol=1e-5 if device == "cpu" else LEVEL, rtol=0)


@DEVICES
def test_smallest_blur_changes_nothing(device: str) -> None:
    """The square of its sigma is 0."""
    images = (pictures(2).float() / 255).to(device)
    result = operations.gaussian_blur(images, torch.tensor([1e-30, 0.0], device=device), 13)
    torch.testing.assert_close(result, images, atol=1e-6 if device == "cpu" else LEVEL, rtol=0)


def test_other_channel_counts_pass() -> None:
    images = torch.rand(2, 5, 8, 8)
    half = torch.tensor([0.5, 0.5])
    for operation in (
        operations.brightness,
        operations.contrast,
        operations.saturation,
        operations.hue,
        operations.sharpness,
        operations.posterize,
    ):
        assert operation(images, half).shape == images.shape
    assert torch.equal(operations.hue(images, half), images)


@DEVICES
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_affine_operations(mode: str, device: str) -> None:
    """Rotation, shears from the corner and translations equal torchvision's affine."""
    images = pictures(5, 24, 18).float() / 255
    fill = torch.tensor([0.4, 0.5, 0.6])
    one = torch.ones(1)
    maps = torch.cat(
        [
            operations.rotation(one * 20),
            operations.shear_x(one * 0.3, 24),
            operations.shear_y(one * -0.2, 18),
            operations.translation(one * 4, one * 0),
            operations.translation(one * 0, one * -3.25),
        ]
    )
    result = operations.affine(images.to(device), maps.to(device), fill.to(device), mode).cpu()
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


@pytest.mark.parametrize(("mode", "most"), [("bilinear", 0.08), ("bicubic", 0.005)])
def test_direction_of_affine_operations_is_pils(mode: str, most: float) -> None:
    """PIL's bilinear filter differs only at the border."""
    image = pictures(6, 40, 32)[5:].float() / 255
    image = operations.gaussian_blur(image, torch.tensor([2.0]), 13)
    photo = Image.fromarray((image[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy())
    fill = (128, 128, 128)
    keywords = {"resample": Image.Resampling[mode.upper()], "fillcolor": fill}
    one = torch.ones(1)
    pairs = [
        (operations.rotation(one * 15), auto_augment.rotate(photo, 15, **dict(keywords))),
        (operations.shear_x(one * 0.2, 40), auto_augment.shear_x(photo, 0.2, **dict(keywords))),
        (operations.shear_y(one * 0.2, 32), auto_augment.shear_y(photo, 0.2, **dict(keywords))),
        (operations.translation(one * 8, one * 0), auto_augment.translate_x_rel(photo, 0.25, **dict(keywords))),
        (operations.translation(one * 0, one * 10), auto_augment.translate_y_rel(photo, 0.25, **dict(keywords))),
    ]
    for maps, theirs in pairs:
        ours = operations.affine(image, maps, torch.full((3,), 128 / 255), mode)[0].permute(1, 2, 0) * 255
        difference = (ours - torch.from_numpy(np.array(theirs)).float()).abs()
        assert (difference > 2).float().mean() < most


def cubic_by_loops(image: Tensor, x: float, y: float) -> Tensor:
    """Sum the four by four taps around a position from the top left pixel; edges repeat."""

    def kernel(t: float) -> float:  # a = -1
        t = abs(t)
        return t**3 - 2 * t**2 + 1 if t < 1 else (-(t**3) + 5 * t**2 - 8 * t + 4 if t < 2 else 0.0)

    total = torch.zeros(image.shape[0], dtype=torch.float64)
    for row in range(math.floor(y) - 1, math.floor(y) + 3):
        for column in range(math.floor(x) - 1, math.floor(x) + 3):
            pixel = image[:, min(max(row, 0), image.shape[1] - 1), min(max(column, 0), image.shape[2] - 1)]
            total += kernel(row - y) * kernel(column - x) * pixel.double()
    return total


def test_cubic_sampling_equals_the_kernel() -> None:
    """On noise, where the approximation is worst."""
    image = torch.rand(1, 3, 7, 9, generator=torch.Generator().manual_seed(0))
    positions = [(0.3, 0.6), (4.0, 3.0), (7.9, 5.9), (-0.4, 2.5), (8.4, 6.4), (3.5, 3.5)]
    x, y = (torch.tensor([position[axis] for position in positions]).view(1, 1, -1) for axis in (0, 1))
    sampled = operations.cubic_by_two(image, x - 4, y - 3)[0, :, 0].double()
    expected = torch.stack([cubic_by_loops(image[0], *position) for position in positions], 1)
    torch.testing.assert_close(sampled, expected, atol=0.01, rtol=0)


def test_affine_filter_is_an_option() -> None:
    """The default is bilinear: cubic sampling is several times slower on a CPU."""
    images, sizes = (255 * torch.rand(8, 3, 32, 32)).to(torch.uint8), torch.tensor([[32, 32]] * 8)
    outcomes = []
    for values in ({}, {"affine": "bilinear"}, {"affine": "bicubic"}):
        augment = TrainAugment(AugmentConfig(operation_prob=1.0, operations=4, **values), 24)
        outcomes.append(augment(images, sizes, torch.Generator().manual_seed(0)))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[1], outcomes[2])
