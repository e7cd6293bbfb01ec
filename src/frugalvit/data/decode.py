"""Bytes -> pixels: every kind of image decoded right, or refused with a reason.

The result is always RGB, uint8, (height, width, 3), upright as EXIF says. Transparent pixels become white. Grey,
palette, 1-bit, CMYK and the first frames of animations become RGB; 16-bit grey is scaled from its full range (not
clipped), floating point from [0, 1], [0, 255] or else its own range. Nothing above a limit of pixels is decoded.
"""

from __future__ import annotations

import functools
import os
import stat
import struct
import warnings
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageChops

from frugalvit.data.unreadable import UnreadableImage
from frugalvit.errors import UserError

MAX_MEGAPIXELS = 200.0

# Formats that describe pixels and nothing else: no PostScript, PDF or other format that starts a program to be read.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
    ".pnm", ".jp2", ".j2k", ".jpx", ".avif", ".heic", ".heif",
))  # fmt: skip
"""File names of images; a HEIC photo is one that is refused by name."""

_ORIENTATION = 0x0112
_DARK = 32  # of 255: the brightest pixel of a set of photographs is far above it
_TRUNCATED_TEXTS = ("truncated", "unexpected end", "not enough", "no more images")
_TRUNCATED = "truncated: the file ends before the {} does"


class Header(NamedTuple):
    """What a file tells without decoding its pixels; width and height as stored."""

    format: str
    width: int
    height: int
    mode: str

    @property
    def channels(self) -> str:
        return _CHANNELS.get(self.mode, self.mode)


_CHANNELS = {
    "1": "1-bit", "L": "grey", "P": "palette", "LA": "grey + alpha", "PA": "palette + alpha", "RGB": "colour",
    "RGBA": "colour + alpha", "CMYK": "CMYK", "I": "32-bit grey", "F": "floating point", "I;16": "16-bit grey",
    "I;16B": "16-bit grey", "I;16L": "16-bit grey", "YCbCr": "colour", "LAB": "LAB", "HSV": "colour",
}  # fmt: skip


