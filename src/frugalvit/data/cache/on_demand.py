"""Images that are not cached: worker processes decode and resize them while training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.bad_images import UnreadableImage, check_unreadable, substitutes
from frugalvit.data.cache.store import Fetched, Fetcher, ImageStore, Order
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.data.worker_pool import WorkerPool, may_start_processes
from frugalvit.errors import UserError
from frugalvit.utils import console

_MAX_READY = 8  # decoded batches that wait for their steps: a batch may take 100 MB
_ADVICE = "Use fewer --workers, or cache the images with --cache.location disk."


class DecodedBatch(NamedTuple):
    """A worker's result: images (B, C, S, S'), sizes (B, 2), indices of images or substitutes (B,).

    An index is -1 if neither the image nor a substitute is readable. ``unreadable`` maps indices to name and reason.
    """

    images: Tensor
    sizes: Tensor
    index: Tensor
    unreadable: dict[int, tuple[str, str]]


@dataclass(eq=False)
class OnDemandStore(ImageStore):
    """Decodes images when a step needs them. More than ``limit`` unreadable ones end the run."""

    examples: ImageDataset
    cached_size: tuple[int, int]
    device: torch.device
    workers: int
    limit: int
    crop: CenterCrop | None = None
    decodes_on_demand = True

    def __post_init__(self) -> None:
        self.workers = self.workers if may_start_processes() else 0  # 0 decodes in this process
        self.names, truth = self.examples.names, self.examples.truth
        self.labels = None if truth is None else torch.from_numpy(truth)
        self.unreadable: list[tuple[str, str]] = []
        self.unreadable_index: set[int] = set()
        self._pool: WorkerPool | None = None

    @property
    def readable(self) -> int:
        return len(self) - len(self.unreadable)

    def fetcher(self, order: Order) -> Fetcher:
        return WorkerFetcher(self, order)

    def pool(self) -> WorkerPool:
        """Return the worker processes, started once: every evaluation reuses them."""
        if self._pool is None:
            arguments = self.examples, self.cached_size, self.limit, self.crop
            self._pool = WorkerPool(self.workers, Decoder, *arguments, advice=_ADVICE)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def record_unreadable(self, unreadable: dict[int, tuple[str, str]]) -> None:
        """Count and log unreadable images, each once; ``UserError`` if there are more than ``limit``."""
        for index, (name, reason) in unreadable.items():
            if index not in self.unreadable_index:
                console.warning(f"left out: {name}: {reason}")
                self.unreadable_index.add(index)
                self.unreadable.append((name, reason))
        check_unreadable(self.unreadable, self.limit, len(self))


class WorkerFetcher(Fetcher):
    """Lets the workers decode the next steps in advance. A jump to another step discards their work."""

    def __init__(self, store: OnDemandStore, order: Order) -> None:
        self.store, self.order = store, order
        self.pending: dict[int, Callable[[], DecodedBatch]] = {}

    def at(self, step: int) -> Fetched:
        store = self.store
        images, sizes, index, unreadable = self._decoded(step)
        store.record_unreadable(unreadable)
        if bool((index < 0).any()):
            first = ": ".join(unreadable[min(unreadable)])
            raise UserError(f"None of the {len(store)} images can be read; the first: {first}.")
        if store.device.type == "cuda":
            images = images.pin_memory()
        return Fetched(images.to(store.device, non_blocking=True), sizes, index)

    def _decoded(self, step: int) -> DecodedBatch:
        pool, workers = self.store.pool(), self.store.workers
        last = step + 1 + workers + min(workers, _MAX_READY)
        ahead = range(step, last if self.end is None else max(step + 1, min(last, self.end)))
        self.pending = {other: wait for other, wait in self.pending.items() if other in ahead}
        for other in ahead:
            if other not in self.pending and len(index := self.order(other)):
                self.pending[other] = pool.submit(index.tolist())
        return self.pending.pop(step)()


@dataclass(frozen=True)
class Decoder:
    """Decodes and resizes the images of a list of indices, with substitutes for unreadable ones.

    After more than ``limit`` unreadable images it tries no more substitutes, because the run ends anyway.
    """

    examples: ImageDataset
    cached_size: tuple[int, int]
    limit: int
    crop: CenterCrop | None = None

    def __call__(self, indices: list[int]) -> DecodedBatch:
        unreadable: dict[int, tuple[str, str]] = {}
        dtype, channels = self.examples.pixels
        images = torch.zeros((len(indices), channels, *self.cached_size), dtype=getattr(torch, dtype))
        sizes, index = [], []
        for row, wanted in enumerate(indices):
            read, pixels, size = self._read_or_substitute(wanted, unreadable)
            index.append(read)
            sizes.append(size)
            if pixels is not None:
                images[row] = torch.from_numpy(pixels).permute(2, 0, 1)
        return DecodedBatch(images, torch.tensor(sizes), torch.tensor(index), unreadable)

    def _read_or_substitute(
        self, wanted: int, unreadable: dict[int, tuple[str, str]]
    ) -> tuple[int, np.ndarray | None, tuple[int, int]]:
        for index in substitutes(wanted, len(self.examples), self.examples.labels):
            if len(unreadable) > self.limit:
                break
            if index in unreadable:
                continue
            try:
                return index, *self.examples.read_sized(index, self.cached_size, self.crop)
            except UnreadableImage as error:
                unreadable[index] = error.name, error.reason
        return -1, None, self.cached_size  # the main process raises the error
