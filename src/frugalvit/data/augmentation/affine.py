"""Batched affine operations (rotate, shear, translate) and random erasing, each image with its own parameters.

An affine map is six numbers (a, b, c, d, e, f) that take an output pixel to the input pixel it shows,

    x_in = a·x + b·y + c        y_in = d·x + e·y + f,

in pixels from the image's centre. Shears and translations keep PIL's convention: they act from the top left corner.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

ERASING_COLUMNS = 23
_ATTEMPTS = 10
_NOISE_LENGTH = 1 << 20


def rotation(degrees: Tensor) -> Tensor:
    """Counter-clockwise about the centre: (B, 6)."""
    angle = torch.deg2rad(degrees)
    cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero], 1)


def shear_x(factor: Tensor, height: int) -> Tensor:
    """x_in = x + factor · y with y from the top edge: (B, 6)."""
    one, zero = torch.ones_like(factor), torch.zeros_like(factor)
    return torch.stack([one, factor, factor * height / 2, zero, one, zero], 1)


def shear_y(factor: Tensor, width: int) -> Tensor:
    """y_in = y + factor · x with x from the left edge: (B, 6)."""
    one, zero = torch.ones_like(factor), torch.zeros_like(factor)
    return torch.stack([one, zero, zero, factor, one, factor * width / 2], 1)


def translation(x: Tensor, y: Tensor) -> Tensor:
    """x_in = x + shift in pixels (a positive shift moves the picture left and up): (B, 6)."""
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    return torch.stack([one, zero, x, zero, one, y], 1)


def affine(images: Tensor, maps: Tensor, fill: Tensor, mode: str = "bilinear") -> Tensor:
    """Resample (B, C, H, W) in [0, 1] by maps (B, 6); pixels outside the image get ``fill`` (C,).

    mode: "bilinear" and "nearest" as torchvision's affine, "bicubic" as PIL's, which timm's RandAugment uses.
    """
    height, width = images.shape[-2:]
    # float32 throughout: positions in half precision would be off by a tenth of a pixel.
    a, b, c, d, e, f = (column.view(-1, 1, 1) for column in maps.float().unbind(1))
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = (torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2)[:, None]
    x_in, y_in = (a * x + c) + b * y, (d * x + f) + e * y  # (B, H, W) in pixels from the centre
    if mode == "bicubic":
        cubic = cubic_by_nine if images.device.type == "mps" else cubic_by_two  # Apple's GPU has no bicubic sampling
        picture = cubic(images, x_in, y_in).clamp_(0, 1)
    else:
        picture = _sample(images, x_in, y_in, mode)
    fill = fill.view(1, -1, 1, 1)
    if mode != "bilinear":
        inside = (x_in.abs() < width / 2) & (y_in.abs() < height / 2)
        return torch.where(inside[:, None], picture, fill)
    # The share of a pixel's four neighbours that is inside the image.
    cover = ((width + 1) / 2 - x_in.abs()).clamp_(0, 1) * ((height + 1) / 2 - y_in.abs()).clamp_(0, 1)
    return picture.sub_(fill).mul_(cover[:, None]).add_(fill)


def cubic_by_two(images: Tensor, x_in: Tensor, y_in: Tensor) -> Tensor:
    """Sample with PIL's cubic kernel, a = -1, at positions (B, H, W) in pixels from the centre.

    grid_sample's kernel has a = -0.75, and kernels are linear in a: w₋₁ = (4 w₋₀.₇₅ - w₀) / 3, where w₀ is bilinear
    sampling at positions bent by 3t² - 2t³. Along both axes at once this omits (4/9) of the product of the two
    differences w₀ - w₋₀.₇₅, which are at most 0.11 each: half a per cent of a mixed second difference of pixels.
    """
    height, width = images.shape[-2:]
    sharp = _sample(images, x_in, y_in, "bicubic", "border")
    bent = [_split_position(at, side) for at, side in ((x_in, width), (y_in, height))]
    x_bent, y_bent = (pixel + part * part * (3 - 2 * part) for pixel, part in bent)
    return sharp.mul_(4 / 3).sub_(_sample(images, x_bent, y_bent, "bilinear", "border"), alpha=1 / 3)


def cubic_by_nine(images: Tensor, x_in: Tensor, y_in: Tensor) -> Tensor:
    """Sample with the same kernel by bilinear samples only: per axis the outer neighbours, and the inner two as one."""
    height, width = images.shape[-2:]
    total = torch.zeros((), device=images.device)
    for y_weight, y in _three(y_in, height):
        for x_weight, x in _three(x_in, width):
            total = total + (y_weight * x_weight)[:, None] * _sample(images, x, y, "bilinear", "border")
    return total


def _three(position: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return weights and positions whose bilinear samples add up to the four taps of the cubic with a = -1."""
    pixel, part = _split_position(position, side)
    rest = 1 - part
    before, after = -part * rest * rest, -rest * part * part
    right = part * (1 + part - part * part)  # the tap at pixel + 1; all four add up to 1
    inner = 1 - before - after
    return [(before, pixel - 1), (inner, pixel + right / inner), (after, pixel + 2)]


