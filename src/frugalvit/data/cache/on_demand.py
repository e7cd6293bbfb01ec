"""Images too many to keep: worker processes decode and squeeze them, the device does the rest as for cached ones."""

from __future__ import annotations

import multiprocessing as stdlib_multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, multiprocessing  # torch's sends tensors through shared memory

from frugalvit.data.cache.store import Fetched, substitutes
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import UnreadableImage
from frugalvit.data.image_size import resize_to
from frugalvit.errors import GUARD, UserError
from frugalvit.utils import console

_READY = 8  # batches, at most, that wait decoded while every process works on one: a batch may take 100 MB


class Decoded(NamedTuple):
    """A worker's answer: uint8 (B, 3, S, S'), sizes (B, 2), the positions really read (B,), and the bad ones met.

    bad: by position, with the name and the reason
    """

    images: Tensor
    sizes: Tensor
    index: Tensor
    bad: dict[int, tuple[str, str]]


class OnDemandStore:
    """A store that decodes when asked. Same interface as ``ImageStore``, but for ``images``.

    An unreadable image gives way to another, label and all (``standins.py``), and is listed in ``bad``: more than
    ``limit`` of them end the run.
    """

    where = "off"

    def __init__(
        self, examples: ImageDataset, rectangle: tuple[int, int], device: torch.device, workers: int, limit: int
    ) -> None:
        self.examples, self.rectangle, self.device = examples, rectangle, device
        self.workers, self.limit = workers, limit
        self.names = examples.names
        self.labels = None if examples.labels is None else torch.from_numpy(examples.labels)
        self.sizes = torch.empty(0, 2)  # known once an image is decoded: they come with the images
        self.bad: list[tuple[str, str]] = []
        self.known: set[int] = set()  # their positions
        self.decoder = Decoder(examples, rectangle, limit)
        self.answered = False  # whether a process has ever given images
        self._pool: Executor | None = None

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def readable(self) -> int:
        """As far as is known: those that were not met yet count."""
        return len(self) - len(self.bad)

    def fetcher(self, order: Callable[[int], Tensor]) -> WorkerFetcher:
        return WorkerFetcher(self, order)

    def pool(self) -> Executor:
        """The processes that decode, started once: an evaluation that returns every epoch finds them waiting.

        Threads where there can be no processes: slower, and the same images.
        """
        if self._pool is None and not may_start_others():
            self._pool = ThreadPoolExecutor(self.workers)
        elif self._pool is None:
            # Spawned, not forked: forking a process that has threads or a CUDA context can hang.
            self._pool = ProcessPoolExecutor(
                self.workers, multiprocessing.get_context("spawn"), _prepare_worker, (self.decoder,)
            )
        return self._pool

    def close(self) -> None:
        """End the processes that decode."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None

    def note_bad(self, found: dict[int, tuple[str, str]]) -> None:
        for position, (name, reason) in found.items():
            if position not in self.known:
                console.warning(f"left out: {name}: {reason}")
                self.known.add(position)
                self.bad.append((name, reason))
        if len(self.bad) > self.limit:
            shown = "; ".join(f"{name}: {reason}" for name, reason in self.bad[:3])
            raise UserError(f"{len(self.bad)} images cannot be read, more than --cache.max-bad allows: {shown}.")


class WorkerFetcher:
    """Keeps worker processes busy with the steps to come; a jump to another step leaves their work unused."""

    def __init__(self, store: OnDemandStore, order: Callable[[int], Tensor]) -> None:
        self.store, self.order = store, order
        self.waiting: dict[int, Future[Decoded]] = {}

    def at(self, step: int) -> Fetched:
        store = self.store
        images, sizes, index, bad = self._decoded(step) if store.workers else store.decoder(self.order(step).tolist())
        store.note_bad(bad)
        if bool((index < 0).any()):
            raise UserError(f"None of the {len(store)} images can be read; the first: {': '.join(bad[min(bad)])}.")
        if store.device.type == "cuda":
            images = images.pin_memory()
        return Fetched(images.to(store.device, non_blocking=True), sizes, index)

    def _decoded(self, step: int) -> Decoded:
        workers = self.store.workers
        ahead = range(step, step + 1 + workers + min(workers, _READY))
        try:
            pool = self.store.pool()
            work = self.store.decoder if isinstance(pool, ThreadPoolExecutor) else _decode_in_worker
            for number in [number for number in self.waiting if number not in ahead]:
                self.waiting.pop(number).cancel()
            for number in ahead:
                if number not in self.waiting and len(positions := self.order(number)):
                    self.waiting[number] = pool.submit(work, positions.tolist())
            decoded = self.waiting.pop(step).result()
        except BrokenProcessPool as error:
            advice = "Use fewer with --workers, or keep the images with --cache.where disk."
            raise worker_died_error("decodes images", advice, answered=self.store.answered) from error
        self.store.answered = True
        return decoded


class Decoder:
    """Positions -> decoded, squeezed images, with others for those that are unreadable.

    Where more than ``limit`` are, none is looked for any more: the run ends, and must not search a whole disk first.
    """

    def __init__(self, examples: ImageDataset, rectangle: tuple[int, int], limit: int) -> None:
        self.examples, self.rectangle, self.limit = examples, rectangle, limit

    def __call__(self, positions: list[int]) -> Decoded:
        bad: dict[int, tuple[str, str]] = {}
        images = torch.zeros((len(positions), 3, *self.rectangle), dtype=torch.uint8)
        sizes, index = [], []
        for slot, position in enumerate(positions):
            found, pixels = self._readable(position, bad)
            index.append(found)
            sizes.append(self.rectangle if pixels is None else pixels.shape[:2])
            if pixels is not None:
                images[slot] = torch.from_numpy(resize_to(pixels, self.rectangle)).permute(2, 0, 1)
        return Decoded(images, torch.tensor(sizes), torch.tensor(index), bad)

    def _readable(self, position: int, bad: dict[int, tuple[str, str]]) -> tuple[int, np.ndarray | None]:
        for here in substitutes(position, len(self.examples), self.examples.labels):
            if len(bad) > self.limit:
                break
            if here in bad:
                continue
            try:
                return here, self.examples.read(here, at_least=self.rectangle)
            except UnreadableImage as error:
                bad[here] = error.name, error.reason
        return -1, None  # the main process says it


_decoder: Decoder | None = None  # a worker's own


def _prepare_worker(decoder: Decoder) -> None:
    global _decoder
    begin_worker()
    _decoder = decoder


def _decode_in_worker(positions: list[int]) -> Decoded:
    assert _decoder is not None
    return _decoder(positions)


_GRACE = 10.0  # seconds


def begin_worker() -> None:
    """One thread; no orphan when the training is killed; no victim of a signal that means the training.

    Ctrl-C, a closed terminal and a job's signals reach every process of a group. The training finishes its step and
    saves, for which it needs its workers: they outlive SIGTERM by a few seconds and ignore the others.
    """
    torch.set_num_threads(1)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_soon)
    parent = stdlib_multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True, name="mind the parent").start()


def may_start_others() -> bool:
    """A daemonic process, as a pool of somebody's own may have started this one, has no children."""
    return not stdlib_multiprocessing.current_process().daemon


def worker_died_error(what: str, advice: str, *, answered: bool) -> UserError:
    """Why a process that ``what`` names ended; one that never ``answered`` may not have come as far as its work."""
    if answered:
        return UserError(f"A process that {what} was killed (out of memory?). {advice}")
    return UserError(
        f"A process that {what} ended before its first answer. Called from Python, {GUARD}. If that is so, it was "
        f"killed (out of memory?). {advice}"
    )


def _leave_soon(number: int, frame: object) -> None:
    timer = threading.Timer(_GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)
