"""Pictures as a program has them: one, or several in a list, an array of names, a column of a table, a generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def listed(pictures: Any) -> Sequence[Any]:
    """Several pictures as a list, one as a list of it; an array of numbers is one, and so is an open file."""
    if isinstance(pictures, list | tuple):
        return pictures
    names = isinstance(pictures, np.ndarray) and pictures.ndim == 1 and pictures.dtype.kind in "OU"
    generator = isinstance(pictures, Iterator) and not hasattr(pictures, "read")
    column = hasattr(pictures, "to_numpy") and not hasattr(pictures, "columns")  # of pandas or polars
    return list(pictures) if names or generator or column else [pictures]