def _split_position(position: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Split a position (from the centre of ``side`` pixels) into the pixel at or before it, and the fraction."""
    pixel = (position + (side - 1) / 2).floor() - (side - 1) / 2
    return pixel, position - pixel


def _sample(images: Tensor, x_in: Tensor, y_in: Tensor, mode: str, outside: str = "zeros") -> Tensor:
    height, width = images.shape[-2:]
    grid = torch.stack([x_in * (2 / width), y_in * (2 / height)], -1)
    return grid_sample(images, grid, mode=mode, padding_mode=outside, align_corners=False)


def erasing_boxes(
    numbers: Tensor, size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Draw boxes (B, 4) of top, left, height, width to erase from uniform numbers (B, 23), distributed as timm's.

    The first of ten attempts that is smaller than the image wins; the height is 0 if none is.
    """
    height, width = size
    share, aspect = numbers[:, :_ATTEMPTS], numbers[:, _ATTEMPTS : 2 * _ATTEMPTS]
    target = height * width * (area[0] + (area[1] - area[0]) * share)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * aspect)
    tall, wide = torch.sqrt(target * aspect).round(), torch.sqrt(target / aspect).round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    box_height = torch.where(fits.any(1), tall.gather(1, first)[:, 0], 0.0)
    box_width = wide.gather(1, first)[:, 0]
    top = torch.floor(numbers[:, -3] * (height - box_height + 1))
    left = torch.floor(numbers[:, -2] * (width - box_width + 1))
    return torch.stack([top, left, box_height, box_width], 1).float()


def erase(images: Tensor, boxes: Tensor, noise_start: Tensor) -> Tensor:
    """Fill each image's box (B, 4) with standard normal noise, pixel by pixel.

    The noise comes from one long stored sequence, from each image's own start (B,) in 0..2^20. So it is the same on
    every device and in every process, without a random generator on the device.
    """
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    top, left, tall, wide = (part.view(-1, 1, 1, 1) for part in boxes.unbind(1))
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    length = channels * height * width
    every_start = _noise(length, images.device).unfold(0, length, 1)  # a view: row s is the sequence from s
    noise = every_start.index_select(0, noise_start).view(batch, channels, height, width)
    return torch.where(inside, noise.to(images.dtype), images)


@functools.lru_cache(maxsize=8)
def _noise(extra: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20211)
    return torch.randn(_NOISE_LENGTH + extra, generator=generator).to(device)


def noise_starts(numbers: Tensor) -> Tensor:
    """Turn uniform numbers (B,) in [0, 1) into starts in the noise sequence."""
    return (numbers * _NOISE_LENGTH).long()
