"""The pixel format of a dataset, and the statistics that normalize images of other formats than 8-bit RGB.

8-bit pictures are RGB (``PHOTO``). Files with 16 bits, floating point or another number of channels keep their values:
no file is scaled, and the network subtracts the mean of the training images and divides by their deviation, channel by
channel. Only geometry, blur and erasing augment such images, because colours have no meaning in them.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from frugalvit.data.bad_images import MissingPackage, UnreadableImage
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import PHOTO, PixelFormat
from frugalvit.errors import UserError

_SAMPLED = 16  # files of a split whose headers decide the format
_MEASURED = 512  # training images, at most, that the mean and the deviation come from


def set_pixel_format(source: DatasetSplits) -> None:
    """Decide how the images of a dataset are read, by the headers of a few files."""
    examples: dict[PixelFormat, str] = {}
    missing: MissingPackage | None = None
    for part in (*source.splits.values(), *source.loose.values()):
        for index in _spread(len(part), _SAMPLED):
            try:
                examples.setdefault(part.stored_format(index), part.names[index])
            except UnreadableImage as error:
                missing = error if isinstance(error, MissingPackage) else missing
    if missing is not None and not examples:
        raise missing
    if examples.keys() <= {PHOTO}:
        return
    kinds = "; ".join(f"{name}: {pixels}" for pixels, name in examples.items())
    if len(examples) > 1:
        if examples.keys() - {PHOTO, PixelFormat("uint16", 1)}:
            raise UserError(f"{source.location} holds images of different kinds: {kinds}. Convert them to one kind.")
        source.notes.append(f"All images are read as {PHOTO}, because not all hold 16-bit values: {kinds}.")
        return
    pixels = next(iter(examples))
    for group in (source.splits, source.loose):
        group.update({name: part.with_pixels(pixels) for name, part in group.items()})
    source.notes.append(
        f"Images hold {pixels}, which are kept: statistics of the training images normalize them, and operations on "
        "colours (RandAugment's, jitter, grey, solarize) are left out."
    )


def measure_statistics(examples: ImageDataset) -> tuple[list[float], list[float], int]:
    """Return mean and standard deviation of the values, channel by channel, and the number of images they come from."""
    count, images = 0, 0
    total, square = np.zeros(examples.pixels.channels), np.zeros(examples.pixels.channels)
    shift: Any = None  # the first image's mean: squares of large values would lose their digits
    for index in _spread(len(examples), _MEASURED):
        try:
            values = examples.read(index).reshape(-1, examples.pixels.channels).astype(np.float64)
        except UnreadableImage:
            continue
        shift = values.mean(0) if shift is None else shift
        values -= shift
        count, images = count + len(values), images + 1
        total, square = total + values.sum(0), square + (values * values).sum(0)
    if shift is None:
        raise UserError(f"None of the training images can be read as {examples.pixels}.")
    mean = total / count
    variance = square / count - mean * mean
    deviation = np.sqrt(np.where(variance > 0, variance, 1.0))  # 1 for a constant channel
    return [float(f"{x:.6g}") for x in shift + mean], [float(f"{x:.6g}") for x in deviation], images


def _spread(length: int, most: int) -> Iterable[int]:
    """Return at most ``most`` evenly spaced indices."""
    return sorted({round(index) for index in np.linspace(0, length - 1, min(most, length))})
