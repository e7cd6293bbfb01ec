"""Load images of any size for training steps. A batch is a function of (seed, step).

Dense tasks keep the shape of each image, so they cannot use the classifier's store of equal rectangles. Random numbers
are drawn for the global batch, and each rank takes its part; the next step loads while the device works.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from frugalvit.data.bad_images import UnreadableImage, substitutes
from frugalvit.data.cache.build import memory_share
from frugalvit.data.decode import decode, read_header
from frugalvit.data.formats.annotated_images import check_bad, warn_unreadable
from frugalvit.data.rng import generator_for, to_device_packed, uniform
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.system import cores

T = TypeVar("T")
_SHARE_OF_MEMORY = 0.25  # share of the free memory that cached images and masks may take; more than this is not cached


class ImageReader:
    """Decode images to uint8 (3, H, W) and cache them in memory if they fit."""

    def __init__(
        self, paths: Sequence[Path], sizes: Sequence[tuple[int, int]], *, where: str = "auto", device: Any = None
    ) -> None:
        self.paths, self.sizes = list(paths), list(sizes)
        needed = 3 * sum(height * width for height, width in sizes)
        self.free_bytes = _SHARE_OF_MEMORY * memory_share() - needed if where == "auto" else math.inf  # for masks
        self.is_cached = where != "off" and self.free_bytes > 0
        self.decodes_on_demand = not self.is_cached  # so that more images may turn out to be unreadable
        self.device = device if where == "device" else None
        self._cache: dict[int, Tensor] = {}
        self.unreadable: list[tuple[str, str]] = []  # (file, reason)
        self.faults: dict[int, UnreadableImage] = {}  # by index, of those in ``paths``
        self.max_bad = 1.0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def readable(self) -> int:
        return len(self) - len(self.faults)

    def read_or_substitute(self, index: int) -> tuple[int, Tensor]:
        """Return the index and the pixels of a training image; of the next one if it is unreadable."""
        for substitute in substitutes(index, len(self), None):
            if substitute not in self.faults:
                try:
                    return substitute, self.read(substitute)
                except UnreadableImage as fault:
                    self._add_fault(substitute, fault)
        raise UserError(f"None of the {len(self)} images can be read.")

    def _add_fault(self, index: int, fault: UnreadableImage) -> None:
        """Warn of an image that becomes unreadable during training; raise UserError if there are too many."""
        with self._lock:  # threads load the images of a step
            if index in self.faults:
                return
            self.faults[index] = fault
            self.unreadable.append((fault.name, fault.reason))
            console.warning(f"{fault} (left out)")
            check_bad(list(self.faults.values()), len(self), self.max_bad)

    def read(self, index: int) -> Tensor:
        """Return the pixels of an image, from the cache if it has them."""
        cached = self._cache.get(index)
        if cached is not None:
            return cached
        pixels = torch.from_numpy(decode(self.paths[index])).permute(2, 0, 1).contiguous()
        if self.is_cached:
            self._cache[index] = pixels = pixels if self.device is None else pixels.to(self.device)
        return pixels

    def find_bad(self, workers: int, max_bad: float, *, decode: bool = False) -> list[int]:
        """Find unreadable images. Cached ones, or all with ``decode``, are decoded; others are read at both ends."""
        decode = decode or self.is_cached
        with ThreadPoolExecutor(workers) as pool:
            results = pool.map(lambda index: self._fault(index, decode), range(len(self)))
            label = "decoding images" if decode else "checking images"
            faults = enumerate(console.progress(results, total=len(self), label=label))
            self.faults = {index: fault for index, fault in faults if fault is not None}
        warn_unreadable(list(self.faults.values()), len(self), max_bad)
        self.unreadable, self.max_bad = [(fault.name, fault.reason) for fault in self.faults.values()], max_bad
        return list(self.faults)

    def drop_bad(self, items: Sequence[T], workers: int, max_bad: float) -> list[T]:
        """Drop unreadable images; return the items of the others. All are decoded, whatever the cache holds."""
        bad = set(self.find_bad(workers, max_bad, decode=True))
        readable = [index for index in range(len(self)) if index not in bad]
        self.paths, self.sizes = [self.paths[i] for i in readable], [self.sizes[i] for i in readable]
        self._cache = {new: self._cache[old] for new, old in enumerate(readable) if old in self._cache}
        self.faults, self.decodes_on_demand = {}, False
        return [items[index] for index in readable]

    def _fault(self, index: int, decode: bool) -> UnreadableImage | None:
        try:
            if decode:
                self.read(index)
            else:
                read_header(self.paths[index], complete=True)
        except UnreadableImage as fault:
            return fault
        return None


def worker_count(workers: int | str) -> int:
    return min(8, cores()) if workers == "auto" else max(1, int(workers))


class StepLoader(Generic[T]):
    """Load this rank's items of a step, by ``load`` in threads, and ``columns`` uniform random numbers for each."""

    def __init__(
        self,
        count: int,
        batch: int,
        load: Callable[[int], T],
        columns: int,
        *,
        seed: int,
        workers: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch % world:
            raise UserError(f"A batch of {batch} cannot be divided among {world} processes. Use a multiple of {world}.")
        self.count, self.batch, self.load, self.columns = count, batch, load, columns
        self.seed, self.rank, self.world = seed, rank, world
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)
        self._pool = ThreadPoolExecutor(workers)
        self._ahead: tuple[int, list[Future[T]]] | None = None

    def at(self, step: int) -> tuple[list[T], Tensor]:
        """Return the items of a step and their random numbers (n, columns), and start to load the next step."""
        jobs = self._ahead[1] if self._ahead is not None and self._ahead[0] == step else self._submit(step)
        items = [job.result() for job in jobs]
        self._ahead = (step + 1, self._submit(step + 1))
        numbers = uniform(self.batch, self.columns, generator_for(self.seed, "augment", step))
        part = self.batch // self.world
        return items, numbers[self.rank * part : (self.rank + 1) * part]

    def indices(self, step: int) -> list[int]:
        """Return the indices of this rank's items. A batch may span two epochs, so that every batch is full."""
        part = self.batch // self.world
        start = step * self.batch + self.rank * part
        positions = (divmod(position, self.count) for position in range(start, start + part))
        return [self._order(epoch)[within] for epoch, within in positions]

    def _draw_order(self, epoch: int) -> list[int]:
        return torch.randperm(self.count, generator=generator_for(self.seed, "order", epoch)).tolist()

    def _submit(self, step: int) -> list[Future[T]]:
        return [self._pool.submit(self.load, index) for index in self.indices(step)]


def to_device_flat(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate the elements of all parts on the device, with one copy that does not wait for its queued work."""
    moved = parts if parts[0].device == device else to_device_packed(parts, device)
    return torch.cat([part.reshape(-1) for part in moved])


def share(count: int, fabric: Any) -> range:
    return range(fabric.global_rank, count, fabric.world_size)
