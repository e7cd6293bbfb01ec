"""The interface of a dataset format: a test for a path, and a function that opens it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from frugalvit.data.dataset import DatasetSplits


@dataclass(frozen=True)
class OpenOptions:
    """Options of ``open_data``, which explains them; most formats ignore them.

    allow_extra: drop images of classes that train lacks instead of raising an error. ``--classes`` sets it.
    """

    labels: str = "auto"
    allow_extra: bool = False
    root: str | Path | None = None
    target: str = "auto"


@dataclass(frozen=True)
class Format:
    """One way to store a dataset.

    matches: whether the dataset with this path or name has this format.
    open: reads the stored splits. ``open_data`` then selects classes and adds a missing val split.
    """

    name: str
    matches: Callable[[str], bool]
    open: Callable[[str, OpenOptions], DatasetSplits]
