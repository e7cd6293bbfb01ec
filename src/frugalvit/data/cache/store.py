"""Decoded images, ready to be fetched in batches: kept on the device, in RAM or mapped from a file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.rng import to_device_packed


class Fetched(NamedTuple):
    """Raw images of a batch: uint8 (B, 3, S, S') on the device, original sizes (B, 2) and positions (B,) on the CPU.

    The positions are those of the images that came, which for an unreadable one is that of its stand-in.
    """

    images: Tensor
    sizes: Tensor
    index: Tensor


class Fetcher:
    """Images of step after step. ``order(step)`` names the positions a step needs."""

    def __init__(self, store: ImageStore, order: Callable[[int], Tensor]) -> None:
        self.store, self.order = store, order

    def at(self, step: int) -> Fetched:
        rows = self.store.rows[self.order(step)]
        return Fetched(self.store.fetch(rows), self.store.sizes[rows], self.store.kept[rows])


class AheadFetcher(Fetcher):
    """Gathers the next step's images from RAM or disk in a thread while the device works on this one."""

    def __init__(self, store: ImageStore, order: Callable[[int], Tensor]) -> None:
        super().__init__(store, order)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self.waiting: dict[int, Future[Tensor]] = {}

    def at(self, step: int) -> Fetched:
        rows = self.store.rows[self.order(step)]
        ahead = self.waiting.pop(step, None)
        host = ahead.result() if ahead is not None else self.store.gather(rows)
        self.waiting = {step + 1: self.pool.submit(self._gather_step, step + 1)}
        images = host.to(self.store.device, non_blocking=True)
        return Fetched(images, self.store.sizes[rows], self.store.kept[rows])

    def _gather_step(self, step: int) -> Tensor:
        return self.store.gather(self.store.rows[self.order(step)])


@dataclass
class ImageStore:
    """All images of a split that can be read, as one uint8 tensor (M, 3, S, S').

    Every image is squeezed to the same rectangle; ``sizes`` (M, 2) remembers the height and width it was decoded at,
    in which crops are drawn. ``labels`` and ``names`` are those of all N images of the split, in whose positions a
    fetcher is asked; ``kept`` (M,) are the positions of the images, ``rows`` (N,) says which of them each position
    gets. Unreadable images are listed in ``bad``, and others stand in for them (``standins.py``).
    """

    images: Tensor
    sizes: Tensor
    labels: Tensor | None
    names: list[str]
    kept: Tensor
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    where: str = "ram"
    bad: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        labels = None if self.labels is None else self.labels.numpy(force=True)
        self.rows = torch.from_numpy(substitute_rows(self.kept.numpy(), len(self.names), labels))

    @classmethod
    def from_arrays(
        cls, images: np.ndarray | Tensor, labels: np.ndarray | Tensor | None = None, device: torch.device | str = "cpu"
    ) -> ImageStore:
        """Images of one size that are already decoded: uint8 (N, 3, H, W), or (N, H, W, 3)."""
        tensor = torch.as_tensor(images)
        if tensor.shape[1] != 3 and tensor.shape[-1] == 3:
            tensor = tensor.permute(0, 3, 1, 2).contiguous()
        sizes = torch.tensor([tensor.shape[-2:]]).expand(len(tensor), 2).contiguous()
        names = [str(i) for i in range(len(tensor))]
        numbers = None if labels is None else torch.as_tensor(labels).long()
        device = torch.device(device)
        return cls(tensor.to(device), sizes, numbers, names, torch.arange(len(tensor)), device)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def readable(self) -> int:
        return len(self.kept)

    def fetch(self, rows: Tensor) -> Tensor:
        """These of the images (B,), on the device."""
        if self.images.device.type == self.device.type:
            return self.images.index_select(0, to_device_packed([rows], self.images.device)[0])
        return self.gather(rows).to(self.device, non_blocking=True)

    def gather(self, rows: Tensor) -> Tensor:
        """These of the images in (pinned) host memory."""
        pinned = self.device.type == "cuda"
        batch = torch.empty((len(rows), *self.images.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        return torch.index_select(self.images, 0, rows, out=batch)

    def fetcher(self, order: Callable[[int], Tensor]) -> Fetcher:
        """Whatever brings batches to the device without making it wait."""
        away = self.images.device.type == "cpu" and self.device.type == "cuda"
        return AheadFetcher(self, order) if away else Fetcher(self, order)

    def close(self) -> None:
        """Let the images go, whoever still holds the store: a task and its network are not collected at once."""
        on_gpu = self.images.is_cuda
        self.images = self.images.new_empty(0)
        if on_gpu:
            torch.cuda.empty_cache()  # what PyTorch keeps to itself would not count as free for the next run


def substitutes(place: int, count: int, labels: np.ndarray | None) -> Iterator[int]:
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


def substitute_rows(kept: np.ndarray, count: int, labels: np.ndarray | None) -> np.ndarray:
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


class Store(Protocol):
    """What the loader needs of a store: ``ImageStore``, or ``OnDemandStore`` for images that are decoded on the fly.

    It is as long as there are images, those among them that cannot be read: which these are may show only when they
    are fetched, and then others stand in for them, so the order of a run does not depend on where images are kept.
    """

    sizes: Tensor
    labels: Tensor | None
    names: list[str]
    device: torch.device
    bad: list[tuple[str, str]]

    def __len__(self) -> int: ...
    @property
    def readable(self) -> int: ...
    def fetcher(self, order: Callable[[int], Tensor]) -> Any: ...
    def close(self) -> None: ...
