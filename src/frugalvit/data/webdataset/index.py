"""The index.json that ``frugalvit data pack`` writes beside its shards.

An index may come from a stranger, so everything in it is checked.
"""

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
    """A file of the decoded images of a split (``cache/file_format.py``), for inputs of ``target`` (height, width)."""

    split: str
    file: str
    target: tuple[int, int]
    rectangle: tuple[int, int]


@dataclass(frozen=True)
class PackedIndex:
    """The shards of every split, the class names (labels are their numbers), and the files of decoded images."""

    classes: tuple[str, ...] | None
    splits: dict[str, list[PackedShard]]
    decoded: list[DecodedFile]

    @functools.cached_property
    def by_name(self) -> dict[str, PackedShard]:
        """The shards by their file names."""
        return {shard.file: shard for shards in self.splits.values() for shard in shards}

    @functools.cached_property
    def version(self) -> str:
        """Hash of all shards: it changes when the dataset is packed again at the same address."""
        return hashlib.sha256("\n".join(shard.sha256 for shard in self.by_name.values()).encode()).hexdigest()


class PackedImages(NamedTuple):
    """The files of decoded images of a packed split, and the fingerprint of the full split that they carry."""

    files: list[tuple[Path, DecodedFile]]
    fingerprint: str

    def for_input(self, target: tuple[int, int]) -> list[Path]:
        """Files whose images are at least as large as ``target``, and not much larger."""
        fitting = [
            (file.target, path)
            for path, file in self.files
            if all(side <= made <= _MUCH_LARGER * side for side, made in zip(target, file.target, strict=True))
        ]
        return [path for _, path in sorted(fitting)]


def read_index(where: str | Path) -> PackedIndex | None:
    """Read the index in the folder of ``where`` (a folder, shards, or an address); None if there is none of ours."""
    where = str(where)
    if is_pipe(where):
        return None
    if is_remote(where):
        address = without_query(where)  # a query is the signature of one shard, and may contain a slash
        content = read_small(where if address.endswith(f"/{INDEX}") else f"{address.rpartition('/')[0]}/{INDEX}")
    else:
        path = local(where)
        content = read_small(str((path if path.is_dir() else path.parent) / INDEX))
    return None if content is None else parse_index(content)


def parse_index(content: bytes) -> PackedIndex | None:
    """Parse an index; None if it is not one of ours or not valid."""
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            return None
        classes = values["classes"]
        if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            return None
        splits = {str(split): [_shard(entry) for entry in shards] for split, shards in values["splits"].items()}
        decoded = [_decoded(entry) for entry in values.get("decoded", [])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return PackedIndex(None if classes is None else tuple(classes), splits, decoded)


def _shard(entry: dict[str, Any]) -> PackedShard:
    name, examples, size = _file_name(entry["file"]), _count(entry["examples"]), _count(entry["bytes"])
    return PackedShard(name, examples, size, str(entry["sha256"]))


def _decoded(entry: dict[str, Any]) -> DecodedFile:
    (height, width), (rows, columns) = entry["target"], entry["rectangle"]
    target, rectangle = (_count(height), _count(width)), (_count(rows), _count(columns))
    return DecodedFile(str(entry["split"]), _file_name(entry["file"]), target, rectangle)


def _file_name(name: Any) -> str:
    """Check that a name can only mean a file beside the index."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("not a plain file name")
    return name


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("not a count")
    return value
