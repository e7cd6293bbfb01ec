"""Which image is learned from in the turn of one that cannot be read.

It must be the same wherever decoded images are kept. Images that are decoded while training are found to be unreadable
only when their turn comes, long after the order is drawn; so the order is that of all images everywhere, and another
one takes the turn: the next of its class that can be read, which leaves classes as often as they were, or the next of
all where its class has no other. ``candidates`` tries them one by one; ``rows_for`` knows beforehand which can be read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def candidates(place: int, count: int, labels: np.ndarray | None) -> Iterator[int]:
    """An image's own place, then those to try for it: of its class in their order, round the end, then the others."""
    yield place
    if labels is not None:
        same = np.flatnonzero(labels == labels[place])
        behind = int(np.searchsorted(same, place))
        yield from same[behind + 1 :].tolist()
        yield from same[:behind].tolist()
    for distance in range(1, count):
        other = (place + distance) % count
        if labels is None or labels[other] != labels[place]:
            yield other


def rows_for(kept: np.ndarray, count: int, labels: np.ndarray | None) -> np.ndarray:
    """For each of ``count`` places the row, among those ``kept`` (ascending), of its own image or of its stand-in."""
    rows = np.searchsorted(kept, np.arange(count)) % len(kept)
    gone = np.setdiff1d(np.arange(count), kept, assume_unique=True)
    if labels is None or not len(gone):
        return rows
    for label in np.unique(labels[gone]):
        same = np.flatnonzero(labels[kept] == label)
        if len(same):
            mine = gone[labels[gone] == label]
            rows[mine] = same[np.searchsorted(kept[same], mine) % len(same)]
    return rows
