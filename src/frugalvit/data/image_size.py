"""How large images are, and which input size that asks for: one rule for training and for packing ahead of it."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from PIL import Image

from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import UnreadableImage
from frugalvit.errors import UserError

_MANY = 1000


def median_side(examples: ImageDataset, sample: int = 64) -> int:
    """The median short side of up to ``sample`` images, from their headers; of more where all of these are bad."""
    sides: list[int] = []
    looked: list[int] = []
    for most in (sample, _MANY):
        looked = list(range(0, len(examples), max(1, len(examples) // most)))
        for index in looked:
            # A bad file is named once, by whoever decodes it; here it just does not vote.
            with contextlib.suppress(UnreadableImage):
                header = examples.header(index)
                sides.append(min(header.width, header.height))
        if sides:
            return int(statistics.median(sides))
    raise none_readable(examples, looked)


def none_readable(examples: ImageDataset, looked: Sequence[int]) -> UserError:
    """The error for images none of which could be read; the first is named with its reason."""
    reason = examples.names[looked[0]]
    try:
        examples.read(looked[0])
    except UnreadableImage as fault:
        reason = str(fault)
    return UserError(
        f"None of the {len(looked):,} images looked at can be read; the first: {reason}. Mend or replace them "
        "('frugalvit data' lists them all)."
    )


def largest_input(device: str) -> int:
    """The largest input that "auto" takes: the papers' on a GPU, one that a few cores can train on a CPU."""
    return 64 if device == "cpu" else 224


def input_size(side: int, device: str) -> int:
    """Small images as they are, others at the multiple of 32 below their short side, up to ``largest_input``."""
    size = side if side <= 64 else max(32, side // 32 * 32)
    return min(size, largest_input(device))


def best_device() -> str:
    """The device that "auto" takes: CUDA, else Apple's MPS, else the CPU."""

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def resize_to(pixels: np.ndarray, rectangle: tuple[int, int]) -> np.ndarray:
    """(H, W, 3) to (S, S', 3), antialiased; as it is when it has that size."""
    if pixels.shape[:2] == rectangle:
        return pixels if pixels.flags.writeable else pixels.copy()
    smaller = Image.fromarray(pixels).resize((rectangle[1], rectangle[0]), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return np.array(smaller)


_ENLARGED = 256 / 224  # a stored image is this much larger than the input, as the usual evaluation resize


_NATIVE = 1.3  # images of one size are stored as they are up to this much above that


_SAMPLE = 48


_COVERED = 0.9


_WIDEST = 2.0  # times the target: 16:9 fits


_STEP = 16  # pixels between the shapes of images that are stored each for itself


def min_cached_size(size: tuple[int, int], stored: int | Literal["auto"] = "auto") -> tuple[int, int]:
    """The height and width a stored image should have at least, for inputs of ``size``."""
    return (stored, stored) if stored != "auto" else (round(size[0] * _ENLARGED), round(size[1] * _ENLARGED))


def probe_images(
    examples: ImageDataset, size: tuple[int, int], stored: int | Literal["auto"] = "auto"
) -> tuple[tuple[int, int], float]:
    """The rectangle (S, S') to store and the seconds one image takes to decode, from a sample of the images.

    Every sampled image is imagined with its shorter side reduced to the target (never enlarged). The rectangle is as
    high and as wide as nine tenths of them: landscape photos are stored as landscape, and where one in ten is upright,
    neither kind loses what the usual evaluation (resize the shorter side, crop the centre) would see. Panoramas do not
    widen it beyond twice the target.
    """
    target = min_cached_size(size, stored)
    chosen = sorted({round(i) for i in np.linspace(0, len(examples) - 1, _SAMPLE)})
    sizes, times = [], []
    for i in chosen:
        began = time.perf_counter()
        try:
            pixels = examples.read(i, at_least=target)
        except UnreadableImage:
            continue
        times.append(time.perf_counter() - began)
        sizes.append((pixels.shape[0], pixels.shape[1]))
    if not sizes:
        raise none_readable(examples, chosen)
    return cached_size(sizes, target), statistics.median(times)


def cached_size(sizes: Sequence[tuple[int, int]], target: tuple[int, int]) -> tuple[int, int]:
    """The rectangle in which images of these sizes are stored; ``look`` says why."""
    height, width = sizes[0]
    if len(set(sizes)) == 1 and height <= _NATIVE * target[0] and width <= _NATIVE * target[1]:
        return height, width
    shrunk = [_shrunk(size, target) for size in sizes]
    limits = zip(zip(*shrunk, strict=True), target, strict=True)
    rows, columns = (max(1, round(min(_covering(sides), _WIDEST * least))) for sides, least in limits)
    return rows, columns


def cached_size_alone(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """The rectangle in which an image is stored that must not depend on others; larger ones have few shapes."""
    rectangle = cached_size([size], target)
    return size if rectangle == size else (-(-rectangle[0] // _STEP) * _STEP, -(-rectangle[1] // _STEP) * _STEP)


def _covering(lengths: Sequence[float]) -> float:
    """The least that is enough for nine tenths of these."""
    return sorted(lengths)[math.ceil(_COVERED * len(lengths)) - 1]


def _shrunk(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float]:
    zoom = min(1.0, max(target[0] / size[0], target[1] / size[1]))
    return size[0] * zoom, size[1] * zoom
