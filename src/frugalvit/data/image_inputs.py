"""Images that a person names on the command line, for commands that look at them one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from frugalvit.data.decode import UnreadableImage, decode
from frugalvit.data.formats.folder import list_images, may_not_read
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import truncate_list


class Decoded(NamedTuple):
    """A readable image: which of those named, where it lies, its pixels (H, W, 3)."""

    place: int
    path: Path
    pixels: np.ndarray


@dataclass
class InputImages:
    """Image files as named, and those in folders named. One that cannot be read is said and left out of the results."""

    words: list[str]
    paths: list[Path] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        locked: list[str] = []
        for word in self.words:
            path = Path(word)
            if path.is_dir():
                found = list_images(str(path))
                self.paths += [Path(name) for name in found.images]
                locked += found.unreadable
            elif path.is_file():
                self.paths.append(path)
            else:
                raise UserError(f"There is no image {word}.")
        if locked and not self.paths:
            raise may_not_read(self.words[0], locked)
        if locked:
            console.warning(f"no permission to read {truncate_list(locked)}: what lies there is left out")
        if not self.paths:
            raise UserError(f"{self.words[0]} holds no images.")

    def batches(self, size: int, label: str, at_least: tuple[int, int] | None = None) -> Iterator[list[Decoded]]:
        """The readable ones, so many at once, decoded ``at_least`` so large; an error where there are none."""
        waiting: list[Decoded] = []
        for place, path in enumerate(console.progress(self.paths, label=label)):
            try:
                waiting.append(Decoded(place, path, decode(path, at_least=at_least)))
            except UnreadableImage as fault:
                console.warning(str(fault))
                self.unreadable.append(str(path))
            if len(waiting) == size:
                yield waiting
                waiting = []
        if waiting:
            yield waiting
        if len(self.unreadable) == len(self.paths):
            raise UserError(f"None of the {len(self.paths)} images can be read.")


def as_list(pictures: Any) -> Sequence[Any]:
    """Several pictures as a list, one as a list of it; an array of numbers is one, and so is an open file."""
    if isinstance(pictures, list | tuple):
        return pictures
    names = isinstance(pictures, np.ndarray) and pictures.ndim == 1 and pictures.dtype.kind in "OU"
    generator = isinstance(pictures, Iterator) and not hasattr(pictures, "read")
    column = hasattr(pictures, "to_numpy") and not hasattr(pictures, "columns")  # of pandas or polars
    return list(pictures) if names or generator or column else [pictures]
