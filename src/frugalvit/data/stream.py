"""Shards from anywhere: fetched once into the cache, or read in passing when there are more than a machine can hold.

``http(s)://`` needs nothing more; ``s3://``, ``gs://`` and other stores go through fsspec and its driver for the store.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from frugalvit import console
from frugalvit.data.places import cache_root
from frugalvit.data.shards import is_image_kind, is_remote, is_text, label_of, split_name
from frugalvit.data.tar import BadShard, Member, contents
from frugalvit.errors import UserError

_TIMEOUT = 60.0
_MAX_IMAGE, _MAX_TEXT = 1 << 30, 1 << 20


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
    """

    def __init__(self, shards: Sequence[str], *, seed: int = 0, shuffle: bool = True, buffer: int = 1000) -> None:
        if not shards:
            raise UserError("There are no shards to stream.")
        self.shards = list(shards)
        self.seed, self.shuffle, self.buffer = seed, shuffle, buffer if shuffle else 1
        self.damaged: list[tuple[str, str]] = []

    def epoch(self, number: int = 0, *, part: int = 0, parts: int = 1, skip: int = 0) -> Iterator[StreamSample]:
        """This part's examples of one epoch, the first ``skip`` of them left out."""
        if parts > len(self.shards):
            raise UserError(f"{len(self.shards)} shards cannot be divided among {parts} readers: write more shards.")
        order = np.arange(len(self.shards))
        if self.shuffle:
            np.random.default_rng([self.seed, number]).shuffle(order)
        draws = np.random.default_rng([self.seed, number, part])
        waiting: list[StreamSample] = []
        taken = 0
        for index in order[part::parts]:
            for sample in self._read(self.shards[index]):
                waiting.append(sample)
                if len(waiting) >= self.buffer:
                    taken += 1
                    chosen = _draw(waiting, draws)
                    if taken > skip:
                        yield chosen
        while waiting:
            taken += 1
            chosen = _draw(waiting, draws)
            if taken > skip:
                yield chosen

    def _read(self, shard: str) -> Iterator[StreamSample]:
        try:
            with open_remote(shard) as file:
                yield from _samples(file)
        except (BadShard, EOFError, OSError, ValueError, http.client.HTTPException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self.damaged.append((shard, reason))
            console.warn(f"shard {shard} is damaged and left behind: {reason}")


def open_remote(where: str) -> IO[bytes]:
    """A readable stream of a local file, an http(s) address or anything fsspec knows."""
    if not is_remote(where):
        return Path(where).open("rb")
    if where.startswith(("http://", "https://")):
        return cast(IO[bytes], urllib.request.urlopen(where, timeout=_TIMEOUT))
    try:
        import fsspec

        return cast(IO[bytes], cast(fsspec.core.OpenFile, fsspec.open(where, "rb")).open())
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{where} cannot be opened: {error}. pip install 'frugalvit[streams]' and its driver."
        ) from None


def fetch(url: str) -> Path:
    """A local copy of a remote shard: in the cache, written whole or not at all, fetched once."""
    digest = hashlib.sha256(url.rpartition("/")[0].encode()).hexdigest()[:16]
    target = cache_root() / "shards" / digest / url.rpartition("/")[2].split("?")[0]
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    console.say(f"fetching {url}")
    try:
        with open_remote(url) as source, part.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            stated = getattr(source, "headers", {}).get("Content-Length")
            if stated is not None and int(stated) != file.tell():
                raise EOFError(f"the connection ended after {file.tell():,} of {int(stated):,} bytes")
        part.replace(target)
    except (OSError, urllib.error.URLError, http.client.HTTPException, EOFError) as error:
        raise UserError(f"{url} cannot be fetched: {getattr(error, 'reason', None) or error}.") from None
    finally:
        part.unlink(missing_ok=True)
    return target


def _samples(file: IO[bytes]) -> Iterator[StreamSample]:
    """Group a tar stream's neighbours into examples; nothing is written to disk whatever members are called."""
    current, image, texts = None, None, {}
    for name, content in contents(file, _is_wanted):
        key, kind = split_name(name)
        if key != current:
            if image is not None and current is not None:
                yield StreamSample(current, image, label_of(texts)[0])
            current, image, texts = key, None, {}
        if is_text(kind):
            texts[kind] = content
        elif image is None:
            image = content
    if image is not None and current is not None:
        yield StreamSample(current, image, label_of(texts)[0])


def _is_wanted(member: Member) -> bool:
    key, kind = split_name(member.name)
    limit = _MAX_IMAGE if is_image_kind(kind) else _MAX_TEXT if is_text(kind) else -1
    return bool(key) and member.size <= limit


def _draw(waiting: list[StreamSample], draws: np.random.Generator) -> StreamSample:
    """Take a random one out; the last fills its place, so that it costs nothing."""
    index = int(draws.integers(len(waiting))) if len(waiting) > 1 else 0
    waiting[index], waiting[-1] = waiting[-1], waiting[index]
    return waiting.pop()
