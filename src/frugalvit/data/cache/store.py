"""Where the loader takes images from: the ``ImageStore`` interface, and the store of cached images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.rng import to_device_packed
from frugalvit.data.unreadable import substitute_rows

Order = Callable[[int], Tensor]
"""Step -> indices (B,) of the images that the step needs."""


class Fetched(NamedTuple):
    """Raw images of a batch: uint8 (B, 3, S, S') on the device, original sizes (B, 2) and indices (B,) on the CPU.

    The index of an unreadable image is the index of its substitute.
    """

    images: Tensor
    sizes: Tensor
    index: Tensor


class Fetcher(ABC):
    """Brings the images of each step to the device."""

    @abstractmethod
    def at(self, step: int) -> Fetched:
        """Return the images of a step."""


class ImageStore(ABC):
    """All images of a split, cached (``CachedStore``) or decoded on demand (``OnDemandStore``).

    Its length counts unreadable images too. Each has a substitute, so the order of a run does not depend on where the
    images are stored.
    """

    labels: Tensor | None
    names: list[str]
    device: torch.device
    unreadable: list[tuple[str, str]]  # name and reason

    def __len__(self) -> int:
        return len(self.names)

    @property
    def readable(self) -> int:
        """The number of images without those known to be unreadable."""
        return len(self) - len(self.unreadable)

    @property
    def on_device(self) -> bool:
        """True if fetching a batch needs no transfer to the device."""
        return False

    @property
    def found_late(self) -> bool:
        """True if unreadable images are found only when a step needs them."""
        return False

    @abstractmethod
    def fetcher(self, order: Order) -> Fetcher:
        """Return what brings the images of each step to the device."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory or the processes of the store."""


class CachedStore(ImageStore):
    """All readable images of a split as one uint8 tensor (M, 3, S, S') on the device, in RAM or in a mapped file.

    Args:
        images: (M, 3, S, S'), all resized to the cached size.
        sizes: (M, 2) height and width at which each image was decoded; crops are drawn in this size.
        labels: (N,) labels of all images of the split, readable or not.
        names: their N names.
        index: (M,) indices in the split of the readable images, ascending.
    """

    def __init__(
        self,
        images: Tensor,
        sizes: Tensor,
        labels: Tensor | None,
        names: list[str],
        index: Tensor,
        device: torch.device | str = "cpu",
        unreadable: list[tuple[str, str]] | None = None,
    ) -> None:
        self.images, self.sizes, self.labels, self.names, self.index = images, sizes, labels, names, index
        self.device, self.unreadable = torch.device(device), unreadable or []
        numbers = None if labels is None else labels.numpy(force=True)
        # (N,) the row of ``images`` for each index of the split
        self.rows = torch.from_numpy(substitute_rows(index.numpy(), len(names), numbers))

    @classmethod
    def from_arrays(
        cls, images: np.ndarray | Tensor, labels: np.ndarray | Tensor | None = None, device: torch.device | str = "cpu"
    ) -> CachedStore:
        """Store decoded images of one size: uint8 (N, 3, H, W), or (N, H, W, 3)."""
        tensor = torch.as_tensor(images)
        if tensor.shape[1] != 3 and tensor.shape[-1] == 3:
            tensor = tensor.permute(0, 3, 1, 2).contiguous()
        sizes = torch.tensor([tensor.shape[-2:]]).expand(len(tensor), 2).contiguous()
        names = [str(i) for i in range(len(tensor))]
        numbers = None if labels is None else torch.as_tensor(labels).long()
        return cls(tensor.to(device), sizes, numbers, names, torch.arange(len(tensor)), device)

    @property
    def readable(self) -> int:
        return len(self.index)

    @property
    def on_device(self) -> bool:
        return self.images.device.type == self.device.type

    def gather(self, rows: Tensor) -> Tensor:
        """Copy these rows of the images to (pinned) host memory."""
        pinned = self.device.type == "cuda"
        batch = torch.empty((len(rows), *self.images.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        return torch.index_select(self.images, 0, rows, out=batch)

    def fetcher(self, order: Order) -> Fetcher:
        return CachedFetcher(self, order)

    def close(self) -> None:
        """Free the images even if a task still refers to the store."""
        on_gpu = self.images.is_cuda
        self.images = self.images.new_empty(0)
        if on_gpu:
            torch.cuda.empty_cache()  # so that the next run sees the memory as free


class CachedFetcher(Fetcher):
    """Takes the images of a step out of a ``CachedStore``.

    If they are in RAM or on disk and the device is a GPU, a thread gathers those of the next step meanwhile.
    """

    def __init__(self, store: CachedStore, order: Order) -> None:
        self.store, self.order = store, order
        needs_copy = store.images.device.type == "cpu" and store.device.type == "cuda"
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="fetch") if needs_copy else None
        self.pending: dict[int, Future[Tensor]] = {}

    def at(self, step: int) -> Fetched:
        store, rows = self.store, self.store.rows[self.order(step)]
        return Fetched(self._images(step, rows), store.sizes[rows], store.index[rows])

    def _images(self, step: int, rows: Tensor) -> Tensor:
        store = self.store
        if self.pool is None and store.on_device:
            return store.images.index_select(0, to_device_packed([rows], store.images.device)[0])
        ready = self.pending.pop(step, None)
        host = ready.result() if ready is not None else store.gather(rows)
        if self.pool is not None:
            self.pending = {step + 1: self.pool.submit(self._gather_step, step + 1)}
        return host.to(store.device, non_blocking=True)

    def _gather_step(self, step: int) -> Tensor:
        return self.store.gather(self.store.rows[self.order(step)])


class SharedStores:
    """Keeps the last few stores, so that the runs of one process decode the same images once.

    Stores are shared only inside ``shared``: their images may fill a GPU, and on-demand stores own processes.
    """

    def __init__(self, limit: int = 4) -> None:
        self.limit, self.depth = limit, 0
        self.stores: dict[Hashable, ImageStore] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share stores inside this context; the outermost context closes them at its end."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            while not self.depth and self.stores:
                self.stores.popitem()[1].close()

    def get(self, key: Hashable, build: Callable[[], ImageStore]) -> ImageStore:
        """Return the store of this key, or build it."""
        if not self.depth:
            return build()
        store = self.stores.pop(key, None)
        if store is None:
            while len(self.stores) >= self.limit:
                self.stores.pop(next(iter(self.stores)))  # not closed: the current run may still use it
            store = build()
        self.stores[key] = store  # most recently used last
        return store
