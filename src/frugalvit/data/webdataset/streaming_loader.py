"""Batches from shards read in passing, for more images than any machine holds: same interface as ``Batches``.

Reader processes take the shards apart, decode and squeeze; augmentation and mixing run batched on the device as ever.
Readers serve the steps in turn, and each reader's sequence depends on (seed, process, reader) alone, so a step's batch
is a function of the step: resuming skips what was taken and goes on exactly.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor, multiprocessing  # torch's sends tensors through shared memory

from frugalvit.data.augment.mixup import Mixing
from frugalvit.data.augment.transforms import Augment
from frugalvit.data.cache.on_demand import begin_worker, may_start_others, worker_died_error
from frugalvit.data.decode import UnreadableImage, decode
from frugalvit.data.image_size import resize_to
from frugalvit.data.loader import Batch
from frugalvit.data.rng import generator_for, to_device_packed, uniform
from frugalvit.data.webdataset.stream import ShardStream, StreamSample
from frugalvit.errors import UserError
from frugalvit.utils import console

_AHEAD = 2  # batches a reader prepares before they are asked for


class Part(NamedTuple):
    """A reader's task: its share of the stream, what a batch is, and how many examples are behind it already."""

    stream: ShardStream
    part: int
    parts: int
    batch: int
    rectangle: tuple[int, int]
    classes: tuple[str, ...] | None
    skip: int


class Read(NamedTuple):
    """A reader's answer: uint8 (B, 3, S, S'), sizes (B, 2), class numbers (B,) or None, and what was left out."""

    images: Tensor
    sizes: Tensor
    labels: Tensor | None
    bad: list[tuple[str, str]]
    damaged: list[tuple[str, str]]


