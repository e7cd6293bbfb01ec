"""Map the labels of a dataset to the classes of a trained segmenter, by their names."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frugalvit.errors import UserError
from frugalvit.tasks.segmentation.metrics import IGNORED
from frugalvit.utils.text import truncate_list


@dataclass(frozen=True)
class LabelMap:
    """A model's name, its classes, their labels in its training data, and the label ignored there."""

    model: str
    classes: tuple[str, ...]
    labels: tuple[int, ...]
    ignored: int

    def differs(self, names: tuple[str, ...]) -> bool:
        """True if a dataset with these names by label has one of the model's names at another label."""
        if not (_has_names(names) and _has_names(self.classes)):
            return False
        pairs = zip(self.labels, self.classes, strict=True)
        return any(name in names and name != name_of(label, names) for label, name in pairs)

    def table(self, names: tuple[str, ...], present: dict[int, Path], ignored: int) -> np.ndarray:
        """Return the model's class of every label of such a dataset.

        present: the labels in its masks, each with an example. A name that the model lacks is an error only there.
        """
        indices = {name: index for index, name in enumerate(self.classes) if self.classes.count(name) == 1}
        table = np.full(256, IGNORED, np.uint8)
        for label in sorted({*present, *range(len(names))} - {ignored, IGNORED}):
            name = name_of(label, names)
            if name in indices:
                table[label] = indices[name]
            elif label in present:
                problem = "has several times" if name in self.classes else "does not have"
                raise UserError(
                    f"{present[label]} has the label {label}, '{name}', which {self.model} {problem}. Rename the "
                    f"class, or ignore it with --ignore-index {label}."
                )
        if present and all(table[label] == IGNORED for label in present):
            raise UserError(f"The masks have none of the classes of {self.model}: {truncate_list(self.classes)}.")
        return table

    def note(self, table: np.ndarray, names: tuple[str, ...], where: str) -> str:
        """Say that labels were mapped by name, with an example."""
        mapped = {label: self.labels[table[label]] for label in np.flatnonzero(table != IGNORED).tolist()}
        moved = next(((label, other) for label, other in mapped.items() if label != other), None)
        example = f" ('{name_of(moved[0], names)}' is {moved[0]} and {moved[1]})" if moved else ""
        return f"{where} and {self.model} have different labels: matched by name{example}"


def name_of(label: int, names: tuple[str, ...]) -> str:
    """Return the name of a label; its number without one."""
    return names[label] if label < len(names) else str(label)


def _has_names(names: tuple[str, ...]) -> bool:
    """True if the classes have names, not just numbers."""
    return any(not name.isdecimal() for name in names)
