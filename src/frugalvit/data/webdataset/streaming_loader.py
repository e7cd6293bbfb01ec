"""Batches from streamed shards, for datasets that no machine can hold.

Reader processes read the shards, decode and resize. Augmentation and mixing run on the device, as for stored images.
The readers serve the steps round-robin, and a reader's sequence depends only on (seed, process, reader). So a batch is
a function of the step, and resume skips exactly the examples taken.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.transforms import Augment
from frugalvit.data.bad_images import UnreadableImage, check_unreadable
from frugalvit.data.decode import decode, resize_to
from frugalvit.data.loader import Batch, BatchSource, check_batch
from frugalvit.data.rng import generator_for, to_device_packed, uniform
from frugalvit.data.webdataset.stream import ShardStream, StreamSample, check_damaged
from frugalvit.data.worker_pool import WorkerPool, may_start_processes
from frugalvit.errors import UserError
from frugalvit.utils import console

_ADVICE = "--resume continues with the same --workers; a new run can use fewer."
_AHEAD = 2  # batches that a reader prepares before a step needs them


class ReadBatch(NamedTuple):
    """A reader's result: uint8 (B, 3, S, S'), sizes (B, 2), class numbers (B,) or None, and bad inputs."""

    images: Tensor
    sizes: Tensor
    labels: Tensor | None
    unreadable: list[tuple[str, str]]
    damaged: list[tuple[str, str]]


class StreamingBatches(BatchSource):
    """Training batches from a ``ShardStream``. Steps in order are cheap; any other step restarts the readers.

    Args:
        cached_size: (S, S'); readers resize the images to it.
        classes: raw labels in the order of the classes; None trains without labels.
        workers: reader processes; each needs its own shards. 0 reads in this process.
        max_bad: a larger share of unreadable images (of those read) or of damaged shards ends the run.
    """

    def __init__(
        self,
        stream: ShardStream,
        batch: int,
        *,
        cached_size: tuple[int, int],
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
        check_batch(batch, world, mixing)
        readers = max(1, workers)
        if readers * world > len(stream.shards):
            raise UserError(
                f"{len(stream.shards)} shards are too few for {readers * world} readers: use fewer --workers, or write "
                "more shards."
            )
        self.stream, self.batch, self.cached_size, self.steps_per_epoch = stream, batch, cached_size, steps_per_epoch
        self.seed, self.augment, self.mixing, self.classes = seed, augment, mixing, classes
        self.device, self.readers = torch.device(device), readers
        self.workers = workers if may_start_processes() else 0
        self.rank, self.world, self.max_bad, self.keep_clean = rank, world, max_bad, keep_clean
        self.damaged: dict[str, str] = {}
        self.next_step: int | None = None
        self.sources: list[tuple[WorkerPool, deque[Callable[[], ReadBatch]]]] = []
        self.unreadable: list[tuple[str, str]] = []

    def batch_at(self, step: int) -> Batch:
        if step != self.next_step:
            self._start_readers(step)
        pool, pending = self.sources[step % self.readers]
        wait = pending.popleft()
        pending.append(pool.submit())
        read = wait()
        self.next_step = step + 1
        self._record(read, step)
        local = len(read.images)
        draws = uniform(self.batch, self.augment.columns, generator_for(self.seed, "augment", step))
        pixels = read.images.pin_memory() if self.device.type == "cuda" else read.images
        images = pixels.to(self.device, non_blocking=True)
        views = self.augment.apply(images, read.sizes, draws[self.rank * local : (self.rank + 1) * local])
        labels = None if read.labels is None else to_device_packed([read.labels], self.device)[0]
        no_index = torch.full((local,), -1)  # a streamed image has no index
        return self.mix(Batch(views, labels, labels, no_index, number=step))

    def peek(self, step: int) -> Batch:
        """Read a step's batch in this process. Readers, counts and limits of the run do not change."""
        other = copy.copy(self)
        other.workers, other.sources, other.next_step = 0, [], None
        other.unreadable, other.damaged, other.max_bad = [], dict(self.damaged), 1.0
        return other.batch_at(step)

    def with_batch_size(self, batch: int) -> Self:
        self.close()
        check_batch(batch, self.world, self.mixing)
        other = copy.copy(self)
        other.batch, other.steps_per_epoch = batch, self.steps_per_epoch * self.batch // batch
        other.unreadable, other.damaged = [], {}
        return other

    def close(self) -> None:
        for pool, _ in self.sources:
            pool.close()
        self.sources, self.next_step = [], None

    def _start_readers(self, step: int) -> None:
        self.close()
        local = self.batch // self.world
        for reader in range(self.readers):
            taken = -(-(step - reader) // self.readers) if step > reader else 0  # batches this reader has returned
            number, readers = self.rank * self.readers + reader, self.world * self.readers
            task = self.stream, number, readers, local, self.cached_size, self.classes, taken * local
            pool = WorkerPool(min(1, self.workers), _batch_reader, *task, advice=_ADVICE)
            self.sources.append((pool, deque(pool.submit() for _ in range(_AHEAD))))

    def _record(self, read: ReadBatch, step: int) -> None:
        """Log unreadable images and damaged shards; refuse too many."""
        for name, reason in read.unreadable:
            console.warning(f"left out: {name}: {reason}")
        self.unreadable += read.unreadable
        seen = (step + 1) * self.batch // self.world
        check_unreadable(self.unreadable, max(1, int(self.max_bad * seen)), seen)
        for shard, reason in read.damaged:
            if shard not in self.damaged:
                console.warning(f"shard {shard} is damaged, so its rest is skipped: {reason}")
                self.damaged[shard] = reason
        check_damaged(list(self.damaged.items()), len(self.stream.shards), self.max_bad)


def _batch_reader(*arguments: Any) -> Callable[[], ReadBatch]:
    return read_batches(*arguments).__next__


def read_batches(
    stream: ShardStream,
    reader: int,
    readers: int,
    batch: int,
    cached_size: tuple[int, int],
    classes: tuple[str, ...] | None,
    skip: int,
) -> Iterator[ReadBatch]:
    """Yield a reader's batches, epoch after epoch without end, after the first ``skip`` examples.

    A batch always takes the same number of examples, so that positions stay exact. Readable images are repeated to
    replace unreadable ones.
    """
    stream = copy.copy(stream)
    stream.damaged = []  # reported with the batches
    samples = _samples(stream, reader, readers, skip)
    numbers = None if classes is None else {name: i for i, name in enumerate(classes)}
    while True:
        images = torch.empty((batch, 3, *cached_size), dtype=torch.uint8)
        sizes, labels, unreadable = [], [], []
        for sample in islice(samples, batch):
            number = -1 if numbers is None else numbers.get(str(sample.label), -1)
            if numbers is not None and number < 0:
                unreadable.append((sample.key, f"its label {sample.label!r} is not one of the classes"))
                continue
            try:
                pixels = decode(sample.content, sample.key, at_least=cached_size)
            except UnreadableImage as error:
                unreadable.append((error.name, error.reason))
                continue
            images[len(sizes)] = torch.from_numpy(resize_to(pixels, cached_size)).permute(2, 0, 1)
            sizes.append(pixels.shape[:2])
            labels.append(number)
        if not sizes:
            name, reason = unreadable[0]
            raise UserError(f"None of {batch} streamed images in a row can be used: {name}: {reason}.")
        damaged, stream.damaged = stream.damaged, []
        rows = torch.arange(batch) % len(sizes)
        repeated = torch.tensor(labels)[rows]
        yield ReadBatch(
            images[rows], torch.tensor(sizes)[rows], None if numbers is None else repeated, unreadable, damaged
        )


def _samples(stream: ShardStream, reader: int, readers: int, skip: int) -> Iterator[StreamSample]:
    """Yield the reader's examples, epoch after epoch, after the first ``skip``."""
    for epoch in count():
        length = stream.length(epoch, reader=reader, readers=readers)
        if skip < length:
            yield from stream.epoch(epoch, reader=reader, readers=readers, skip=skip)
        skip = max(0, skip - length)
