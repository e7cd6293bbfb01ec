"""Members of a tar file and their offsets, so that any member can be read alone.

Python's tarfile parses the headers. It treats a damaged header as the end of the file; here that is an error. Nothing
is extracted to disk, so a member called ``../../etc/passwd`` is only a name.
"""

import tarfile as tar
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal, Self

from frugalvit.utils.files import open_regular

_MAX_NAME = 1 << 20
_DAMAGE = (tar.TarError, ValueError, OverflowError, RecursionError)


class BadShard(Exception):
    """The reason why an archive is damaged; the caller adds the name."""


def list_members(path: str | Path) -> Iterator[tar.TarInfo]:
    """Yield the regular files of a tar file in order, from its headers. Damage raises ``BadShard``."""
    with open_regular(path) as file:
        for member, _ in _read(file, "r:", lambda member: False):
            yield member


def read_members(stream: IO[bytes], is_wanted: Callable[[tar.TarInfo], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the wanted files of a tar stream, reading it forwards only."""
    for member, content in _read(stream, "r|", is_wanted):
        if content is not None:
            yield member.name, content


def _read(
    stream: IO[bytes], mode: Literal["r:", "r|"], is_wanted: Callable[[tar.TarInfo], bool]
) -> Iterator[tuple[tar.TarInfo, bytes | None]]:
    """Yield the headers of the regular files, each with its content if it is wanted."""
    try:
        with tar.open(fileobj=stream, mode=mode, tarinfo=_Header, encoding="utf-8") as archive:
            end = -1
            while (member := archive.next()) is not None:
                if member.size < 0 or archive.offset <= end:  # a hostile size would cause an endless loop
                    raise BadShard("damaged: a header with an impossible size")
                end = archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header in memory
                if member.isreg() and not member.issparse():
                    file = archive.extractfile(member) if is_wanted(member) else None
                    content = None if file is None else file.read()
                    if content is not None and len(content) < member.size:
                        raise BadShard("truncated: it ends inside a member")
                    yield member, content
    except _DAMAGE as error:
        text = str(error)
        is_short = "unexpected end" in text
        raise BadShard("truncated: it ends inside a member" if is_short else f"damaged: {text}") from None


class _Header(tar.TarInfo):
    """A header that raises ``BadShard`` for damage that tarfile treats as the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tar.HeaderError:
            if len(buf) == tar.BLOCKSIZE and not buf.strip(b"\0"):
                raise  # the end mark
            if len(buf) < tar.BLOCKSIZE:
                raise BadShard("truncated: its end mark is missing") from None
            raise BadShard("damaged, compressed, or not a tar file: a broken header") from None
        is_extension = header.type in (b"L", b"K", b"x", b"g", b"X")  # a long name, or pax
        if header.size < 0 or (is_extension and header.size > _MAX_NAME):
            raise BadShard("damaged: a header with an impossible size")
        return header
