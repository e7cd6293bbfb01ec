"""Decoded images that several runs of one process share, and that none of them leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from frugalvit.data.loader import Store


class SharedStores:
    """Stores by what they were made from, the last few that were asked for.

    They are kept inside of ``shared`` alone: their images may fill much of a GPU, and those that keep no images have
    processes that decode.
    """

    def __init__(self, most: int = 4) -> None:
        self.most, self.sharers = most, 0
        self.stores: dict[Hashable, Store] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Around a run, or around several: what is decoded serves all of them, and goes with the outermost."""
        self.sharers += 1
        try:
            yield
        finally:
            self.sharers -= 1
            while not self.sharers and self.stores:
                self.stores.popitem()[1].close()

    def get(self, key: Hashable, build: Callable[[], Store]) -> Store:
        """The store that was built for this key, or a new one."""
        if not self.sharers:
            return build()
        found = self.stores.pop(key, None)
        if found is None:
            while len(self.stores) >= self.most:
                self.stores.pop(next(iter(self.stores)))  # not closed: the run of now may still use it
            found = build()
        self.stores[key] = found  # the last again
        return found
