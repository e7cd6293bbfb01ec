"""Shards read in passing, when there are more than a machine can hold: shuffled, divided, and resumed by position."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import IO, NamedTuple, TypeVar

import numpy as np

from frugalvit.data.webdataset.remote import FAULTS, open_remote, reason_of
from frugalvit.data.webdataset.shards import is_text, is_wanted, label_of, split_name
from frugalvit.data.webdataset.tar import BadShard, contents
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import pluralize

T = TypeVar("T")


class StreamSample(NamedTuple):
    """An example read in passing: its key, the encoded image, and its label as written."""

    key: str
    content: bytes
    label: str | None


class ShardStream:
    """Examples from shards in passing: each once per epoch, over any number of parts (processes times workers).

    The order of an epoch is a function of ``seed``, epoch and part alone, so a position (how many examples were taken)
    is all that resuming needs. Shards are shuffled among the parts; within a part, examples pass through a shuffling
    buffer. With ``shuffle=False`` everything comes in its own order. A damaged shard is named in ``damaged`` and left
    behind at the damage.

    Args:
        counts: examples in each shard, where they are known: resuming then reads only the shards it needs, not all
            that was taken before. So that positions hold whatever is damaged, and whenever that happens, a shard then
            gives as many as it is said to: those of the next shards, of all, take the place of what it lacks.
        keep: labels to keep; examples with others are passed over.
        warn: what is told of a damaged shard.
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

    def epoch(self, number: int = 0, *, part: int = 0, parts: int = 1, skip: int = 0) -> Iterator[StreamSample]:
        """This part's examples of one epoch, the first ``skip`` of them left out."""
        mine = self._share(number, part, parts)
        draws = _random(np.random.default_rng([self.seed, number, part]))
        if skip and self.counts is not None:
            yield from self._go_on(mine, draws, skip)
        else:
            yield from islice(self._shuffled(self._arriving(mine), [], draws), skip, None)

    def length(self, number: int = 0, *, part: int = 0, parts: int = 1) -> int | None:
        """How many examples this part has in an epoch, where the shards' counts are known."""
        return None if self.counts is None else sum(self.counts[shard] for shard in self._share(number, part, parts))

    def _share(self, number: int, part: int, parts: int) -> list[int]:
        """The shards of a part in an epoch, in their order."""
        if parts > len(self.shards):
            raise UserError(f"{len(self.shards)} shards cannot be divided among {parts} readers: write more shards.")
        order = np.arange(len(self.shards))
        if self.shuffle:
            np.random.default_rng([self.seed, number]).shuffle(order)
        return order[part::parts].tolist()

    def _shuffled(self, arriving: Iterator[T], waiting: list[T], draws: Iterator[float]) -> Iterator[T]:
        """What arrives, through a buffer out of which one is drawn whenever it is full."""
        for sample in arriving:
            waiting.append(sample)
            if len(waiting) >= self.buffer:
                yield _draw(waiting, draws)
        while waiting:
            yield _draw(waiting, draws)

    def _go_on(self, mine: list[int], draws: Iterator[float], skip: int) -> Iterator[StreamSample]:
        """The same as reading and leaving out ``skip`` examples, but with numbers in their place.

        The shuffle is played through with the numbers 0, 1, 2 … of the examples; then those that would be waiting in
        the buffer are read, which lie in the last few shards, and reading goes on from there.
        """
        assert self.counts is not None
        ends = np.cumsum([self.counts[shard] for shard in mine])
        waiting: list[int] = []
        numbers = iter(range(int(ends[-1])))
        for _ in islice(self._shuffled(numbers, waiting, draws), skip):
            pass
        arrived = next(numbers, int(ends[-1]))
        starts = [0, *ends.tolist()]
        found: dict[int, StreamSample] = {}
        for shard in np.unique(np.searchsorted(ends, waiting, side="right")).tolist():
            wanted = {number for number in waiting if starts[shard] <= number < starts[shard + 1]}
            for number, sample in zip(range(starts[shard], max(wanted) + 1), self._from(mine, shard), strict=False):
                if number in wanted:
                    found[number] = sample
        here = int(np.searchsorted(ends, arrived, side="right"))
        passed = arrived - starts[here] if here < len(mine) else 0
        arriving = islice(self._arriving(mine, here), passed, None)
        yield from self._shuffled(arriving, [found[n] for n in waiting if n in found], draws)

    def _arriving(self, mine: list[int], here: int = 0) -> Iterator[StreamSample]:
        """The examples of a part's shards in their order, from the shard at ``here`` on."""
        for place in range(here, len(mine)):
            if not (yield from self._from(mine, place)):
                return

    def _from(self, mine: list[int], place: int) -> Generator[StreamSample, None, bool]:
        """The examples of one of a part's shards: as many as were counted, where they were.

        Returns whether that went well: it does not where none of the shards can be read.
        """
        reading = self._read(mine[place])
        if self.counts is None:
            yield from reading
            return True
        count = self.counts[mine[place]]
        given = yield from _at_most(count, reading)
        if given == count:
            return True
        if not self.damaged or self.damaged[-1][0] != self.shards[mine[place]]:
            self._note(mine[place], f"it holds {given:,} of the {pluralize(count, 'example')} that were counted")
        while given < count:
            before = given
            for further in range(1, len(self.shards) + 1):
                other = (mine[place] + further) % len(self.shards)
                given += yield from _at_most(count - given, self._read(other))
            if given == before:
                return False
        return True

    def _read(self, number: int) -> Iterator[StreamSample]:
        try:
            with open_remote(self.shards[number]) as file:
                yield from (sample for sample in _samples(file) if self.keep is None or sample.label in self.keep)
        except (BadShard, ValueError, *FAULTS) as error:
            self._note(number, reason_of(error))

    def _note(self, number: int, reason: str) -> None:
        self.damaged.append((self.shards[number], reason))
        if self.warn is not None:
            self.warn(f"shard {self.shards[number]} is damaged and left behind: {reason}")


