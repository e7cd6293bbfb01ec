"""The labels that a segmenter was trained with, beside those of other data: names decide, as they do for detectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frugalvit.errors import UserError
from frugalvit.tasks.detection.metrics import IGNORED
from frugalvit.utils.text import truncate_list


@dataclass(frozen=True)
class LabelMap:
    """A model's name, its classes, the label of each in its own data, and the label that counted nowhere there."""

    model: str
    classes: tuple[str, ...]
    labels: tuple[int, ...]
    ignored: int

    def differs(self, names: tuple[str, ...]) -> bool:
        """Whether data with these names by label have a name of the model's, but at another label."""
        return any(name in names for _, name, _ in self._unlike(names))

    def renamed(self, names: tuple[str, ...]) -> list[str]:
        """A word where data only spell or name otherwise what has the same number; nothing stands elsewhere."""
        unlike = [(label, name, there) for label, name, there in self._unlike(names) if label < len(names)]
        if not unlike:
            return []
        label, name, there = unlike[0]
        more = f" ({len(unlike)} labels in all)" if len(unlike) > 1 else ""
        return [f"label {label} is '{there}' there and '{name}' in {self.model}: their number decides{more}"]

    def _unlike(self, names: tuple[str, ...]) -> list[tuple[int, str, str]]:
        """Labels, the model's names of them and the data's, where both have names and these differ."""
        if not _are_names(names) or not _are_names(self.classes):
            return []
        both = ((label, name, name_of(label, names)) for label, name in zip(self.labels, self.classes, strict=True))
        return [(label, name, there) for label, name, there in both if name != there]

    def table(self, names: tuple[str, ...], present: dict[int, Path], ignored: int) -> np.ndarray:
        """The model's class of every label of such data; a name that it lacks is a mistake only where a mask has it."""
        places = {name: place for place, name in enumerate(self.classes) if self.classes.count(name) == 1}
        table = np.full(256, IGNORED, np.uint8)
        for label in sorted({*present, *range(len(names))} - {ignored, IGNORED}):
            name = name_of(label, names)
            if name in places:
                table[label] = places[name]
            elif label in present:
                what = "calls several so" if name in self.classes else "does not have"
                raise UserError(
                    f"{present[label]} holds the label {label}, '{name}', which {self.model} {what}: both must call "
                    f"the same things the same. Rename it, or give --ignore-index {label} if it should not count."
                )
        if present and all(table[label] == IGNORED for label in present):
            raise UserError(
                f"The masks hold nothing that {self.model} knows: it tells {truncate_list(self.classes)} apart."
            )
        return table

    def note(self, table: np.ndarray, names: tuple[str, ...], where: str) -> str:
        """That labels were translated, with the first of them."""
        known = {label: self.labels[table[label]] for label in np.flatnonzero(table != IGNORED).tolist()}
        moved = next(((label, other) for label, other in known.items() if label != other), None)
        example = f" ('{name_of(moved[0], names)}' is {moved[0]} there, {moved[1]} here)" if moved else ""
        return f"{where} numbers its classes otherwise than {self.model}: names decide{example}"


def name_of(label: int, names: tuple[str, ...]) -> str:
    """What a label is called; its number where nobody named it."""
    return names[label] if label < len(names) else str(label)


def _are_names(names: tuple[str, ...]) -> bool:
    """Whether somebody gave names: numbers stand for there being none."""
    return any(not name.isdecimal() for name in names)