class StreamingBatches:
    """Training batches by step from a ``ShardStream``.

    Args:
        stored: (S, S') the images are squeezed to before they reach the device.
        steps_per_epoch: what counts as an epoch (the stream itself has no known length).
        classes: names that label texts are looked up in; None trains without labels.
        workers: reader processes of this process; each needs shards of its own. 0 reads in this process.
        max_bad: share of unreadable images, among those seen, and of damaged shards at which the run stops.

    Steps are cheap in order; a jump starts the readers anew and skips to it.
    """

    def __init__(
        self,
        stream: ShardStream,
        batch: int,
        *,
        stored: tuple[int, int],
        steps_per_epoch: int,
        seed: int,
        augment: Augment,
        mixing: Mixing | None = None,
        classes: tuple[str, ...] | None = None,
        device: torch.device | str = "cpu",
        workers: int = 1,
        rank: int = 0,
        world: int = 1,
        max_bad: float = 0.05,
        keep_clean: bool = False,
    ) -> None:
        part = world * (2 if mixing is not None and world > 1 else 1)
        if batch < 1 or batch % part:
            raise UserError(f"A batch of {batch} cannot be shared by {world} processes; give a multiple of {part}.")
        if mixing is not None and classes is None:
            raise UserError("Mixing needs labels; give the classes of the stream.")
        readers = max(1, workers)
        if readers * world > len(stream.shards):
            raise UserError(
                f"{len(stream.shards)} shards cannot feed {readers * world} readers: "
                "use fewer --workers, or write more shards."
            )
        self.stream, self.batch, self.stored, self.steps_per_epoch = stream, batch, stored, steps_per_epoch
        self.seed, self.augment, self.mixing, self.classes = seed, augment, mixing, classes
        self.device, self.workers, self.readers = torch.device(device), workers, readers
        self.rank, self.world, self.max_bad, self.keep_clean = rank, world, max_bad, keep_clean
        self.bad: list[tuple[str, str]] = []
        self.damaged: dict[str, str] = {}
        self.next_step: int | None = None
        self.sources: list[_Reader] = []

    def __len__(self) -> int:
        return self.steps_per_epoch

    def batch_at(self, step: int) -> Batch:
        """This process's part of a step's batch."""
        if step != self.next_step:
            self._start(step)
        read = self.sources[step % self.readers].take()
        self.next_step = step + 1
        self._note_bad(read.bad, step)
        self._note_damaged(read.damaged)
        local = len(read.images)
        numbers = uniform(self.batch, self.augment.columns, generator_for(self.seed, "augment", step))
        pixels = read.images.pin_memory() if self.device.type == "cuda" else read.images
        images = pixels.to(self.device, non_blocking=True)
        views = self.augment.apply(images, read.sizes, numbers[self.rank * local : (self.rank + 1) * local])
        index = torch.full((local,), -1)  # a streamed image has no position
        if read.labels is None:
            return Batch(views, None, None, index, number=step)
        (labels,) = to_device_packed([read.labels], self.device)
        if self.mixing is None:
            return Batch(views, labels, labels, index, number=step)
        blend = self.mixing.draw((views.shape[-2], views.shape[-1]), generator_for(self.seed, "mixing", step))
        mixed, targets = self.mixing.apply(views, labels, blend)
        clean = views if self.keep_clean and mixed is not views else None
        return Batch(mixed, targets, labels, index, clean, step)

    def peek(self, step: int) -> Batch:
        """A step's batch, read in this process: for a look that should not start the readers anew.

        What it meets counts for nothing: the run has its own books, and its allowance is that of its own steps.
        """
        here = copy.copy(self)
        here.workers, here.sources, here.next_step = 0, [], None
        here.bad, here.damaged, here.max_bad = [], dict(self.damaged), 1.0
        return here.batch_at(step)

    def with_batch(self, batch: int) -> StreamingBatches:
        """The same images in batches of another size."""
        return StreamingBatches(
            self.stream,
            batch,
            stored=self.stored,
            steps_per_epoch=self.steps_per_epoch * self.batch // batch,
            seed=self.seed,
            augment=self.augment,
            mixing=self.mixing,
            classes=self.classes,
            device=self.device,
            workers=self.workers,
            rank=self.rank,
            world=self.world,
            max_bad=self.max_bad,
            keep_clean=self.keep_clean,
        )

    def close(self) -> None:
        """Stop the readers."""
        for source in self.sources:
            source.close()
        self.sources, self.next_step = [], None

    def _start(self, step: int) -> None:
        self.close()
        local = self.batch // self.world
        for reader in range(self.readers):
            taken = -(-(step - reader) // self.readers) if step > reader else 0  # batches this reader has given
            place, parts = self.rank * self.readers + reader, self.world * self.readers
            part = Part(self.stream, place, parts, local, self.stored, self.classes, taken * local)
            self.sources.append(_Reader(part, own_process=self.workers > 0 and may_start_others()))
        for source in self.sources:
            source.look_ahead()

    def _note_bad(self, found: list[tuple[str, str]], step: int) -> None:
        for name, reason in found:
            console.warning(f"left out: {name}: {reason}")
        self.bad += found
        seen = (step + 1) * self.batch // self.world
        if len(self.bad) > max(1.0, self.max_bad * seen) and self.max_bad < 1:
            name, reason = self.bad[-1]
            raise UserError(
                f"{len(self.bad)} streamed images cannot be read, more than --cache.max-bad: {name}: {reason}."
            )

    def _note_damaged(self, found: list[tuple[str, str]]) -> None:
        for shard, reason in found:
            if shard not in self.damaged:
                console.warning(f"shard {shard} is damaged and left behind: {reason}")
                self.damaged[shard] = reason
        count, whole = len(self.damaged), len(self.stream.shards)
        if count > max(1.0, self.max_bad * whole) and self.max_bad < 1:
            shard, reason = list(self.damaged.items())[-1]
            raise UserError(
                f"{count} of {whole} shards cannot be read, more than --cache.max-bad allows: {shard}: {reason}. Once "
                "they can be, --resume goes on."
            )


class _Reader:
    """One sequence of batches, made in a process of its own, a little ahead."""

    def __init__(self, part: Part, own_process: bool) -> None:
        self.pool: ProcessPoolExecutor | None = None
        self.answered = False
        self.waiting: deque[Future[Read]] = deque()
        if own_process:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare_reader, (part,))
        else:
            self.batches = read_batches(part)

    def take(self) -> Read:
        if self.pool is None:
            return next(self.batches)
        try:
            self.look_ahead()
            batch = self.waiting.popleft()
            self.look_ahead()
            read = batch.result()
        except BrokenProcessPool as error:
            advice = "--resume goes on with as many; a new run can have fewer with --workers."
            raise worker_died_error("reads shards", advice, answered=self.answered) from error
        self.answered = True
        return read

    def look_ahead(self) -> None:
        """Let the process prepare the next batches, so that none is waited for."""
        while self.pool is not None and len(self.waiting) < _AHEAD:
            self.waiting.append(self.pool.submit(_next_batch))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


