"""Colour jitter and RandAugment, batched: choose the operations of each image.

A policy turns uniform numbers (one row per image) into a list of ``Step``s: an operation, its images and their
strengths. Images with the same operation at the same position of their sequence are processed together. So each image
has its own choice and order, but the batch needs only a few dozen calls. The CPU makes the choices, so it knows the
sizes of the groups without waiting for the device.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from frugalvit.data.augmentation import operations
from frugalvit.data.rng import to_device_packed


class Step(NamedTuple):
    """One operation on some images of the batch: rows (k,), and strengths (k,) or (k, 6), or None."""

    operation: str
    rows: Tensor
    strength: Tensor | None = None


_PLAIN = ("autocontrast", "equalize", "invert", "grayscale")
_GRADED = ("brightness", "contrast", "saturation", "hue", "sharpness", "solarize", "solarize_add", "posterize")


def run_steps(
    images: Tensor,
    steps: Sequence[Step],
    fill: Tensor | None = None,
    blur_size: int = 13,
    interpolation: str = "bilinear",
) -> Tensor:
    """Apply the steps in order; may overwrite ``images`` (B, C, H, W), float in [0, 1].

    The affine operations use ``fill`` outside the image, and ``interpolation`` "bilinear" or "bicubic".
    """
    steps = [step for step in steps if len(step.rows)]
    functions: dict[str, Callable[..., Tensor]] = {name: getattr(operations, name) for name in (*_PLAIN, *_GRADED)}
    if fill is not None:
        functions["affine"] = partial(operations.affine, fill=fill, mode=interpolation)
    functions["blur"] = partial(operations.gaussian_blur, kernel_size=blur_size)
    on_device = iter(to_device_packed([t for step in steps for t in step[1:] if t is not None], images.device))
    for step in steps:
        rows = next(on_device)
        strength = () if step.strength is None else (next(on_device),)
        if len(step.rows) == len(images):  # rows are sorted and unique, so these are all images in order
            images = functions[step.operation](images, *strength)
        else:
            changed = functions[step.operation](images.index_select(0, rows), *strength)
            images.index_copy_(0, rows, changed)
    return images


def chosen(operation: str, numbers: Tensor, probability: float | Tensor) -> Step:
    """Return a step without strength on the rows whose uniform number (B,) is below the probability."""
    return Step(operation, (numbers < probability).nonzero()[:, 0])


def blur_step(numbers: Tensor, probability: float | Tensor, sigma: tuple[float, float]) -> Step:
    """Return a Gaussian blur from uniform numbers (B, 2): whether to blur, and sigma."""
    rows = (numbers[:, 0] < probability).nonzero()[:, 0]
    return Step("blur", rows, _between(numbers[rows, 1], *sigma).float())


def blur_kernel_size(sigma: tuple[float, float]) -> int:
    """Return an odd width with three sigmas per side: beyond it a Gaussian is below 1/90 of its peak."""
    return 2 * math.ceil(3 * sigma[1]) + 1


class ColorJitter:
    """Brightness, contrast, saturation and hue in an order drawn per image, as torchvision's ColorJitter.

    At each of the four positions, the images that drew the same operation are processed together: 16 batched calls
    give all 24 orders exactly.
    """

    columns = 9
    names = ("brightness", "contrast", "saturation", "hue")

    def __init__(self, strengths: tuple[float, float, float, float], probability: float) -> None:
        self.probability = probability
        self.ranges = [(max(0.0, 1 - s), 1 + s) for s in strengths[:3]] + [(-strengths[3], strengths[3])]
        self.active = [s > 0 for s in strengths]

    def plan(self, numbers: Tensor) -> list[Step]:
        """numbers (B, 9): whether to apply it, four to sort for the order, four strengths."""
        applied = numbers[:, 0] < self.probability
        order = numbers[:, 1:5].argsort(1)
        strengths = torch.stack([_between(numbers[:, 5 + i], *limits) for i, limits in enumerate(self.ranges)], 1)
        steps = []
        for position in range(4):
            for operation, name in enumerate(self.names):
                if self.active[operation]:
                    rows = (applied & (order[:, position] == operation)).nonzero()[:, 0]
                    steps.append(Step(name, rows, strengths[rows, operation].float()))
        return steps


class RandAugment:
    """timm's ``rand-m9-mstd0.5-inc1``: ``layers`` operations per image, each applied with ``probability``.

    An operation is drawn uniformly, with replacement, from the fifteen below; its magnitude m is normal around
    ``magnitude`` and clipped to 0..10 (uniform in 0..``magnitude`` when the deviation is infinite). ± is a fair coin.

        autocontrast, equalize, invert    no strength
        rotate, posterize                 ±3·m degrees; keep 4 - floor(0.4·m) bits
        solarize                          invert grey levels from 256 - floor(25.6·m)
        solarize_add                      add floor(11·m) grey levels below 128
        saturation, contrast, brightness, sharpness     factor 1 ± 0.09·m, at least 0.1
        shear_x, _y, translate_x, _y      ±0.03·m; ±0.045·m of the width or height

    The five affine operations are resampled together; pixels outside the image get the mean.
    """

    names = (
        "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "saturation",
        "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
    )  # fmt: skip
    affine_names = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")

    def __init__(
        self, layers: int = 2, probability: float = 0.5, magnitude: float = 9.0, deviation: float = 0.5
    ) -> None:
        self.layers, self.probability, self.magnitude, self.deviation = layers, probability, magnitude, deviation
        self.columns = 4 * layers

    def plan(self, numbers: Tensor, size: tuple[int, int]) -> list[Step]:
        """numbers (B, 4·layers): for each layer whether to apply it, operation, magnitude, sign."""
        steps = []
        for whether, which, level, sign in numbers.view(len(numbers), self.layers, 4).permute(1, 2, 0):
            operation = torch.where(whether < self.probability, (which * len(self.names)).long(), -1)
            magnitude = self.magnitudes(level)
            signed = torch.where(sign > 0.5, -magnitude, magnitude)
            for index, name in enumerate(self.names):
                if name not in self.affine_names:
                    rows = (operation == index).nonzero()[:, 0]
                    steps.append(Step(name, rows, _strength(name, magnitude[rows], signed[rows])))
            steps.append(self._affine_step(operation, signed, size))
        return steps

    def magnitudes(self, numbers: Tensor) -> Tensor:
        if math.isinf(self.deviation):
            return numbers * self.magnitude
        normal = math.sqrt(2) * torch.erfinv(2 * numbers - 1)
        varied = (self.magnitude + self.deviation * normal).clamp(0, 10)
        return varied if self.deviation else torch.full_like(numbers, self.magnitude)

    def _affine_step(self, operation: Tensor, signed: Tensor, size: tuple[int, int]) -> Step:
        height, width = size
        level, zero = signed / 10, torch.zeros_like(signed)
        maps = {
            "rotate": operations.rotation(level * 30),
            "shear_x": operations.shear_x(level * 0.3, height),
            "shear_y": operations.shear_y(level * 0.3, width),
            "translate_x": operations.translation(level * 0.45 * width, zero),
            "translate_y": operations.translation(zero, level * 0.45 * height),
        }
        slots = [self.affine_names.index(name) if name in maps else -1 for name in self.names]
        slot = torch.where(operation >= 0, torch.tensor(slots)[operation.clamp(min=0)], -1)
        rows = (slot >= 0).nonzero()[:, 0]
        stacked = torch.stack(list(maps.values()), 1)  # (B, 5, 6)
        return Step("affine", rows, stacked[rows, slot[rows]].float())


def _strength(name: str, magnitude: Tensor, signed: Tensor) -> Tensor | None:
    """Turn a RandAugment magnitude into the parameter of an operation."""
    if name in _PLAIN:
        return None
    if name == "posterize":
        return 4 - torch.floor(magnitude * 0.4).float()
    if name == "solarize":  # half a level lower: continuous values that round to the threshold are inverted too
        return ((255.5 - torch.floor(magnitude * 25.6).clamp(max=256)) / 255).float()
    if name == "solarize_add":
        return (torch.floor(magnitude * 11).clamp(max=128) / 255).float()
    return (1 + signed * 0.09).clamp(min=0.1).float()


def _between(numbers: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * numbers
