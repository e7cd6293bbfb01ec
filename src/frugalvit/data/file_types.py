"""What a file is by its first bytes, for the many files called .jpg that are something else; and image file names."""

from __future__ import annotations

import struct
from typing import IO

# fmt: off
EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".ppm",
    ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".jpx", ".avif", ".ico", ".tga", ".qoi", ".sgi", ".pcx",
    ".heic", ".heif",
))
# fmt: on

_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ")
_OTHERS = [
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"%!PS", "a PostScript document"),
    (b"8BPS", "a Photoshop document"),
    (b"OggS", "a sound or video file"),
    (b"ID3", "a sound file"),
    (b"\x1aE\xdf\xa3", "a video file"),
    (b"version https://git-lfs", "a Git LFS pointer whose content was never fetched: run 'git lfs pull'"),
    (b"SQLite format", "a database"),
    (b"\x93NUMPY", "a NumPy array"),
]


def is_image(prefix: bytes) -> bool:
    """Whether a file begins like an image: for files whose name does not tell."""
    webp = prefix[:4] == b"RIFF" and prefix[8:12] == b"WEBP"
    return webp or prefix.startswith(_IMAGES)


def describe_file_type(prefix: bytes) -> str | None:
    """What a file is instead of a readable image, and what to do where that is known; None when nobody knows."""
    for signature, words in _OTHERS:
        if prefix.startswith(signature):
            return words if ":" in words else f"{words}, not an image"
    if prefix[4:8] == b"ftyp":
        return "a HEIC photo: convert it to JPEG" if prefix[8:12] in _HEIC else "a video file, not an image"
    if prefix[:4] == b"RIFF" and prefix[8:12] != b"WEBP":
        return "a sound or video file, not an image"
    if not prefix.strip(b"\0"):
        return "a file of zeros, not an image"
    return _text(prefix)


_HEIC = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")


def _text(prefix: bytes) -> str | None:
    try:
        # A character may be cut at the end of the prefix.
        text = prefix.decode("utf-8", errors="strict" if len(prefix) < 64 else "ignore").lstrip("\ufeff \t\r\n").lower()
    except UnicodeDecodeError:
        return None
    if text.startswith(("<!doctype html", "<html", "<head", "<body")):
        return "a web page, not an image"
    if text.startswith("<svg") or (text.startswith("<?xml") and "svg" in text):
        return "an SVG drawing: convert it to PNG"
    if text.startswith("<?xml"):
        return "an XML file, not an image"
    printable = sum(character.isprintable() or character in "\r\n\t" for character in text)
    # "ignore" drops what is not UTF-8: a text keeps nearly all of its bytes.
    if text and printable == len(text) and len(text.encode()) >= 0.9 * len(prefix.strip()):
        return "a text file, not an image"
    return None


_TAIL = 64 * 1024


def is_truncated(file: IO[bytes], size: int, format_name: str) -> bool:
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
