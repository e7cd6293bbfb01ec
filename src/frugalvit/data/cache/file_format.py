"""One file of decoded images: a checked header, the images, and what is known about them.

    8 bytes magic | 8 bytes header length | header (JSON) | sizes, kept | images from a 4096-byte boundary

The header holds the source's fingerprint, the shapes and a checksum. It is written last, under another name, and the
file is renamed when it is whole: a kill leaves nothing that looks like a cache file.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.utils import console

_MAGIC = b"frugal1\n"
_PAGE = 4096
_WHOLE = 256 << 20  # larger files are checked in evenly spaced pieces
_PIECES, _PIECE = 64, 1 << 20
_BEAT = 5.0  # seconds between the signs of life of a process that fills a file
Fill = Callable[[Tensor], tuple[Tensor, Tensor, list[tuple[str, str]]]]


class CacheWriteError(UserError):
    """The cache takes no file: no permission, no room, a failing disk."""


class Decoded(NamedTuple):
    """Images (N or more, 3, S, S'), sizes (N, 2), kept positions (N,), the bad ones; mapped from a file or not."""

    images: Tensor
    sizes: Tensor
    kept: Tensor
    bad: list[tuple[str, str]]
    mapped: bool = False


def write_file(path: Path, fingerprint: str, shape: tuple[int, ...], fill: Fill) -> None:
    """Let ``fill`` decode into a mapped temporary file, then seal and rename it to ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        room = _header_room(shape[0])
        with temporary.open("wb") as handle:
            _reserve(handle, room + int(np.prod(shape)))
        pixels = np.memmap(temporary, dtype=np.uint8, mode="r+", offset=room, shape=shape)
        with _alive(temporary):
            sizes, kept, bad = fill(torch.from_numpy(pixels))
        pixels.flush()
        del pixels
        length = room + len(kept) * int(np.prod(shape[1:]))
        tables = sizes.numpy().astype("<i4").tobytes() + kept.numpy().astype("<i8").tobytes()
        header = {
            "fingerprint": fingerprint,
            "shape": [len(kept), *shape[1:]],
            "offset": room,
            "bad": bad[:1000],
            "checksum": 0,
        }
        with temporary.open("r+b") as handle:
            handle.truncate(length)
            header["checksum"] = _checksum(handle, room, length)
            text = json.dumps(header).encode()
            if 16 + len(text) + len(tables) > room:  # only with absurdly long names: drop the list, keep the count
                header["bad"] = [[name[:80], reason[:80]] for name, reason in bad[:100]]
                text = json.dumps(header).encode()
            handle.seek(0)
            handle.write(_MAGIC + len(text).to_bytes(8, "little") + text + tables + _crc(text + tables))
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CacheWriteError(
            f"The image cache cannot be written to {path.parent} ({error.strerror or error}). "
            "Choose another place with --cache.folder, or --cache.where ram."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def open_file(path: Path, fingerprint: str) -> Decoded | None:
    """The mapped images, or None (said) where the file is missing, damaged or made from another source."""
    try:
        with path.open("rb") as handle:
            start = handle.read(16)
            length = int.from_bytes(start[8:], "little")
            if start[:8] != _MAGIC or length > path.stat().st_size:
                return _damaged(path, "it does not begin as one")
            text = handle.read(length)
            header = json.loads(text)
            count = int(header["shape"][0])
            if not 0 < count <= path.stat().st_size:
                return _damaged(path, "its images have no possible shape")
            tables = handle.read(count * 16)
            if handle.read(4) != _crc(text + tables):
                return _damaged(path, "its header does not match its checksum")
            shape, offset = tuple(int(side) for side in header["shape"]), int(header["offset"])
            if len(shape) != 4 or shape[1] != 3 or min(shape) < 1:
                return _damaged(path, "its images have no possible shape")
            sizes = np.frombuffer(tables, "<i4", count * 2).reshape(count, 2).astype(np.int64)
            kept = np.frombuffer(tables, "<i8", count, count * 8).astype(np.int64)
            if sizes.min() < 1 or kept[0] < 0 or (np.diff(kept) < 1).any():
                return _damaged(path, "its tables are not possible")
            bad = [(str(name), str(reason)) for name, reason in header["bad"]]
            end = offset + int(np.prod(shape))
            if path.stat().st_size != end:
                return _damaged(path, "it is too short or too long")
            if header["checksum"] != _checksum(handle, offset, end):
                return _damaged(path, "its images do not match their checksum")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return _damaged(path, str(error))
    if header["fingerprint"] != fingerprint:
        return None
    # Copy on write: torch wants writable memory, and nothing ever writes.
    pixels = np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=shape)
    return Decoded(torch.from_numpy(pixels), torch.from_numpy(sizes), torch.from_numpy(kept), bad, mapped=True)


@contextmanager
def _alive(part: Path) -> Iterator[None]:
    """Give the file a new time now and then: those who wait see that it is worked on, not left by a killed process.

    Writing to mapped memory does not tell: whether and when that changes a file's time differs between file systems.
    """
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT):
            with suppress(OSError):
                os.utime(part)

    thread = threading.Thread(target=beat, name="cache", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _header_room(count: int) -> int:
    """Bytes before the images: 16 an image, 256 KiB for the header, up to the next page."""
    return -(-(16 * count + (256 << 10)) // _PAGE) * _PAGE


def _reserve(handle, length: int) -> None:
    """Claim the space now: a full disk must be an error here, not a killed process at some page."""
    handle.truncate(length)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle.fileno(), 0, length)


def _checksum(handle, start: int, end: int) -> int:
    length = end - start
    value = zlib.crc32(length.to_bytes(8, "little"))
    if length <= _WHOLE:
        starts, piece = range(start, end, _PIECE), _PIECE
    else:
        starts, piece = [start + int(i) for i in np.linspace(0, length - _PIECE, _PIECES)], _PIECE
    for position in starts:
        handle.seek(position)
        value = zlib.crc32(handle.read(min(piece, end - position)), value)
    return value


def _crc(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


def _damaged(path: Path, reason: str) -> None:
    console.warning(f"the image cache {path} is damaged ({reason}); decoding again")
