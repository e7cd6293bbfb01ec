"""A file of decoded images: the pixels, then sizes and indices, a JSON header, and a trailer.

    images (M, 3, S, S') | sizes (M, 2) | indices (M,) | header | checksum, header length, magic

The file is written under another name and renamed when it is complete, so a killed writer leaves nothing that is read.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.utils import console

_TRAILER = struct.Struct("<IQ8s")
_MAGIC = b"frugal2\n"
_MAX_HEADER = 16 << 20
_MAX_NAMED = 1000  # unreadable images that the header names
Fill = Callable[[Tensor], tuple[Tensor, Tensor, list[tuple[str, str]]]]
"""Fills (N, 3, S, S') from the front with the M readable images; returns sizes, indices and the unreadable ones."""


class CacheWriteError(UserError):
    """The cache file cannot be written: no permission, no space, a failing disk."""


class CachedImages(NamedTuple):
    """Decoded images (M or more, 3, S, S'), sizes (M, 2), indices in the split (M,), and the unreadable images."""

    images: Tensor
    sizes: Tensor
    index: Tensor
    unreadable: list[tuple[str, str]]
    mapped: bool = False  # True if the images are mapped from a file


def write_file(path: Path, fingerprint: str, shape: tuple[int, ...], fill: Fill) -> None:
    """Let ``fill`` decode into a temporary mapped file, then complete it and rename it to ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w+b") as file:
            _reserve(file, math.prod(shape))
            pixels = np.memmap(file, dtype=np.uint8, mode="r+", shape=shape)
            sizes, index, unreadable = fill(torch.from_numpy(pixels))
            pixels.flush()
            del pixels
            kept = [len(index), *shape[1:]]
            header = {"fingerprint": fingerprint, "shape": kept, "unreadable": unreadable[:_MAX_NAMED]}
            tables = sizes.numpy().astype("<i4").tobytes() + index.numpy().astype("<i8").tobytes()
            text = json.dumps(header).encode()
            file.truncate(math.prod(kept))
            file.seek(0, os.SEEK_END)
            file.write(tables + text + _TRAILER.pack(zlib.crc32(tables + text), len(text), _MAGIC))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CacheWriteError(
            f"Cannot write the image cache to {path.parent} ({error.strerror or error}). Choose another "
            "--cache.folder, or use --cache.where ram."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def open_file(path: Path, fingerprint: str) -> CachedImages | None:
    """Map the images of a file; None if it is missing, damaged (logged) or made from another source.

    A packed dataset may come from a stranger, so shape, sizes and indices are checked.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(-_TRAILER.size, os.SEEK_END)
            checksum, length, magic = _TRAILER.unpack(file.read())
            if magic != _MAGIC or length > min(end, _MAX_HEADER):
                raise ValueError("not a cache file")
            file.seek(end - length)
            text = file.read(length)
            header = json.loads(text)
            count, channels, *sides = shape = tuple(header["shape"])
            if any(type(side) is not int or side < 1 for side in shape) or channels != 3 or len(sides) != 2:
                raise ValueError("impossible shape")
            if math.prod(shape) + 16 * count + length != end:
                raise ValueError("wrong length")
            file.seek(math.prod(shape))
            tables = file.read(16 * count)
        if zlib.crc32(tables + text) != checksum:
            raise ValueError("the header does not match its checksum")
        sizes = np.frombuffer(tables, "<i4", 2 * count).reshape(count, 2).astype(np.int64)
        index = np.frombuffer(tables, "<i8", count, 8 * count).astype(np.int64)
        if sizes.min() < 1 or index[0] < 0 or (np.diff(index) < 1).any():
            raise ValueError("impossible sizes or indices")
        unreadable = [(str(name), str(reason)) for name, reason in header["unreadable"]]
        if header["fingerprint"] != fingerprint:
            return None
        # Copy on write: torch wants writable memory, and nothing ever writes.
        pixels = np.memmap(path, dtype=np.uint8, mode="c", shape=shape)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        console.warning(f"the image cache {path} is damaged ({error}): decoding again")
        return None
    return CachedImages(torch.from_numpy(pixels), torch.from_numpy(sizes), torch.from_numpy(index), unreadable, True)


def _reserve(file: IO[bytes], length: int) -> None:
    """Claim the disk space now: later a full disk would kill the process at some page of the map."""
    file.truncate(length)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, length)
