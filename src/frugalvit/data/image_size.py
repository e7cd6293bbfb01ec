"""How large images are, which input size fits them, and the size at which they are cached."""

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from typing import Literal

import torch

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import ImageDataset, spread
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.errors import UserError

_HEADERS, _MORE = 64, 1000  # headers to read; if none of these is readable
_SAMPLE = 48
_ENLARGED = 256 / 224  # a cached image is this much larger than the input, as in the standard evaluation resize
_NATIVE = 1.3  # images of one size are cached at it, up to this factor above the target
_COVERED = 0.9
_WIDEST = 2.0  # times the target: 16:9 fits


def median_side(examples: ImageDataset) -> int:
    """Return the median short side of some images. It reads headers, and more if none is readable."""
    sides: list[int] = []
    tried: list[int] = []
    for count in (_HEADERS, _MORE):
        tried = list(range(0, len(examples), max(1, len(examples) // count)))
        for index in tried:
            with contextlib.suppress(UnreadableImage):
                header = examples.header(index)
                sides.append(min(header.width, header.height))
        if sides:
            return int(statistics.median(sides))
    raise _none_readable(examples, tried)


def _none_readable(examples: ImageDataset, tried: Sequence[int]) -> UserError:
    reason = examples.names[tried[0]]
    try:
        examples.read(tried[0])
    except UnreadableImage as error:
        reason = str(error)
    return UserError(
        f"None of {len(tried):,} sampled images can be read; the first: {reason}. Fix or replace them "
        "('frugalvit data' lists them all)."
    )


def largest_input(device: str) -> int:
    """Return the largest size of "auto": the papers' size on a GPU, a size that is fast enough on a CPU."""
    return 64 if device == "cpu" else 224


def input_size(side: int, device: str) -> int:
    """Return the short side up to 64, else the multiple of 32 below it, at most ``largest_input``."""
    size = side if side <= 64 else max(32, side // 32 * 32)
    return min(size, largest_input(device))


def best_device() -> str:
    """Return the device of "auto": CUDA, else Apple's MPS, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def probe_images(
    examples: ImageDataset,
    size: tuple[int, int],
    stored: int | Literal["auto"] = "auto",
    crop: CenterCrop | None = None,
) -> tuple[tuple[int, int], float]:
    """Return the cached size (S, S') and the seconds to decode one image, from a sample of the images.

    The cached size for evaluation is that of its ``crop``. For training:

    Every sampled image is reduced to the target by its shorter side, never enlarged. The cached size covers the height
    and the width of nine tenths of them. So landscape photos stay landscape. If more than one photo in ten is
    portrait, both kinds keep what the standard evaluation sees (resize the shorter side, crop the centre). Panoramas
    do not widen it beyond twice the target.
    """
    target = (round(size[0] * _ENLARGED), round(size[1] * _ENLARGED)) if stored == "auto" else (stored, stored)
    chosen = sorted(spread(len(examples), _SAMPLE))
    sizes, times = [], []
    for i in chosen:
        start = time.perf_counter()
        try:
            pixels = examples.read(i, at_least=None if crop else target)
        except UnreadableImage:
            continue
        times.append(time.perf_counter() - start)
        sizes.append((pixels.shape[0], pixels.shape[1]))
    if not sizes:
        raise _none_readable(examples, chosen)
    return crop.size if crop else cached_size(sizes, target), statistics.median(times)


def cached_size(sizes: Sequence[tuple[int, int]], target: tuple[int, int]) -> tuple[int, int]:
    """Return the size at which images of these sizes are cached (see ``probe_images``)."""
    height, width = sizes[0]
    if len(set(sizes)) == 1 and height <= _NATIVE * target[0] and width <= _NATIVE * target[1]:
        return height, width
    zooms = [min(1.0, max(target[0] / height, target[1] / width)) for height, width in sizes]
    shrunk = (sorted(size[axis] * zoom for size, zoom in zip(sizes, zooms, strict=True)) for axis in (0, 1))
    most = math.ceil(_COVERED * len(sizes)) - 1
    rows, columns = (max(1, round(min(sides[most], _WIDEST * target[axis]))) for axis, sides in enumerate(shrunk))
    return rows, columns
