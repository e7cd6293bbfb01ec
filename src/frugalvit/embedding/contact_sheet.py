"""A contact sheet: many small images with a line of text below each, those that belong together side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from frugalvit.data import ImageDataset
from frugalvit.utils import palette
from frugalvit.utils.console import sanitize
from frugalvit.utils.plotting import drawing

COLUMNS = 10
_INCHES, _PIXELS = 1.1, 200  # of a column, and of a small image's longer side
_HEIGHT = 1.3  # of a line, in columns: a square image and two lines of text
_LETTERS = 20  # of a file's name that fit below an image


class Small(NamedTuple):
    """An image on a sheet: uint8 (H, W, 3), and what stands below it."""

    pixels: np.ndarray
    caption: str


def small(examples: ImageDataset, position: int, caption: str) -> Small:
    """An image of a dataset as small as a sheet shows it: hundreds of large photographs would fill the memory."""
    image = Image.fromarray(examples.read(position, at_least=(_PIXELS, _PIXELS)))
    image.thumbnail((_PIXELS, _PIXELS))
    return Small(np.asarray(image), caption)


def short_name(name: str) -> str:
    """The end of a file's name, which tells it from its neighbours, in letters that can be drawn."""
    text = " ".join(sanitize(Path(name).name).split())
    return text if len(text) <= _LETTERS else f"…{text[1 - _LETTERS :]}"


def lines_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Line and first column of groups of these sizes, so that none is torn where it fits into a line."""
    places, line, column = [], 0, 0
    for size in sizes:
        if column and column + size > COLUMNS:
            line, column = line + 1, 0
        places.append((line, column))
        column += size
    return places


def sheet_figure(groups: Sequence[Sequence[Small]]) -> Figure:
    """Groups of at most ten images, line by line; a bar above those of several shows how far they reach."""
    places = lines_of(len(group) for group in groups)
    columns = max(column + len(group) for (_, column), group in zip(places, groups, strict=True))
    height = _HEIGHT * (places[-1][0] + 1)
    with drawing():
        figure = Figure(figsize=(_INCHES * columns, _INCHES * height))
        # One pair of axes for all: a pair for each of two hundred images would take minutes to lay out.
        axis = figure.add_axes((0, 0, 1, 1))
        for (line, column), group in zip(places, groups, strict=True):
            top = _HEIGHT * line
            if len(group) > 1:
                axis.plot([column + 0.03, column + len(group) - 0.03], [top, top], color=palette.BLUE, linewidth=2)
            for place, (pixels, caption) in enumerate(group, column):
                tall, wide = (0.46 * side / max(pixels.shape[:2]) for side in pixels.shape[:2])
                middle, centre = place + 0.5, top + 0.52
                extent = (middle - wide, middle + wide, centre + tall, centre - tall)
                axis.imshow(pixels, extent=extent, aspect="auto")
                axis.text(middle, top + 1.01, caption, fontsize=5.5, ha="center", va="top")
        axis.set(xlim=(0, columns), ylim=(height, -0.04))
        axis.axis("off")
    return figure