def read_batches(part: Part) -> Iterator[Read]:
    """Batches for ever: epoch after epoch of the stream, the first ``skip`` examples left out undecoded.

    A batch always takes the same number of examples, so that positions stay exact; good ones fill the places of bad.
    """
    stream = copy.copy(part.stream)
    stream.damaged, stream.warn = [], None  # what is damaged goes back with the batches
    samples = _samples(part._replace(stream=stream))
    numbers = None if part.classes is None else {name: i for i, name in enumerate(part.classes)}
    while True:
        images = torch.empty((part.batch, 3, *part.rectangle), dtype=torch.uint8)
        sizes, labels, bad = [], [], []
        for sample in islice(samples, part.batch):
            number = -1 if numbers is None else numbers.get(str(sample.label), -1)
            if numbers is not None and number < 0:
                bad.append((sample.key, f"its label {sample.label!r} is none of the classes"))
                continue
            try:
                pixels = decode(sample.content, sample.key, at_least=part.rectangle)
            except UnreadableImage as error:
                bad.append((error.name, error.reason))
                continue
            images[len(sizes)] = torch.from_numpy(resize_to(pixels, part.rectangle)).permute(2, 0, 1)
            sizes.append(pixels.shape[:2])
            labels.append(number)
        if not sizes:
            raise UserError(f"None of {part.batch} streamed images in a row can be used: {bad[0][0]}: {bad[0][1]}.")
        damaged, stream.damaged = stream.damaged, []
        filled = torch.arange(part.batch) % len(sizes)
        chosen = torch.tensor(labels)[filled]
        yield Read(images[filled], torch.tensor(sizes)[filled], None if numbers is None else chosen, bad, damaged)


def _samples(part: Part) -> Iterator[StreamSample]:
    """The part's examples, epoch after epoch, from its position on; whole epochs are skipped where counts are known."""
    stream, place = part.stream, {"part": part.part, "parts": part.parts}
    skip = part.skip
    for epoch in count():
        length = stream.length(epoch, **place)
        if length == 0:
            raise UserError(f"Reader {part.part} of {part.parts} finds no readable images in its shards.")
        if length is not None and skip >= length:
            skip -= length
            continue
        met, began = 0, skip
        for sample in stream.epoch(epoch, **place, skip=0 if length is None else skip):
            met += 1
            if length is None and skip:
                skip -= 1
                continue
            yield sample
        skip = 0 if length is not None else skip
        if not met and (length is None or not began):  # without counts the skipped ones are met too
            why = f": {stream.damaged[0][0]}: {stream.damaged[0][1]}" if stream.damaged else ""
            raise UserError(f"Reader {part.part} of {part.parts} finds no readable images in its shards{why}.")


_batches: Iterator[Read] | None = None  # a reader process's own


def _prepare_reader(part: Part) -> None:
    global _batches
    begin_worker()
    _batches = read_batches(part)


def _next_batch() -> Read:
    assert _batches is not None
    return next(_batches)
