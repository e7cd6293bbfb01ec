"""Pictures of any size -> a step's batch. A batch is a pure function of (seed, step), as everywhere here.

Dense tasks keep each picture's own shape, so the classifier's store of equal rectangles does not serve. What is drawn
at random for the whole global batch is cut per process; the next step is prepared while the device works.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from frugalvit.data.cache.build import memory_share
from frugalvit.data.cache.store import substitutes
from frugalvit.data.decode import UnreadableImage, decode, read_header
from frugalvit.data.rng import generator_for, uniform
from frugalvit.errors import UserError
from frugalvit.tasks.dense.image_headers import check_bad, warn_unreadable
from frugalvit.utils import console
from frugalvit.utils.system import cores

T = TypeVar("T")
_SHARE_OF_MEMORY = 0.25
"""Decoded pictures and their masks may take this share of the free memory before they are decoded anew every time."""


class ImageReader:
    """Decoded pictures, uint8 (3, H, W), kept in memory where they fit.

    room:   bytes that are left then for what belongs to them
    bad:    files that were asked for and cannot be read, and why
    faults: which of these pictures they are, as far as is known
    """

    def __init__(
        self, paths: Sequence[Path], sizes: Sequence[tuple[int, int]], *, where: str = "auto", device: str | None = None
    ) -> None:
        self.paths, self.sizes = list(paths), list(sizes)
        needed = 3 * sum(height * width for height, width in sizes)
        self.room = _SHARE_OF_MEMORY * memory_share() - needed if where == "auto" else math.inf
        self.keeps = where != "off" and self.room > 0
        self.device = device if where == "device" else None
        self._kept: dict[int, Tensor] = {}
        self.bad: list[tuple[str, str]] = []
        self.faults: dict[int, UnreadableImage] = {}
        self.max_bad = 1.0
        self._noting = threading.Lock()

    def __len__(self) -> int:
        return len(self.paths)

    def to_learn(self, index: int) -> tuple[int, Tensor]:
        """A picture to learn from and its place: the next one, where this cannot be read (``data/cache/store.py``)."""
        for place in substitutes(index, len(self), None):
            if place not in self.faults:
                try:
                    return place, self.read(place)
                except UnreadableImage as fault:
                    self._note(place, fault)
        raise UserError(f"None of the {len(self)} images can be read.")

    def _note(self, place: int, fault: UnreadableImage) -> None:
        """One that is met while training: it is named, and if they are too many now, the run ends."""
        with self._noting:  # threads load the pictures of a step
            if place in self.faults:
                return
            self.faults[place] = fault
            self.bad.append((fault.name, fault.reason))
            console.warning(f"{fault} (left out)")
            check_bad(list(self.faults.values()), len(self), self.max_bad)

    def read(self, index: int) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        pixels = torch.from_numpy(decode(self.paths[index])).permute(2, 0, 1).contiguous()
        if self.keeps:
            self._kept[index] = pixels = pixels if self.device is None else pixels.to(self.device)
        return pixels

    def find_bad(self, workers: int, max_bad: float, *, decode: bool = False) -> list[int]:
        """The places of unreadable pictures, before training, or an error when they are many.

        What is kept is decoded for it; of what is not, headers and ends are looked at, unless ``decode`` wants to know
        of every one.
        """
        decode = decode or self.keeps
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda index: self._fault(index, decode), range(len(self)))
            label = "decoding images" if decode else "looking at images"
            faults = enumerate(console.progress(found, total=len(self), label=label))
            self.faults = {index: fault for index, fault in faults if fault is not None}
        warn_unreadable(list(self.faults.values()), len(self), max_bad)
        self.bad, self.max_bad = [(fault.name, fault.reason) for fault in self.faults.values()], max_bad
        return list(self.faults)

    def without_bad(self) -> ImageReader:
        """The others, with what is kept of them."""
        whole = [place for place in range(len(self)) if place not in self.faults]
        others = copy.copy(self)
        others.paths, others.sizes = [self.paths[place] for place in whole], [self.sizes[place] for place in whole]
        others._kept = {new: self._kept[old] for new, old in enumerate(whole) if old in self._kept}
        others.faults = {}
        return others

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
    """This process's share of every step: loaded items and the random numbers that belong to them.

    load:    index -> whatever an item is on the CPU; called by ``workers`` threads
    columns: uniform random numbers an item needs
    """

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
            raise UserError(f"A batch of {batch} cannot be shared by {world} processes; give a multiple of {world}.")
        self.count, self.batch, self.load, self.columns = count, batch, load, columns
        self.seed, self.rank, self.world = seed, rank, world
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)
        self._pool = ThreadPoolExecutor(workers)
        self._ahead: tuple[int, list[Future[T]]] | None = None

    def at(self, step: int) -> tuple[list[T], Tensor]:
        """Items and their numbers (n, columns) of a step; loading the next step begins."""
        jobs = self._ahead[1] if self._ahead is not None and self._ahead[0] == step else self._submit(step)
        items = [job.result() for job in jobs]
        self._ahead = (step + 1, self._submit(step + 1))
        numbers = uniform(self.batch, self.columns, generator_for(self.seed, "augment", step))
        part = self.batch // self.world
        return items, numbers[self.rank * part : (self.rank + 1) * part]

    def indices(self, step: int) -> list[int]:
        """The places of this process's items. An epoch's rest goes into the next one, so that every batch is full."""
        part = self.batch // self.world
        start = step * self.batch + self.rank * part
        return [self._index(place) for place in range(start, start + part)]

    def _index(self, place: int) -> int:
        epoch, within = divmod(place, self.count)
        return self._order(epoch)[within]

    def _draw_order(self, epoch: int) -> list[int]:
        return torch.randperm(self.count, generator=generator_for(self.seed, "order", epoch)).tolist()

    def _submit(self, step: int) -> list[Future[T]]:
        return [self._pool.submit(self.load, index) for index in self.indices(step)]


def to_device_flat(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The elements of all parts in one row on the device, by one copy from pinned memory.

    A copy from other memory waits for all the work that is queued on the device.
    """
    flat = [part.reshape(-1) for part in parts]
    if device.type != "cuda" or parts[0].device == device:
        return torch.cat(flat).to(device)
    pinned = torch.empty(sum(len(part) for part in flat), dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(flat, out=pinned).to(device, non_blocking=True)


def share(count: int, fabric: Any) -> range:
    """The places a process evaluates."""
    return range(fabric.global_rank, count, fabric.world_size)
