"""The index.json that ``frugalvit data pack`` writes beside its shards."""

import functools
import hashlib
from dataclasses import field
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from frugalvit.data.paths import local
from frugalvit.data.webdataset.remote import is_pipe, is_remote, read_small, without_query

INDEX = "index.json"
FORMAT = "frugalvit shards 1"
_MUCH_LARGER = 1.5
_STRICT = ConfigDict(strict=True)
FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]
"""The name of a file beside the index; it cannot be a path."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class PackedShard:
    """A shard in the index."""

    file: FileName
    examples: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str


@dataclass(frozen=True, slots=True, config=_STRICT)
class DecodedFile:
    """A file of the decoded images of a split (``cache/file_format.py``), for inputs of ``target`` (height, width)."""

    split: str
    file: FileName
    target: tuple[NonNegativeInt, NonNegativeInt]


@dataclass(frozen=True, config=_STRICT)
class PackedIndex:
    """The shards of every split, the class names (labels are their numbers), and the files of decoded images."""

    format: Annotated[str, Field(pattern=f"^{FORMAT}$")]
    classes: tuple[str, ...] | None
    splits: dict[str, list[PackedShard]]
    decoded: list[DecodedFile] = field(default_factory=list)

    @functools.cached_property
    def by_name(self) -> dict[str, PackedShard]:
        """The shards by their file names."""
        return {shard.file: shard for shards in self.splits.values() for shard in shards}

    @functools.cached_property
    def version(self) -> str:
        """Hash of all shards: it changes when the dataset is packed again at the same address."""
        return hashlib.sha256("\n".join(shard.sha256 for shard in self.by_name.values()).encode()).hexdigest()


class PackedImages(NamedTuple):
    """The file of the decoded images of a packed split, for inputs of ``target``."""

    path: Path
    target: tuple[int, int]
    fingerprint: str

    def fits(self, target: tuple[int, int]) -> bool:
        """True if the images are at least as large as ``target``, and not much larger."""
        sides = zip(target, self.target, strict=True)
        return all(wanted <= side <= _MUCH_LARGER * wanted for wanted, side in sides)


def read_index(where: str | Path) -> PackedIndex | None:
    """Read the index in the folder of ``where`` (a folder, shards, or an address); None without a valid index."""
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
    """Parse an index, which may come from a stranger; None if it is not valid."""
    try:
        return TypeAdapter(PackedIndex).validate_json(content)
    except ValidationError:
        return None
