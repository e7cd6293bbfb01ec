"""Batched affine operations (rotate, shear, translate) and random erasing, each image with its own parameters.

An affine map is six numbers (a, b, c, d, e, f) that take an output pixel to the input pixel it shows,

    x_in = a·x + b·y + c        y_in = d·x + e·y + f,

in pixels from the image's centre. Shears and translations keep PIL's convention: they act from the top left corner.
"""

from __future__ import annotations

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
    """Resample (B, C, H, W) by maps (B, 6); what lies outside takes ``fill`` (C,). mode: "bilinear" or "nearest"."""
    height, width = images.shape[-2:]
    # Everything stays in float32: positions in half precision would be off by a tenth of a pixel.
    a, b, c, d, e, f = (column.view(-1, 1, 1) for column in maps.float().unbind(1))
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = (torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2)[:, None]
    x_in, y_in = (a * x + c) + b * y, (d * x + f) + e * y  # (B, H, W) in pixels from the centre
    grid = torch.stack([x_in * (2 / width), y_in * (2 / height)], -1)
    picture = grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)
    fill = fill.view(1, -1, 1, 1)
    if mode == "nearest":
        inside = (x_in.abs() < width / 2) & (y_in.abs() < height / 2)
        return torch.where(inside[:, None], picture, fill)
    # The share of a pixel's four neighbours that lies inside the image.
    cover = ((width + 1) / 2 - x_in.abs()).clamp_(0, 1) * ((height + 1) / 2 - y_in.abs()).clamp_(0, 1)
    return picture.sub_(fill).mul_(cover[:, None]).add_(fill)


def erasing_boxes(
    numbers: Tensor, size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Boxes (B, 4) of top, left, height, width to erase, from uniform numbers (B, 23), distributed as timm's.

    Ten attempts at once, the first that is smaller than the image wins; height 0 where none is.
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

    The noise is read from one long stored sequence at each image's own start (B,), in 0..2^20: the same on every
    device and in every process, without a random generator on the device.
    """
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    top, left, tall, wide = (part.view(-1, 1, 1, 1) for part in boxes.unbind(1))
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    length = channels * height * width
    every_start = _noise(length, images.device).unfold(0, length, 1)  # a view: row s is the sequence from s on
    noise = every_start.index_select(0, noise_start).view(batch, channels, height, width)
    return torch.where(inside, noise.to(images.dtype), images)


@functools.lru_cache(maxsize=8)
def _noise(extra: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20211)
    return torch.randn(_NOISE_LENGTH + extra, generator=generator).to(device)


def noise_starts(numbers: Tensor) -> Tensor:
    """Uniform numbers (B,) in [0, 1) as starts in the noise sequence."""
    return (numbers * _NOISE_LENGTH).long()