def decode(
    content: bytes | str | Path,
    name: str | None = None,
    *,
    at_least: tuple[int, int] | None = None,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> np.ndarray:
    """Decode an image to uint8 (height, width, 3); ``UnreadableImage`` if that fails.

    Args:
        content: the encoded bytes, or the path of a file.
        name: the name in an ``UnreadableImage``; default: the path.
        at_least: (height, width) that is enough. A JPEG twice as large or more is decoded at 1/2, 1/4 or 1/8 of its
            size, never below this, which is several times faster. Other formats ignore it.
        max_megapixels: anything larger is refused without decoding.
    """
    label = name if name is not None else (str(content) if not isinstance(content, bytes) else "image")
    image, stream = _open(content, label, max_megapixels)
    with stream:
        return pixels_of(image, label, at_least=at_least)


def resize_to(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (H, W, 3) to (S, S', 3), antialiased; unchanged if it has that size."""
    if pixels.shape[:2] == size:
        return pixels if pixels.flags.writeable else pixels.copy()
    resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return np.array(resized)


def as_pixels(picture: Any, *, at_least: tuple[int, int] | None = None) -> np.ndarray:
    """Return the pixels (H, W, 1 or 3) of a path, a file's bytes, a PIL image, an array or a tensor.

    An array is uint8, (H, W) or (H, W, C); a tensor (H, W) or (C, H, W), uint8 or floats from 0 to 1. ``at_least``
    is for files, as in :func:`decode`.
    """
    if isinstance(picture, str | bytes | os.PathLike):
        return decode(os.fspath(picture), at_least=at_least)
    if isinstance(picture, torch.Tensor):
        picture = _from_tensor(picture)
    pixels = pixels_of(picture) if isinstance(picture, Image.Image) else np.array(picture)
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or channels not in (1, 3) or not pixels.size:
        hint = " Give several images as a list." if pixels.ndim == 4 else ""
        kind = f"an array of {pixels.dtype} and shape {pixels.shape}" if pixels.ndim else f"a {type(picture).__name__}"
        raise UserError(
            f"Expected an image, got {kind}. Give a path, a PIL image, or uint8 from 0 to 255 of shape (H, W), "
            f"(H, W, 1) or (H, W, 3).{hint}"
        )
    return pixels.reshape(*pixels.shape[:2], channels)


def _from_tensor(image: torch.Tensor) -> np.ndarray:
    """Convert (C, H, W) or (H, W), as of torchvision's ``to_tensor`` and ``decode_image``, to uint8 (H, W, C)."""
    shape = tuple(image.shape)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)) or not image.numel():
        hint = " Give several images as a list." if len(shape) == 4 else ""
        raise UserError(
            f"Expected an image, got a tensor of shape {shape}. Give (H, W), (1, H, W) or (3, H, W), uint8 or floats "
            f"from 0 to 1.{hint}"
        )
    image = image.detach().cpu()
    if image.is_floating_point():
        if not 0 <= image.min() <= image.max() <= 1:
            raise UserError(
                "Expected a tensor of floats from 0 to 1, got values outside. Do not normalise it: the model does that."
            )
        image = (image * 255).round().to(torch.uint8)
    return (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()


def pixels_of(image: Image.Image, name: str = "image", *, at_least: tuple[int, int] | None = None) -> np.ndarray:
    """Return the pixels of a Pillow image, as ``decode`` returns those of a file."""
    try:
        if at_least is not None and image.format in ("JPEG", "MPO"):  # the only formats that decode at a smaller size
            height, width = at_least
            if _orientation(image) >= 5:
                height, width = width, height
            image.draft(None, (width, height))
        image.load()
        # Read the orientation after loading: TIFF rotates itself, and PNG may store EXIF after its pixels.
        pixels = _rotate_upright(_to_rgb(image), _orientation(image))
    except UnreadableImage as bad:
        raise UnreadableImage(name, bad.reason) from None
    except Exception as error:  # hostile bytes raise every kind of error; the file is bad, not the program
        raise UnreadableImage(name, _reason(error, image.format)) from None
    return np.array(pixels, order="C")  # a writable copy: torch warns about Pillow's read-only memory


def read_header(
    content: bytes | str | Path,
    name: str | None = None,
    *,
    complete: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Header:
    """Read format, size and mode without decoding; ``complete`` refuses truncated files too."""
    label = name if name is not None else (str(content) if not isinstance(content, bytes) else "image")
    image, stream = _open(content, label, max_megapixels)
    with stream:
        header = Header(image.format or "?", image.width, image.height, image.mode)
        if complete and _is_truncated(stream, header.format):
            raise UnreadableImage(label, _TRUNCATED.format(header.format))
    return header


def _open(content: bytes | str | Path, label: str, max_megapixels: float) -> tuple[Image.Image, IO[bytes]]:
    """Recognise the format by the first bytes and read the header; checks the pixel limit before decoding."""
    _ignore_pillow_warnings()
    stream: IO[bytes]
    if isinstance(content, bytes):
        stream = BytesIO(content)
    else:
        stream = _open_file(Path(content), label)
    try:
        prefix = stream.read(64)
        if not prefix:
            raise UnreadableImage(label, "the file is empty")
        image = _identify(stream, prefix, label)
        pixels = image.width * image.height
        if pixels > max_megapixels * 1e6:
            size = f"{image.width} x {image.height} pixels are {pixels / 1e6:,.0f} megapixels"
            limit = f"above the limit of {max_megapixels:,g}: refused as a decompression bomb"
            raise UnreadableImage(label, f"{size}, {limit}")
        if pixels <= 0:
            raise UnreadableImage(label, "the image has no pixels")
    except BaseException:
        stream.close()
        raise
    return image, stream


def _open_file(path: Path, label: str) -> IO[bytes]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableImage(label, "a folder, not a file" if path.is_dir() else "not a regular file")
        return path.open("rb")
    except FileNotFoundError:
        raise UnreadableImage(label, "the file is missing") from None
    except PermissionError:
        raise UnreadableImage(label, "no permission to read the file") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in a path
        raise UnreadableImage(label, f"cannot read the file: {getattr(error, 'strerror', None) or error}") from None


@functools.cache
def known_formats() -> tuple[str, ...]:
    """The formats that the installed Pillow can read: some builds lack AVIF."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _identify(stream: IO[bytes], prefix: bytes, label: str) -> Image.Image:
    """Open with the first of our formats that accepts the file, without Pillow's global pixel limit and warnings."""
    failure: Exception | None = None
    claimed = None
    for format_name in known_formats():
        factory, accepts = Image.OPEN[format_name]
        try:
            verdict = accepts is None or accepts(prefix)
            if isinstance(verdict, str):
                raise UnreadableImage(label, f"{format_name} files cannot be read here: {verdict}")
            if not verdict:
                continue
            stream.seek(0)
            return factory(stream, label)
        except UnreadableImage:
            raise
        except Exception as error:  # a damaged header fails in as many ways as there are parsers
            failure, claimed = error, format_name
    if description := describe_file_type(prefix):
        raise UnreadableImage(label, description)
    if failure is not None and claimed is not None:
        truncated = _is_truncated(stream, claimed)
        raise UnreadableImage(label, _TRUNCATED.format(claimed) if truncated else _reason(failure, claimed, "header"))
    raise UnreadableImage(label, "not an image of a known format")


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Convert an image of any Pillow mode to (H, W, 3) uint8."""
    mode = image.mode
    if mode == "I" or mode.startswith("I;16"):  # before transparency: as RGBA these would be clipped
        return _grey(_from_integers(image))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, coloured).convert("RGB"))
    if mode == "RGB":
        return np.asarray(image)
    if mode in ("L", "1"):
        return _grey(np.asarray(image.convert("L")))
    if mode == "F":
        return _grey(_from_float(np.asarray(image)))
    if mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        # Pillow inverts every CMYK JPEG, because Adobe stores inverted inks; this file is not Adobe's.
        image = ImageChops.invert(image)
    return np.asarray(image.convert("RGB"))


def _grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


def _from_integers(image: Image.Image) -> np.ndarray:
    """Scale 16-bit grey from its full range; the transparent value of a PNG becomes white."""
    values = np.asarray(image).astype(np.float64)
    if image.mode == "I" and image.format not in ("PNG", "PPM") and values.min() >= 0 and values.max() <= 255:
        return values.astype(np.uint8)  # 8-bit values saved as 32-bit integers
    # Pillow opens some 16-bit PNG and PPM with mode I, scaled to 65535; a wider TIFF is stretched over its own range.
    fits = image.mode != "I" or image.format in ("PNG", "PPM") or (values.min() >= 0 and values.max() <= 65535)
    grey = _from_16_bit(values) if fits else _stretch(values)
    clear = image.info.get("transparency")
    return np.where(values == clear, np.uint8(255), grey) if isinstance(clear, int) else grey


def describe_darkness(brightest: int) -> str:
    """A warning if the brightest pixel is dark (12 bits in 16-bit files, or masks); else nothing."""
    if brightest >= _DARK:
        return ""
    return (
        f"no pixel is brighter than {brightest} of 255, so these images look almost black: 16-bit files with 12-bit "
        "values, or masks? Rescale them first"
    )


def _from_16_bit(values: np.ndarray) -> np.ndarray:
    return np.rint(values / 257.0).clip(0, 255).astype(np.uint8)


def _from_float(values: np.ndarray) -> np.ndarray:
    values = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if values.min() >= 0 and values.max() <= 1:
        return np.rint(values * 255).astype(np.uint8)
    if values.min() >= 0 and values.max() <= 255:
        return np.rint(values).astype(np.uint8)
    return _stretch(values)


def _stretch(values: np.ndarray) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    return np.rint((values - low) * (255.0 / max(high - low, 1e-12))).clip(0, 255).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8; 1 if the EXIF data are damaged."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
        return int(value) if 1 <= int(value) <= 8 else 1
    except Exception:  # damaged EXIF raises every kind of error
        return 1


def _rotate_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _reason(error: Exception, format_name: str | None, part: str = "data") -> str:
    """Translate Pillow's error for the owner of the file."""
    text = " ".join(str(error).split())
    kind = format_name or "image"
    if isinstance(error, Image.DecompressionBombError):
        return "refused as a decompression bomb: it would unpack to far more pixels or text than it should"
    if isinstance(error, MemoryError):
        return "too large for the memory of this machine"
    if isinstance(error, EOFError) or any(words in text.lower() for words in _TRUNCATED_TEXTS):
        return _TRUNCATED.format(kind)
    return f"its {kind} {part} is damaged" + (f" ({text})" if text else "")


_PILLOW = r"PIL\.|frugalvit\.data\.decode"


def _ignore_pillow_warnings() -> None:
    """Ignore Pillow's warnings about files; what matters of them becomes a reason.

    ``warnings.catch_warnings`` is not safe while several threads decode, so the filter holds for the process. It covers
    warnings about files alone: the caller's own Pillow still warns of decompression bombs (a ``RuntimeWarning``).
    """
    if not any(getattr(entry[3], "pattern", None) == _PILLOW for entry in warnings.filters):
        warnings.filterwarnings("ignore", module=_PILLOW, category=UserWarning)


# -- what a file is, by its first and last bytes

_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ")
_OTHERS = [
    (b"%PDF", "a PDF document, not an image"),
    (b"%!PS", "a PostScript document, not an image"),
    (b"PK\x03\x04", "a zip archive, not an image"),
    (b"\x1f\x8b", "a gzip archive, not an image"),
    (b"version https://git-lfs", "a Git LFS pointer without its content: run 'git lfs pull'"),
]
_HEIC = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
_TAIL = 64 * 1024


def has_image_signature(prefix: bytes) -> bool:
    """True if a file starts like an image: for files without a telling name."""
    webp = prefix[:4] == b"RIFF" and prefix[8:12] == b"WEBP"
    return webp or prefix.startswith(_IMAGES)


def describe_file_type(prefix: bytes) -> str | None:
    """What a file is instead of a readable image, and what to do; None if it is unknown."""
    for signature, description in _OTHERS:
        if prefix.startswith(signature):
            return description
    if prefix[4:8] == b"ftyp":
        return "a HEIC photo: convert it to JPEG" if prefix[8:12] in _HEIC else "a video file, not an image"
    if not prefix.strip(b"\0"):
        return "a file of zeros, not an image"
    return _describe_text(prefix)


def _describe_text(prefix: bytes) -> str | None:
    try:
        # The prefix may end inside a character.
        text = prefix.decode("utf-8", errors="strict" if len(prefix) < 64 else "ignore").lstrip("\ufeff \t\r\n").lower()
    except UnicodeDecodeError:
        return None
    if text.startswith(("<!doctype html", "<html", "<head", "<body")):
        return "a web page, not an image"
    if text.startswith("<svg") or (text.startswith("<?xml") and "svg" in text):
        return "an SVG drawing: convert it to PNG"
    printable = sum(character.isprintable() or character in "\r\n\t" for character in text)
    # "ignore" drops what is not UTF-8: a text keeps nearly all of its bytes.
    if text and printable == len(text) and len(text.encode()) >= 0.9 * len(prefix.strip()):
        return "a text file, not an image"
    return None


def _is_truncated(stream: IO[bytes], format_name: str) -> bool:
    """True if a JPEG, PNG or WebP ends too early; for other formats only decoding shows it."""
    size = stream.seek(0, os.SEEK_END)
    check = {
        "JPEG": _is_truncated_jpeg,
        "MPO": _is_truncated_jpeg,
        "PNG": _is_truncated_png,
        "WEBP": _is_truncated_webp,
    }
    try:
        return format_name in check and check[format_name](stream, size)
    except struct.error:  # too short even for its first numbers
        return True


def _is_truncated_jpeg(file: IO[bytes], size: int) -> bool:
    """A JPEG ends with FF D9; some cameras append more."""
    file.seek(max(0, size - _TAIL))
    return b"\xff\xd9" not in file.read(_TAIL)


def _is_truncated_png(file: IO[bytes], size: int) -> bool:
    """Walk over the chunks (length, kind, content, checksum); the last is IEND."""
    position = 8
    while position + 12 <= size:
        file.seek(position)
        length, kind = struct.unpack(">I4s", file.read(8))
        if kind == b"IEND":
            return False
        position += 12 + length
    return True


def _is_truncated_webp(file: IO[bytes], size: int) -> bool:
    file.seek(4)
    return struct.unpack("<I", file.read(4))[0] + 8 > size
