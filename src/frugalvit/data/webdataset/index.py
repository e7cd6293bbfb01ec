"""What ``frugalvit data pack`` writes beside its shards: an index of them, and files of decoded images.

An index may come from a stranger, so everything in it is checked before it is believed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from frugalvit.data.paths import local
from frugalvit.data.webdataset.remote import is_pipe, is_remote, read_small, without_query

INDEX = "index.json"
FORMAT = "frugalvit shards 1"
_MUCH_LARGER = 1.5
_NAME = re.compile(r"[\w-][\w.-]*")


class PackedShard(NamedTuple):
    """A shard as the index describes it."""

    file: str
    examples: int
    bytes: int
    sha256: str


class DecodedFile(NamedTuple):
    """A file of decoded images of a whole split (``cachefile.py``), made for inputs of ``target`` (height, width)."""

    split: str
    file: str
    target: tuple[int, int]
    rectangle: tuple[int, int]


@dataclass(frozen=True)
class PackedIndex:
    """The shards of every split, the names of the classes (labels are their numbers), and the decoded images."""

    classes: tuple[str, ...] | None
    splits: dict[str, list[PackedShard]]
    decoded: list[DecodedFile]

    @functools.cached_property
    def by_name(self) -> dict[str, PackedShard]:
        """The shards by their file names."""
        return {shard.file: shard for shards in self.splits.values() for shard in shards}

    @functools.cached_property
    def version(self) -> str:
        """Of the packing: another one at the same address has other shards under the same names."""
        return hashlib.sha256("\n".join(shard.sha256 for shard in self.by_name.values()).encode()).hexdigest()

    def shard(self, name: str) -> PackedShard | None:
        """The entry of the shard with this file name."""
        return self.by_name.get(name)


class Attached(NamedTuple):
    """Decoded images that came with a packed split: the files, and the whole split's fingerprint that they bear."""

    files: list[tuple[Path, DecodedFile]]
    fingerprint: str

    def for_input(self, target: tuple[int, int]) -> list[Path]:
        """Files whose images are as large as ``target`` asks, and not much larger."""
        fitting = [
            (file.target, path)
            for path, file in self.files
            if all(side <= made <= _MUCH_LARGER * side for side, made in zip(target, file.target, strict=True))
        ]
        return [path for _, path in sorted(fitting)]


def index_beside(where: str | Path) -> PackedIndex | None:
    """The index in the folder of ``where`` (a folder, shards, or an address); None for shards of somebody else."""
    place = str(where)
    if is_pipe(place):
        return None
    if is_remote(place):
        whole = without_query(place)  # a signature may hold a slash, and is that of a shard
        content = read_small(place if whole.endswith(f"/{INDEX}") else f"{whole.rpartition('/')[0]}/{INDEX}")
    else:
        path = local(place)
        content = read_small(str((path if path.is_dir() else path.parent) / INDEX))
    return None if content is None else parse_index(content)


def parse_index(content: bytes) -> PackedIndex | None:
    """The index, or None where this is none of ours, or not as we write them."""
    try:
        found = json.loads(content)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            return None
        classes = found["classes"]
        if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            return None
        splits = {str(split): [_shard(entry) for entry in shards] for split, shards in found["splits"].items()}
        decoded = [_decoded(entry) for entry in found.get("decoded", [])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return PackedIndex(None if classes is None else tuple(classes), splits, decoded)


def _shard(entry: dict[str, Any]) -> PackedShard:
    return PackedShard(_plain(entry["file"]), _count(entry["examples"]), _count(entry["bytes"]), str(entry["sha256"]))


def _decoded(entry: dict[str, Any]) -> DecodedFile:
    (height, width), (rows, columns) = entry["target"], entry["rectangle"]
    target, rectangle = (_count(height), _count(width)), (_count(rows), _count(columns))
    return DecodedFile(str(entry["split"]), _plain(entry["file"]), target, rectangle)


def _plain(name: Any) -> str:
    """A file name that means a file beside the index and nothing else."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("no plain file name")
    return name


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("no count")
    return value
