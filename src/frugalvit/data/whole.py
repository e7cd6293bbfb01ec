"""Whether an image file is cut short, told from its structure in microseconds: no pixel is decoded."""

from __future__ import annotations

import struct
from typing import IO

_TAIL = 64 * 1024


def is_cut_short(file: IO[bytes], size: int, format_name: str) -> bool:
    """For formats that say where they end; False for the others, whose truncation only decoding shows."""
    check = _CHECKS.get(format_name)
    try:
        return check is not None and check(file, size)
    except struct.error:  # too short even for its first numbers
        return True


def _jpeg(file: IO[bytes], size: int) -> bool:
    """A JPEG ends with FF D9; some cameras append more, so it is looked for in the last part."""
    file.seek(max(0, size - _TAIL))
    return b"\xff\xd9" not in file.read(_TAIL)


def _png(file: IO[bytes], size: int) -> bool:
    """Walk from chunk to chunk: length, kind, content, checksum; the last is IEND."""
    place = 8
    while place + 12 <= size:
        file.seek(place)
        length, kind = struct.unpack(">I4s", file.read(8))
        if kind == b"IEND":
            return False
        place += 12 + length
    return True


def _webp(file: IO[bytes], size: int) -> bool:
    file.seek(4)
    return struct.unpack("<I", file.read(4))[0] + 8 > size


def _gif(file: IO[bytes], size: int) -> bool:
    file.seek(max(0, size - 1024))
    return b"\x3b" not in file.read(1024)


def _bmp(file: IO[bytes], size: int) -> bool:
    file.seek(10)
    return struct.unpack("<I", file.read(4))[0] >= size


_CHECKS = {"JPEG": _jpeg, "MPO": _jpeg, "PNG": _png, "WEBP": _webp, "GIF": _gif, "BMP": _bmp}
