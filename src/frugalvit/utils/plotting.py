"""Matplotlib style of our figures, and saving them."""

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
    # A dollar sign in a name is not mathematics.
    "text.parse_math": False,
}


@contextlib.contextmanager
def drawing(settings: Any = STYLE) -> Iterator[None]:
    """Use matplotlib's defaults and our settings, but the user's fonts: file names may need them."""
    fonts = {"font.sans-serif": matplotlib.rcParams["font.sans-serif"]}
    with style.context(["default", fonts, settings]):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix, without a date: equal figures give equal bytes."""
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with drawing(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in another script is drawn as boxes
        figure.savefig(path, dpi=200, bbox_inches="tight", pad_inches=0.05, metadata=metadata)
