"""How every figure looks, and how it is written."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import style
from matplotlib.figure import Figure

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.hashsalt": "frugalvit",
    # A name with a dollar sign is a name, not mathematics.
    "text.parse_math": False,
}


@contextlib.contextmanager
def drawing(settings: Any = STYLE) -> Iterator[None]:
    """Matplotlib's own settings with ours over them, whatever a program or a matplotlibrc has set for its figures.

    Their fonts stay: who names files in Chinese may have chosen one that can write them.
    """
    fonts = {"font.sans-serif": matplotlib.rcParams["font.sans-serif"]}
    with style.context(["default", fonts, settings]):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with, without a date: the same figure gives the same bytes."""
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with drawing(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in other letters: boxes say enough
        figure.savefig(path, dpi=200, bbox_inches="tight", pad_inches=0.05, metadata=metadata)
