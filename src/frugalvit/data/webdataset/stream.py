"""Stream shards: shuffled, divided among readers, resumed by position."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from frugalvit.data.webdataset.remote import READ_ERRORS, describe_error, open_remote
from frugalvit.data.webdataset.shards import Collisions, group_members, is_wanted, parse_label
from frugalvit.data.webdataset.tar import BadShard, read_members
from frugalvit.errors import UserError
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

    The order of an epoch is a function of (seed, epoch, reader), so resume needs only the number of examples taken.
    Shards are shuffled among the readers, and each reader shuffles its examples in a buffer. A damaged shard is read
    up to the damage and listed in ``damaged``; examples of the next shards fill the gap, so positions stay exact.
    """

    def __init__(self, shards: Sequence[str], counts: Sequence[int], *, seed: int = 0, buffer: int = 1000) -> None:
        if not sum(counts):
            raise UserError("There are no images to stream.")
        self.shards, self.counts = list(shards), list(counts)
        self.seed, self.buffer = seed, buffer
        self.damaged: list[tuple[str, str]] = []

    def epoch(self, number: int = 0, *, reader: int = 0, readers: int = 1, skip: int = 0) -> Iterator[StreamSample]:
        """Yield a reader's examples of one epoch, without the first ``skip``.

        It reads few of those. To skip them, the shuffle runs with the numbers 0, 1, 2 … instead of examples. Then it
        reads the examples whose numbers are still in the buffer from the last few shards, and streaming continues.
        """
        shards = self._reader_shards(number, reader, readers)
        draws = _uniform(np.random.default_rng([self.seed, number, reader]))
        ends = np.cumsum([self.counts[shard] for shard in shards])
        waiting: list[int] = []
        numbers = iter(range(int(ends[-1])))
        for _ in islice(self._shuffle(numbers, waiting, draws), skip):
            pass
        position = next(numbers, int(ends[-1]))
        starts = [0, *ends.tolist()]
        buffered: dict[int, StreamSample] = {}
        for shard in np.unique(np.searchsorted(ends, waiting, side="right")).tolist():
            wanted = {row for row in waiting if starts[shard] <= row < starts[shard + 1]}
            samples = self._read_shard(shards[shard])
            for row, sample in zip(range(starts[shard], max(wanted) + 1), samples, strict=False):
                if row in wanted:
                    buffered[row] = sample
        current = int(np.searchsorted(ends, position, side="right"))
        offset = position - starts[current] if current < len(shards) else 0
        samples = (sample for shard in shards[current:] for sample in self._read_shard(shard))
        yield from self._shuffle(islice(samples, offset, None), [buffered[row] for row in waiting], draws)

    def length(self, number: int = 0, *, reader: int = 0, readers: int = 1) -> int:
        return sum(self.counts[shard] for shard in self._reader_shards(number, reader, readers))

    def _reader_shards(self, number: int, reader: int, readers: int) -> list[int]:
        """Return the shards of a reader in an epoch, in order."""
        order = np.arange(len(self.shards))
        np.random.default_rng([self.seed, number]).shuffle(order)
        return order[reader::readers].tolist()

    def _shuffle(self, items: Iterator[T], waiting: list[T], draws: Iterator[float]) -> Iterator[T]:
        """Pass items through a buffer. While it is full, yield a random item."""
        for item in items:
            waiting.append(item)
            if len(waiting) >= self.buffer:
                yield _pop_random(waiting, draws)
        while waiting:
            yield _pop_random(waiting, draws)

    def _read_shard(self, number: int) -> Iterator[StreamSample]:
        """Yield exactly the shard's count of examples; ``UserError`` if no shard is readable."""
        count, read = self.counts[number], 0
        for sample in islice(self._read(number), count):
            yield sample
            read += 1
        if read < count and (not self.damaged or self.damaged[-1][0] != self.shards[number]):
            self.damaged.append((self.shards[number], f"it holds {read:,} of {pluralize(count, 'example')}"))
        while read < count:
            before = read
            for distance in range(1, len(self.shards) + 1):
                for sample in islice(self._read((number + distance) % len(self.shards)), count - read):
                    yield sample
                    read += 1
            if read == before:
                raise UserError(f"None of the {len(self.shards)} shards can be read: {': '.join(self.damaged[-1])}.")

    def _read(self, number: int) -> Iterator[StreamSample]:
        try:
            yield from read_samples(self.shards[number])
        except SHARD_ERRORS as error:
            self.damaged.append((self.shards[number], describe_error(error)))


def read_samples(shard: str, collisions: Collisions | None = None) -> Iterator[StreamSample]:
    """Yield the examples of a local or remote shard, reading it forwards; ``SHARD_ERRORS`` at damage."""
    with open_remote(shard) as file:
        for key, image, label in group_members(read_members(file, is_wanted), collisions):
            yield StreamSample(key, image, parse_label(label))


def check_damaged(damaged: Sequence[tuple[str, str]], shards: int, max_bad: float) -> None:
    """Raise ``UserError`` if more than one shard, and more than the share ``max_bad``, are damaged."""
    if len(damaged) > max(1.0, max_bad * shards) and max_bad < 1:
        raise UserError(
            f"{len(damaged)} of {shards} shards cannot be read, more than --cache.max-bad allows: "
            f"{': '.join(damaged[-1])}. Fix them; --resume continues a run."
        )


def _pop_random(waiting: list[T], draws: Iterator[float]) -> T:
    """Remove a random item in constant time: the last item takes its position."""
    index = int(next(draws) * len(waiting))
    waiting[index], waiting[-1] = waiting[-1], waiting[index]
    return waiting.pop()


def _uniform(generator: np.random.Generator) -> Iterator[float]:
    """Yield numbers in [0, 1), drawn in blocks: a resumed run may replay millions of them."""
    while True:
        yield from generator.random(4096).tolist()
