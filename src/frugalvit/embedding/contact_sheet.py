"""Draw a contact sheet: thumbnails with captions, groups side by side."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from frugalvit.data import ImageDataset
from frugalvit.data.decode import to_picture
from frugalvit.utils import palette
from frugalvit.utils.console import sanitize
from frugalvit.utils.plotting import drawing

COLUMNS = 10
_INCHES, _PIXELS = 1.1, 200  # of a column, and of a thumbnail's longer side
_HEIGHT = 1.3  # of a line, in columns: a square image and two lines of text
_LETTERS = 20  # of a file's name below an image


class Thumbnail(NamedTuple):
    """An image on a sheet: uint8 (H, W, 3), and its caption."""

    pixels: np.ndarray
    caption: str


def make_thumbnail(examples: ImageDataset, position: int, caption: str) -> Thumbnail:
    """Read an image at the size of the sheet, and add the end of its file name to the caption."""
    image = Image.fromarray(to_picture(examples.read(position, at_least=(_PIXELS, _PIXELS))))
    image.thumbnail((_PIXELS, _PIXELS))  # hundreds of large photographs would fill the memory
    name = " ".join(sanitize(Path(examples.names[position]).name).split())
    return Thumbnail(np.asarray(image), f"{caption}\n{name[-_LETTERS:]}")


def arrange_groups(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return line and first column of groups of these sizes; a group that fits into a line is not split."""
    positions, line, column = [], 0, 0
    for size in sizes:
        if column and column + size > COLUMNS:
            line, column = line + 1, 0
        positions.append((line, column))
        column += size
    return positions


def sheet_figure(groups: Sequence[Sequence[Thumbnail]]) -> Figure:
    """Draw groups of at most ten images, line by line, with a bar above a group of several."""
    positions = arrange_groups(len(group) for group in groups)
    columns = max(column + len(group) for (_, column), group in zip(positions, groups, strict=True))
    height = _HEIGHT * (positions[-1][0] + 1)
    with drawing():
        figure = Figure(figsize=(_INCHES * columns, _INCHES * height))
        # One pair of axes for all: the layout of two hundred would take minutes.
        axis = figure.add_axes((0, 0, 1, 1))
        for (line, column), group in zip(positions, groups, strict=True):
            top = _HEIGHT * line
            if len(group) > 1:
                axis.plot([column + 0.03, column + len(group) - 0.03], [top, top], color=palette.BLUE, linewidth=2)
            for start, (pixels, caption) in enumerate(group, column):
                tall, wide = (0.46 * side / max(pixels.shape[:2]) for side in pixels.shape[:2])
                middle, centre = start + 0.5, top + 0.52
                extent = (middle - wide, middle + wide, centre + tall, centre - tall)
                axis.imshow(pixels, extent=extent, aspect="auto")
                axis.text(middle, top + 1.01, caption, fontsize=5.5, ha="center", va="top")
        axis.set(xlim=(0, columns), ylim=(height, -0.04))
        axis.axis("off")
    return figure
