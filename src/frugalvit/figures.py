"""How every figure looks, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
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


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format its name ends with, without a date: the same figure gives the same bytes."""
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=200, bbox_inches="tight", pad_inches=0.05, metadata=metadata)