def _at_most(count: int, arriving: Iterator[T]) -> Generator[T, None, int]:
    """The first ``count`` of what arrives; returns how many there were."""
    given = 0
    while given < count and (item := next(arriving, None)) is not None:
        yield item
        given += 1
    return given


def _samples(file: IO[bytes]) -> Iterator[StreamSample]:
    """Group a tar stream's neighbours into examples; nothing is written to disk whatever members are called."""
    for key, image, texts in _grouped(contents(file, is_wanted)):
        yield StreamSample(key, image, label_of(texts)[0])


def texts_in_passing(file: IO[bytes]) -> Iterator[dict[str, bytes]]:
    """The texts of every example of a tar stream, without holding its images."""
    for _, _, texts in _grouped(contents(file, is_wanted, lambda member: is_text(split_name(member.name)[1]))):
        yield texts


def _grouped(named: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes, dict[str, bytes]]]:
    """Key, image and texts of neighbours with one key that have an image among them."""
    current, image, texts = None, None, {}
    for name, content in named:
        key, kind = split_name(name)
        if key != current:
            if image is not None and current is not None:
                yield current, image, texts
            current, image, texts = key, None, {}
        if is_text(kind):
            texts[kind] = content
        elif image is None:
            image = content
    if image is not None and current is not None:
        yield current, image, texts


def _draw(waiting: list[T], draws: Iterator[float]) -> T:
    """Take a random one out; the last fills its place, so that it costs nothing."""
    index = int(next(draws) * len(waiting))
    waiting[index], waiting[-1] = waiting[-1], waiting[index]
    return waiting.pop()


def _random(generator: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1), drawn many at once: a resumed run may have to play millions of them through."""
    while True:
        yield from generator.random(4096).tolist()
