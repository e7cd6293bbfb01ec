"""Where the members of a tar file lie, so that any of them can be read without unpacking the rest.

Only offsets leave this module: nothing is ever extracted, so a member called ``../../etc/passwd`` is only a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

BLOCK = 512
_FILES = (b"0", b"\0", b"7")
_MAX_NAME = 1 << 20


class BadShard(Exception):
    """A damaged archive, and why; the caller names it."""


class Member(NamedTuple):
    """A file in an archive: ``size`` bytes from ``offset`` on."""

    name: str
    offset: int
    size: int


def members(path: str | Path) -> Iterator[Member]:
    """The regular files of a tar file in order, from its headers alone; ``BadShard`` when anything does not add up."""
    with Path(path).open("rb") as file:
        length = os.fstat(file.fileno()).st_size

        def read_at(place: int, count: int) -> bytes:
            file.seek(place)
            return file.read(count)

        yield from _walk(read_at, length)


def contents(
    stream: IO[bytes], wanted: Callable[[Member], bool], held: Callable[[Member], bool] = lambda member: True
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the ``wanted`` files of a tar stream that can only be read forwards.

    Those that are not to be ``held`` are passed over and come with an empty content.
    """
    position = 0

    def read_at(place: int, count: int) -> bytes:
        nonlocal position
        while position < place:
            passed = len(stream.read(min(place - position, 1 << 20)))
            if not passed:
                raise BadShard("truncated: it ends inside a member")
            position += passed
        content = stream.read(count)
        position += len(content)
        return content

    for member in _walk(read_at, None):
        if wanted(member):
            content = read_at(member.offset, member.size if held(member) else 0)
            if held(member) and len(content) < member.size:
                raise BadShard("truncated: it ends inside a member")
            yield member.name, content


def _walk(read_at: Callable[[int, int], bytes], length: int | None) -> Iterator[Member]:
    """From header to header; ``read_at`` is only ever asked for places further on."""
    start, long_name = 0, None
    while length is None or start < length:
        block = read_at(start, BLOCK)
        if len(block) < BLOCK:
            raise BadShard("the file is empty" if start == 0 and not block else "truncated: it ends inside a header")
        if not block.strip(b"\0"):
            return
        kind, size = _check(block, start)
        data = start + BLOCK
        if length is not None and data + size > length:
            raise BadShard("truncated: it ends inside a member")
        if kind == b"L":
            long_name = _text(_content(read_at, data, size).rstrip(b"\0"))
        elif kind == b"x":
            long_name = _pax_path(_content(read_at, data, size)) or long_name
        elif kind in _FILES:
            yield Member(long_name or _name(block), data, size)
            long_name = None
        elif kind not in b"gK":
            long_name = None
        start = data + -(-size // BLOCK) * BLOCK
    raise BadShard("the file is empty" if length == 0 else "truncated: its end mark is missing")


def _content(read_at: Callable[[int, int], bytes], start: int, size: int) -> bytes:
    if size > _MAX_NAME:
        raise BadShard("damaged: a name of more than a megabyte")
    content = read_at(start, size)
    if len(content) < size:
        raise BadShard("truncated: it ends inside a header")
    return content


def _check(block: bytes, start: int) -> tuple[bytes, int]:
    """Kind and size of the member a header block announces, its checksum verified."""
    try:
        stated = int(block[148:156].strip(b" \0") or b"-1", 8)
        size = _number(block[124:136])
    except ValueError:
        raise BadShard(_no_tar(block) if start == 0 else "damaged: a broken header") from None
    if stated != sum(block[:148]) + 8 * 32 + sum(block[156:]) or size < 0:
        raise BadShard(_no_tar(block) if start == 0 else "damaged: a header's checksum is wrong")
    return block[156:157], size


def _number(cell: bytes) -> int:
    if cell[0] & 0x80:  # GNU's binary form for sizes above 8 GB
        return int.from_bytes(bytes([cell[0] & 0x7F]) + cell[1:], "big")
    return int(cell.strip(b" \0") or b"0", 8)


def _no_tar(block: bytes) -> str:
    compressed = block.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))
    return "compressed: unpack it to a plain .tar first" if compressed else "not a tar file"


def _name(block: bytes) -> str:
    name = block[:100].rstrip(b"\0").split(b"\0")[0]
    prefix = block[345:500].split(b"\0")[0] if block[257:262] == b"ustar" and block[257:265] != b"ustar  \0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _pax_path(content: bytes) -> str | None:
    """The ``path`` of a pax header: records of "length key=value\\n"."""
    found, at = None, 0
    while at < len(content):
        digits, space, _ = content[at:].partition(b" ")
        if not space or not digits.isdigit() or int(digits) <= len(digits) + 1:
            raise BadShard("damaged: a broken pax header")
        record = content[at + len(digits) + 1 : at + int(digits)].rstrip(b"\n")
        key, _, value = record.partition(b"=")
        if key == b"path":
            found = _text(value)
        at += int(digits)
    return found


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
