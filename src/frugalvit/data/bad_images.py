"""Unreadable images: their error, their limit (``--cache.max-bad``) and their substitutes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self, TypeVar

import numpy as np

from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.system import cores

T = TypeVar("T")
_BLOCK = 1024  # images given to the threads at once: an error does not wait for the others


def check_unreadable(unreadable: list[tuple[str, str]], limit: int, count: int) -> None:
    """Raise ``UserError`` if more than ``limit`` of ``count`` images are unreadable."""
    if len(unreadable) > limit:
        examples = "; ".join(f"{name}: {reason}" for name, reason in unreadable[:3])
        raise UserError(
            f"{len(unreadable)} of {count} images cannot be read, but at most {limit} may be (for training: "
            f"--cache.max-bad): {examples}. "
            "Fix or remove them ('frugalvit data' lists them all)."
        )


def substitutes(index: int, count: int, labels: np.ndarray | None) -> Iterator[int]:
    """Yield an image's index, then its substitutes: first its class, then all others, each cyclically."""
    yield index
    if labels is not None:
        same = np.flatnonzero(labels == labels[index])
        position = int(np.searchsorted(same, index))
        yield from same[position + 1 :].tolist()
        yield from same[:position].tolist()
    for distance in range(1, count):
        other = (index + distance) % count
        if labels is None or labels[other] != labels[index]:
            yield other


def substitute_rows(readable: np.ndarray, count: int, labels: np.ndarray | None) -> np.ndarray:
    """Map each of ``count`` indices to the row in ``readable`` (ascending) of its image or substitute."""
    rows = np.searchsorted(readable, np.arange(count)) % len(readable)
    missing = np.setdiff1d(np.arange(count), readable, assume_unique=True)
    if labels is None or not len(missing):
        return rows
    for label in np.unique(labels[missing]):
        same = np.flatnonzero(labels[readable] == label)
        if len(same):
            of_class = missing[labels[missing] == label]
            rows[of_class] = same[np.searchsorted(readable[same], of_class) % len(same)]
    return rows


class UnreadableImage(UserError):
    """An image that cannot be used: its ``name`` and the ``reason``."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason

    @classmethod
    def of_file(cls, name: str, error: Exception) -> Self:
        is_missing = isinstance(error, FileNotFoundError)
        reason = getattr(error, "strerror", None) or error
        return cls(name, "the file is missing" if is_missing else f"cannot read the file: {reason}")

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.name, self.reason)  # pickles, so that a worker can raise it


class SkippedFile(NamedTuple):
    """An unreadable file of a split, and the reason."""

    split: str
    file: str
    reason: str


def read_all(
    read: Callable[[int], T], indices: Sequence[int], label: str, threads: int = 0
) -> Iterator[T | UnreadableImage]:
    """Yield ``read(index)`` or its ``UnreadableImage``, in order, with a progress bar; 0 threads: by the cores."""

    def read_one(index: int) -> T | UnreadableImage:
        try:
            return read(index)
        except UnreadableImage as error:
            return error

    threads = threads or min(8, cores() + 1)
    with ThreadPoolExecutor(threads, thread_name_prefix=label) as pool:
        apply = pool.map if threads > 1 else map
        blocks = (indices[start : start + _BLOCK] for start in range(0, len(indices), _BLOCK))
        results = (result for block in blocks for result in apply(read_one, block))
        yield from console.progress(results, total=len(indices), label=label)
