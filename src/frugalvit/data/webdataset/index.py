"""The index.json that ``frugalvit data pack`` writes beside its shards."""

import functools
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from frugalvit.data.paths import local
from frugalvit.data.webdataset.remote import is_remote, read_small, without_query
from frugalvit.utils.files import read_user_text

INDEX = "index.json"
FORMAT = "frugalvit shards 1"
_STRICT = ConfigDict(strict=True)
FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]  # the name of a file beside the index; it cannot be a path


@dataclass(frozen=True, slots=True, config=_STRICT)
class PackedShard:
    """A shard in the index."""

    file: FileName
    examples: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str


@dataclass(frozen=True, config=_STRICT)
class PackedIndex:
    """The shards of every split, and the class names; a label is the position of a name."""

    format: Annotated[str, Field(pattern=f"^{FORMAT}$")]
    classes: tuple[str, ...] | None
    splits: dict[str, list[PackedShard]]

    @functools.cached_property
    def by_name(self) -> dict[str, PackedShard]:
        return {shard.file: shard for shards in self.splits.values() for shard in shards}


def read_index(where: str | Path) -> PackedIndex | None:
    """Read the index beside ``where``, a folder, shards or an address. Returns None without a valid index."""
    where = str(where)
    if is_remote(where):
        address = without_query(where)  # a query signs one shard only, and may contain a slash
        content = read_small(where if address.endswith(f"/{INDEX}") else f"{address.rpartition('/')[0]}/{INDEX}")
    else:
        path = local(where)
        path = (path if path.is_dir() else path.parent) / INDEX
        content = read_user_text(path, errors="replace") if path.exists() else None
    return None if content is None else parse_index(content)


def parse_index(content: bytes | str) -> PackedIndex | None:
    """Parse an index, which may come from an untrusted source. Returns None if it is not valid."""
    try:
        return TypeAdapter(PackedIndex).validate_json(content)
    except ValidationError:
        return None
