"""Streams shards that no machine can hold: shuffled, divided among readers, and resumed by position."""

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import IO, NamedTuple, TypeVar

import numpy as np

from frugalvit.data.webdataset.remote import READ_ERRORS, describe_error, open_remote
from frugalvit.data.webdataset.shards import group_members, is_text, is_wanted, label_of, split_name
from frugalvit.data.webdataset.tar import BadShard, read_members
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import pluralize

T = TypeVar("T")
SHARD_ERRORS = (BadShard, ValueError, *READ_ERRORS)


class StreamSample(NamedTuple):
    """A streamed example: its key, the encoded image, and its raw label."""

    key: str
    content: bytes
    label: str | None


class ShardStream:
    """Examples streamed from shards: each once per epoch, divided among readers (processes times workers).

    The order of an epoch is a function of (seed, epoch, reader), so the number of examples taken is all that resuming
    needs. Shards are shuffled among the readers; each reader shuffles its examples in a buffer. With
    ``shuffle=False`` everything comes in its own order. A damaged shard is read up to the damage and listed in
    ``damaged``.

    Args:
        counts: examples in each shard, if known. Resuming then reads only the shards it needs, and a shard always
            yields its count: examples of the next shards replace what a damaged one lacks, so positions stay exact.
        keep: labels to keep; examples with other labels are skipped.
        warn: logs a damaged shard.
    """

    def __init__(
        self,
        shards: Sequence[str],
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer: int = 1000,
        counts: Sequence[int] | None = None,
        keep: frozenset[str] | None = None,
        warn: Callable[[str], None] | None = console.warning,
    ) -> None:
        if not shards:
            raise UserError("There are no shards to stream.")
        self.shards = list(shards)
        self.seed, self.shuffle, self.buffer = seed, shuffle, buffer if shuffle else 1
        self.counts = None if counts is None else list(counts)
        self.keep, self.warn = keep, warn
        self.damaged: list[tuple[str, str]] = []

    def epoch(self, number: int = 0, *, reader: int = 0, readers: int = 1, skip: int = 0) -> Iterator[StreamSample]:
        """Yield a reader's examples of one epoch, without the first ``skip``."""
        shards = self._reader_shards(number, reader, readers)
        draws = _uniform(np.random.default_rng([self.seed, number, reader]))
        if skip and self.counts is not None:
            yield from self._resume(shards, draws, skip)
        else:
            yield from islice(self._shuffle(self._read_from(shards), [], draws), skip, None)

    def length(self, number: int = 0, *, reader: int = 0, readers: int = 1) -> int | None:
        """The number of a reader's examples in an epoch; None if the shards' counts are unknown."""
        if self.counts is None:
            return None
        return sum(self.counts[shard] for shard in self._reader_shards(number, reader, readers))

    def _reader_shards(self, number: int, reader: int, readers: int) -> list[int]:
        """The shards of a reader in an epoch, in order."""
        if readers > len(self.shards):
            raise UserError(f"{len(self.shards)} shards are too few for {readers} readers: write more shards.")
        order = np.arange(len(self.shards))
        if self.shuffle:
            np.random.default_rng([self.seed, number]).shuffle(order)
        return order[reader::readers].tolist()

    def _shuffle(self, items: Iterator[T], waiting: list[T], draws: Iterator[float]) -> Iterator[T]:
        """Pass items through a buffer; when it is full, yield a random one."""
        for item in items:
            waiting.append(item)
            if len(waiting) >= self.buffer:
                yield _pop_random(waiting, draws)
        while waiting:
            yield _pop_random(waiting, draws)

    def _resume(self, shards: list[int], draws: Iterator[float], skip: int) -> Iterator[StreamSample]:
        """Yield the same as after reading and dropping ``skip`` examples, without reading most of them.

        The shuffle is replayed with the numbers 0, 1, 2 … instead of examples. Then the examples left in the buffer
        are read, which are in the last few shards, and streaming continues from there.
        """
        assert self.counts is not None
        ends = np.cumsum([self.counts[shard] for shard in shards])
        waiting: list[int] = []
        numbers = iter(range(int(ends[-1])))
        for _ in islice(self._shuffle(numbers, waiting, draws), skip):
            pass
        position = next(numbers, int(ends[-1]))
        starts = [0, *ends.tolist()]
        buffered: dict[int, StreamSample] = {}
        for shard in np.unique(np.searchsorted(ends, waiting, side="right")).tolist():
            wanted = {number for number in waiting if starts[shard] <= number < starts[shard + 1]}
            samples = self._read_shard(shards, shard)
            for number, sample in zip(range(starts[shard], max(wanted) + 1), samples, strict=False):
                if number in wanted:
                    buffered[number] = sample
        current = int(np.searchsorted(ends, position, side="right"))
        offset = position - starts[current] if current < len(shards) else 0
        rest = islice(self._read_from(shards, current), offset, None)
        yield from self._shuffle(rest, [buffered[n] for n in waiting if n in buffered], draws)

    def _read_from(self, shards: list[int], first: int = 0) -> Iterator[StreamSample]:
        """Yield the examples of a reader's shards in order, from the shard at position ``first`` on."""
        for position in range(first, len(shards)):
            if not (yield from self._read_shard(shards, position)):
                return

    def _read_shard(self, shards: list[int], position: int) -> Generator[StreamSample, None, bool]:
        """Yield the examples of one shard, exactly its count if counts are known.

        Returns False if no shard at all can be read.
        """
        number = shards[position]
        samples = self._read(number)
        if self.counts is None:
            yield from samples
            return True
        count = self.counts[number]
        read = yield from _take(count, samples)
        if read == count:
            return True
        if not self.damaged or self.damaged[-1][0] != self.shards[number]:
            self._record_damage(number, f"it holds {read:,} of {pluralize(count, 'example')}")
        while read < count:
            before = read
            for distance in range(1, len(self.shards) + 1):
                other = (number + distance) % len(self.shards)
                read += yield from _take(count - read, self._read(other))
            if read == before:
                return False
        return True

    def _read(self, number: int) -> Iterator[StreamSample]:
        try:
            with open_remote(self.shards[number]) as file:
                for key, image, texts in group_members(read_members(file, is_wanted)):
                    label = label_of(texts)[0]
                    if self.keep is None or label in self.keep:
                        yield StreamSample(key, image, label)
        except SHARD_ERRORS as error:
            self._record_damage(number, describe_error(error))

    def _record_damage(self, number: int, reason: str) -> None:
        self.damaged.append((self.shards[number], reason))
        if self.warn is not None:
            self.warn(damage_message(self.shards[number], reason))


def damage_message(shard: str, reason: str) -> str:
    return f"shard {shard} is damaged, the rest of it is skipped: {reason}"


def stream_texts(file: IO[bytes]) -> Iterator[dict[str, bytes]]:
    """Yield the texts of every example of a tar stream, without loading the images."""
    members = read_members(file, is_wanted, has_content=lambda member: is_text(split_name(member.name)[1]))
    for _, _, texts in group_members(members):
        yield texts


def _take(count: int, items: Iterator[T]) -> Generator[T, None, int]:
    """Yield the first ``count`` items; returns how many there were."""
    taken = 0
    while taken < count and (item := next(items, None)) is not None:
        yield item
        taken += 1
    return taken


def _pop_random(waiting: list[T], draws: Iterator[float]) -> T:
    """Remove a random item in constant time: the last item takes its position."""
    index = int(next(draws) * len(waiting))
    waiting[index], waiting[-1] = waiting[-1], waiting[index]
    return waiting.pop()


def _uniform(generator: np.random.Generator) -> Iterator[float]:
    """Yield numbers in [0, 1), drawn in blocks: a resumed run may replay millions of them."""
    while True:
        yield from generator.random(4096).tolist()
