"""Classes that a split has no image of: its score says nothing of them."""

from __future__ import annotations

import numpy as np

from frugalvit.data.examples import DataSource, Examples
from frugalvit.words import counted, some


def absent_classes(source: DataSource) -> list[str]:
    """A sentence for every split that lacks classes; images that are read in passing are not counted."""
    said: list[str] = []
    for split, examples in source.splits.items():
        if source.classes is None or examples.labels is None:
            continue
        missing = np.setdiff1d(np.arange(len(source.classes)), examples.labels)
        if len(missing):
            said.append(absence(split, [source.classes[i] for i in missing]))
    return said


def absence(split: str, names: list[str]) -> str:
    """The sentence for a split and the classes that it lacks."""
    return f"{split} has no image of {counted(len(names), 'class')}: {some(names)}"


def only_class(examples: Examples, classes: tuple[str, ...]) -> str | None:
    """The name of the class that all images are of; None where there are several, or no labels."""
    if examples.labels is None or len(found := np.unique(examples.labels)) != 1:
        return None
    return classes[int(found[0])]
