"""The ``ImageStore`` interface of the loader, the store of cached images, and its file."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.bad_images import substitute_rows
from frugalvit.data.rng import to_device_packed
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import open_regular, write_atomically
from frugalvit.utils.text import short_message

Order = Callable[[int], Tensor]  # step -> indices (B,) of the images that the step needs


class Fetched(NamedTuple):
    """A batch of raw images (B, C, S, S') on the device; sizes (B, 2), indices (B,) on the CPU.

    Sizes are those of the originals. An unreadable image has the index of its substitute.
    """

    images: Tensor
    sizes: Tensor
    index: Tensor


class Fetcher(ABC):
    """Brings the images of each step to the device."""

    end: int | None = None  # no step from here on is decoded in advance

    @abstractmethod
    def at(self, step: int) -> Fetched:
        """Return the images of a step."""


class ImageStore(ABC):
    """All images of a split, cached (``CachedStore``) or decoded on demand (``OnDemandStore``).

    Its length includes unreadable images. Each of them has a substitute, so the order of a run does not depend on the
    kind of store.
    """

    labels: Tensor | None
    names: list[str]
    device: torch.device
    unreadable: list[tuple[str, str]]  # name and reason
    readable: int  # the number of images, without those known to be unreadable
    on_device: bool = False  # True if fetching a batch needs no transfer to the device
    decodes_on_demand: bool = False  # True if only a step that needs an image detects that it is unreadable

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def fetcher(self, order: Order) -> Fetcher:
        """Return a fetcher for the steps of ``order``."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory or the processes of the store."""


class CachedStore(ImageStore):
    """The readable images of a split as one tensor on the device, in RAM or in a mapped file.

    Args:
        images: (M, C, S, S'), uint8 or float32, all resized to the cached size.
        sizes: (M, 2) height and width at which each image was decoded; crops are drawn in this size.
        labels: (N,) labels of all images of the split, readable or not; or (N, C) targets.
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
        self.device, self.unreadable, self.readable = torch.device(device), unreadable or [], len(index)
        self.on_device = images.device.type == self.device.type
        numbers = None if labels is None or labels.ndim > 1 else labels.numpy(force=True)
        # (N,) the row of ``images`` for each index of the split
        self.rows = torch.from_numpy(substitute_rows(index.numpy(), len(names), numbers))

    @classmethod
    def from_arrays(
        cls, images: np.ndarray | Tensor, labels: np.ndarray | Tensor | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Store decoded images of one size: uint8 (N, 3, H, W), or (N, H, W, 3)."""
        tensor = torch.as_tensor(images)
        if tensor.shape[1] != 3 and tensor.shape[-1] == 3:
            tensor = tensor.permute(0, 3, 1, 2).contiguous()
        sizes = torch.tensor([tensor.shape[-2:]]).expand(len(tensor), 2).contiguous()
        names = [str(i) for i in range(len(tensor))]
        numbers = None if labels is None else torch.as_tensor(labels).long()
        return cls(tensor.to(device), sizes, numbers, names, torch.arange(len(tensor)), device)

    def gather(self, rows: Tensor) -> Tensor:
        """Copy these rows of the images to (pinned) host memory."""
        pinned = self.device.type == "cuda"
        batch = torch.empty((len(rows), *self.images.shape[1:]), dtype=self.images.dtype, pin_memory=pinned)
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

    If the images are in RAM or on disk and the device is a GPU, a thread gathers those of the next step in advance.
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
            self.pending = {step + 1: self.pool.submit(lambda: store.gather(store.rows[self.order(step + 1)]))}
        return host.to(store.device, non_blocking=True)


class SharedStores:
    """Keeps the last few stores inside ``shared``, so that the runs of one process decode the same images once."""

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
        if not self.depth:
            return build()
        store = self.stores.pop(key, None)
        if store is None:
            while len(self.stores) >= self.limit:
                self.stores.pop(next(iter(self.stores)))  # not closed: the current run may still use it
            store = build()
        self.stores[key] = store  # most recently used last
        return store


# -- files of cached images: ``images.bin`` holds the pixels (M, C, S, S'), ``images.pt`` the rest. It is written last,
#    so no reader sees the file of a killed writer.

_MAX_NAMED = 1000  # unreadable images that are stored by name
_BYTES = {"uint8": 1, "float32": 4}  # of a value
Fill = Callable[[Tensor], tuple[Tensor, Tensor, list[tuple[str, str]]]]
"""Fills the first M rows of (N, C, S, S') with the readable images. Returns sizes, indices and unreadable images."""


class CacheWriteError(UserError):
    """The cache file cannot be written: no permission, no space, a failing disk."""


class CachedImages(NamedTuple):
    """Decoded images (M or more, C, S, S'), sizes (M, 2), indices in the split (M,), unreadable images."""

    images: Tensor
    sizes: Tensor
    index: Tensor
    unreadable: list[tuple[str, str]]
    mapped: bool = False  # True if the images are mapped from a file


def write_file(path: Path, fingerprint: str, shape: tuple[int, ...], fill: Fill, dtype: str = "uint8") -> None:
    """Let ``fill`` decode into a mapped file, and write sizes, indices and the fingerprint beside it."""
    facts: dict[str, Any] = {"fingerprint": fingerprint, "dtype": dtype}

    def write(file: IO[bytes]) -> None:
        _reserve(file, math.prod(shape) * _BYTES[dtype])
        pixels = np.memmap(file, dtype=dtype, mode="r+", shape=shape)
        facts["sizes"], facts["index"], unreadable = fill(torch.from_numpy(pixels))
        pixels.flush()
        facts["shape"], facts["unreadable"] = (len(facts["index"]), *shape[1:]), unreadable[:_MAX_NAMED]
        file.truncate(math.prod(facts["shape"]) * _BYTES[dtype])

    try:
        path.with_suffix(".pt").unlink(missing_ok=True)
        write_atomically(path, write)
        write_atomically(path.with_suffix(".pt"), lambda file: torch.save(facts, file))
    except OSError as error:
        raise CacheWriteError(
            f"Cannot write the image cache to {path.parent} ({error.strerror or error}). Choose another "
            "--cache.folder, or use --cache.location ram."
        ) from None


def open_file(path: Path, fingerprint: str) -> CachedImages | None:
    """Map the images of a file; None if it is missing, damaged (logged) or made from other data."""
    try:
        with open_regular(path.with_suffix(".pt")) as file:
            facts = torch.load(file, weights_only=True)
        if facts["fingerprint"] != fingerprint:
            return None
        if path.stat().st_size != math.prod(facts["shape"]) * _BYTES[facts["dtype"]]:
            raise ValueError("wrong length")
        # Copy on write: torch needs writable memory, but no code writes to it.
        pixels = np.memmap(path, dtype=facts["dtype"], mode="c", shape=facts["shape"])
        return CachedImages(torch.from_numpy(pixels), facts["sizes"], facts["index"], facts["unreadable"], mapped=True)
    except FileNotFoundError:
        return None
    except Exception as error:  # torch raises many types for a damaged file
        console.warning(f"the image cache {path} is damaged ({short_message(error)}): decoding again")
        return None


def _reserve(file: IO[bytes], length: int) -> None:
    """Reserve the disk space now: a disk that fills up later would kill the process."""
    file.truncate(length)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, length)
