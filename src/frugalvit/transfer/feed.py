"""Pictures of any size -> a step's batch. A batch is a pure function of (seed, step), as everywhere here.

Dense tasks keep each picture's own shape, so the classifier's store of equal rectangles does not serve. What is drawn
at random for the whole global batch is cut per process; the next step is prepared while the device works.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from frugalvit import console
from frugalvit.data.cache import memory_share
from frugalvit.data.decode import BadImage, decode, read_header
from frugalvit.data.machine import cores
from frugalvit.data.randomness import generator_for, uniform
from frugalvit.errors import UserError
from frugalvit.transfer.places import name_bad

T = TypeVar("T")
_SHARE_OF_MEMORY = 0.25
"""Decoded pictures and their masks may take this share of the free memory before they are decoded anew every time."""


class Pictures:
    """Decoded pictures, uint8 (3, H, W), kept in memory where they fit.

    room: bytes that are left then for what belongs to them
    bad:  files that were asked for beside them and cannot be read, and why
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

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        pixels = torch.from_numpy(decode(self.paths[index])).permute(2, 0, 1).contiguous()
        if self.keeps:
            self._kept[index] = pixels = pixels if self.device is None else pixels.to(self.device)
        return pixels

    def find_bad(self, workers: int, max_bad: float) -> list[int]:
        """The places of unreadable pictures, before training, or an error when they are many.

        What is kept is decoded for it; of what is not, headers and ends are looked at.
        """
        bad: list[tuple[int, BadImage]] = []
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(self._fault, range(len(self)))
            for index, fault in enumerate(
                console.progress(found, total=len(self), label="decoding images" if self.keeps else "looking at images")
            ):
                if fault is not None:
                    bad.append((index, fault))
        name_bad([fault for _, fault in bad], len(self), max_bad)
        self.bad = [(fault.name, fault.reason) for _, fault in bad]
        return [index for index, _ in bad]

    def _fault(self, index: int) -> BadImage | None:
        try:
            if self.keeps:
                self.read(index)
            else:
                read_header(self.paths[index], whole=True)
        except BadImage as fault:
            return fault
        return None


def worker_count(workers: int | str) -> int:
    return min(8, cores()) if workers == "auto" else max(1, int(workers))


class Feed(Generic[T]):
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


def send(parts: Sequence[Tensor], device: torch.device) -> Tensor:
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
