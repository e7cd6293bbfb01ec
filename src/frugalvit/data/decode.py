"""Decode image files to pixels, or raise ``UnreadableImage`` with a reason.

``decode`` returns RGB, uint8, (height, width, 3), rotated upright by EXIF. Transparent pixels become white. Grey,
palette, 1-bit and CMYK images and the first frame of an animation become RGB. 16-bit grey is scaled from its full range
(not clipped), floating point from [0, 1], [0, 255] or else its own range. Images above ``MAX_MEGAPIXELS`` are refused.
``read_pixels`` keeps the range and the channels of files that hold more: 16 bits, floating point, other channels.
"""

import contextlib
import functools
import math
import os
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.preprocessing import Stored, exif_orientation, find_stored, on_planes, rotate, upright_rgb
from frugalvit.errors import UserError
from frugalvit.utils.files import open_regular
from frugalvit.utils.text import pluralize

MAX_MEGAPIXELS = 200.0
LARGE_MEGAPIXELS = 25.0
large_images: AbstractContextManager[Any] = threading.Lock()
"""Larger images are decoded and resized one at a time, over all workers: one takes up to 20 bytes a pixel."""

# Formats that only store pixels. PostScript and PDF are missing because Pillow starts a program to read them.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
EXTENSIONS = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
    ".pnm", ".jp2", ".j2k", ".jpx", ".avif", ".heic", ".heif",
))  # fmt: skip
"""Extensions of image files. HEIC photos cannot be decoded: they are listed so that ``frugalvit data`` reports them."""
ARRAYS = frozenset((".npy", ".dcm", ".dicom"))
"""Extensions of files that are images only in folders without other images: arrays may also be features or masks."""

_TRUNCATED_TEXTS = ("truncated", "unexpected end", "not enough", "no more images")
_TRUNCATED = "truncated: the file ends before the {} data"
_TAIL = 64 * 1024


class PixelFormat(NamedTuple):
    """The type and the number of channels of an image: uint8 is 8-bit RGB, float32 keeps the values of the file."""

    type: str = "uint8"
    channels: int = 3

    def __str__(self) -> str:
        return "8-bit RGB" if self == PHOTO else f"{pluralize(self.channels, 'channel')} of raw values"


PHOTO = PixelFormat()


class Header(NamedTuple):
    """Facts about an image file from its first bytes; width and height are before EXIF rotation."""

    format: str
    width: int
    height: int
    mode: str
    pixels: PixelFormat = PHOTO  # that keeps all values of the file, if they are requested

    @property
    def channels(self) -> str:
        return _CHANNELS.get(self.mode, self.mode)


_CHANNELS = {
    "1": "1-bit", "L": "grey", "P": "palette", "LA": "grey + alpha", "PA": "palette + alpha", "RGB": "colour",
    "RGBA": "colour + alpha", "CMYK": "CMYK", "I": "32-bit grey", "F": "floating point", "I;16": "16-bit grey",
    "I;16B": "16-bit grey", "I;16L": "16-bit grey", "YCbCr": "colour", "LAB": "LAB", "HSV": "colour",
}  # fmt: skip


def decode(
    content: bytes | str | Path, name: str | None = None, *, at_least: tuple[int, int] | None = None
) -> np.ndarray:
    """Decode an image to uint8 (height, width, 3). Raises ``UnreadableImage``.

    Args:
        content: the encoded bytes, or the path of a file.
        name: the name in an ``UnreadableImage``; default: the path.
        at_least: the (height, width) that training crops need. A JPEG of twice this size or more is decoded at 1/2,
            1/4 or 1/8, never below this size, which is several times faster. It moves pixels by up to half a pixel, so
            evaluation and prediction decode in full. Other formats ignore it.
    """
    image, stream, label = _open(content, name)
    with stream:
        return pixels_of(image, label, at_least=at_least)


def read_pixels(
    content: bytes | str | Path, pixels: PixelFormat = PHOTO, *, at_least: tuple[int, int] | None = None
) -> np.ndarray:
    """Read (H, W, C) in a pixel format: decoded to 8-bit RGB, or the values of the file. Raises ``UnreadableImage``."""
    if pixels == PHOTO:
        return decode(content, at_least=at_least)
    stream, label = _open_stream(content, None)
    with stream:
        stored = _find_stored(stream, label)
        if stored is None:
            decode(content)  # a damaged file says why
        if stored is None or _format_of(stored) != pixels:
            raise UnreadableImage(label, f"it holds {_format_of(stored)}, not {pixels}")
        try:
            with turn_of(stored.shape[0] * stored.shape[2], stored.shape[1]):
                return stored.load()
        except Exception as error:  # hostile bytes raise every kind of error
            raise UnreadableImage(label, _reason(error, stored.kind)) from None


def _format_of(stored: Stored | None) -> PixelFormat:
    return PHOTO if stored is None else PixelFormat("float32", stored.shape[2])


def to_picture(values: np.ndarray) -> np.ndarray:
    """Show (H, W, C) as 8-bit RGB: the first three channels or the first as grey, stretched if they are not uint8."""
    shown = values[:, :, : 3 if values.shape[2] >= 3 else 1]
    if values.dtype != np.uint8:
        low, high = np.percentile(shown, (1, 99), axis=(0, 1)).astype(np.float32)
        shown = np.rint(((shown - low) * (255 / np.maximum(high - low, 1e-30))).clip(0, 255)).astype(np.uint8)
    return shown if shown.shape[2] == 3 else np.repeat(shown, 3, axis=2)


def resize_to(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (H, W, C) to (S, S', C), antialiased; unchanged if it has that size."""
    if pixels.shape[:2] == size:
        return pixels if pixels.flags.writeable else pixels.copy()
    shape = (size[1], size[0])
    return on_planes(pixels, lambda image: image.resize(shape, Image.Resampling.BICUBIC, reducing_gap=3.0))


def as_pixels(picture: Any, wanted: PixelFormat = PHOTO) -> np.ndarray:
    """Return the pixels (H, W, C) of a path, a file's bytes, a PIL image, an array or a tensor.

    An array is uint8, (H, W) or (H, W, C). A tensor is (H, W) or (C, H, W), uint8 or floats from 0 to 1. C is 1 or 3.
    In another format than 8-bit RGB, arrays and tensors hold the same values as the files that the model learned from.
    """
    if isinstance(picture, str | bytes | os.PathLike):
        return read_pixels(os.fspath(picture), wanted)
    is_photo, is_tensor = wanted == PHOTO, isinstance(picture, torch.Tensor)
    if is_tensor:
        values = (_to_bytes(picture) if is_photo else picture).numpy(force=True)
    else:
        values = pixels_of(picture) if is_photo and isinstance(picture, Image.Image) else np.array(picture)
    if values.ndim == 2:
        values = values[:, :, None]
    elif values.ndim == 3 and is_tensor:
        values = np.moveaxis(values, 0, -1)
    channels, fits = (
        ((1, 3), values.dtype == np.uint8) if is_photo else ((wanted.channels,), values.dtype.kind in "uif")
    )
    if fits and values.ndim == 3 and values.shape[2] in channels and values.size:
        return values if is_photo else Stored("array", values.shape, lambda: values).load()
    advice = f"an array (H, W, {wanted.channels}) or a tensor ({wanted.channels}, H, W)"
    if is_photo:
        advice = "a PIL image, a uint8 array (H, W), (H, W, 1) or (H, W, 3), or a tensor (H, W), (1, H, W) or (3, H, W)"
    raise UserError(
        f"Expected {'an image' if is_photo else wanted}, got a {type(picture).__name__} of {values.dtype} and shape "
        f"{values.shape}. Give a path, {advice}. Give several images as a list."
    )


def _to_bytes(image: torch.Tensor) -> torch.Tensor:
    """Convert floats from 0 to 1 to uint8."""
    if image.is_floating_point() and image.numel():
        if not 0 <= image.min() <= image.max() <= 1:
            raise UserError("Expected a tensor of floats from 0 to 1. Do not normalize it: the model does that.")
        image = (image * 255).round().to(torch.uint8)
    return image


def pixels_of(image: Image.Image, name: str = "image", *, at_least: tuple[int, int] | None = None) -> np.ndarray:
    """Return the pixels of a Pillow image in the same form as ``decode``."""
    try:
        full_size = image.size
        if at_least is not None and image.format in ("JPEG", "MPO"):  # the only formats that decode at a smaller size
            height, width = at_least
            if exif_orientation(image) >= 5:
                height, width = width, height
            image.draft(None, (width, height))
        with turn_of(image.height, image.width):
            if image.format == "JPEG" and image.mode == "RGB" and image.size == full_size:
                with contextlib.suppress(RuntimeError, AttributeError):  # damaged or already loaded: for Pillow
                    return _decode_jpeg(image)
            return np.array(upright_rgb(image), order="C")  # writable: torch warns about Pillow's read-only memory
    except UnreadableImage as bad:
        raise UnreadableImage(name, bad.reason) from None
    except Exception as error:  # hostile bytes raise every kind of error; the file is bad, not the program
        raise UnreadableImage(name, _reason(error, image.format)) from None


def _decode_jpeg(image: Image.Image) -> np.ndarray:
    """Decode with torchvision: equal to Pillow to the bit; 4 to 26 % faster at 500 x 375, 60 % at 1000 x 750."""
    from torchvision.io import ImageReadMode, decode_jpeg

    stream: Any = image.fp  # type: ignore[attr-defined]
    stream.seek(0)
    rgb: Any = decode_jpeg(torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return np.ascontiguousarray(rotate(rgb.permute(1, 2, 0).numpy(), exif_orientation(image)))


def turn_of(height: int, width: int) -> AbstractContextManager[Any]:
    """Return a context in which an image of this size is decoded or resized: a large one waits for the others."""
    return large_images if height * width > LARGE_MEGAPIXELS * 1e6 else nullcontext()


def read_header(
    content: bytes | str | Path, name: str | None = None, *, complete: bool = False, values: bool = False
) -> Header:
    """Read format, size and mode without decoding. Raises ``UnreadableImage``; if ``complete``, also if truncated.

    values: describe files that hold more than 8-bit RGB by their values
    """
    if values:
        stream, label = _open_stream(content, name)
        with stream:
            stored = _find_stored(stream, label)
        if stored:
            pixels = _format_of(stored)
            return Header(stored.kind, stored.shape[1], stored.shape[0], str(pixels), pixels)
    image, stream, label = _open(content, name)
    with stream:
        header = Header(image.format or "?", image.width, image.height, image.mode)
        if complete and _is_truncated(stream, header.format):
            raise UnreadableImage(label, _TRUNCATED.format(header.format))
    return header


def _open(content: bytes | str | Path, name: str | None) -> tuple[Image.Image, IO[bytes], str]:
    """Recognize the format by the first bytes and read the header. Returns image, stream and name."""
    stream, label = _open_stream(content, name)
    try:
        image = _identify(stream, label)
        megapixels = image.width * image.height / 1e6
        if megapixels > MAX_MEGAPIXELS:
            size = f"{image.width} x {image.height} pixels are {megapixels:,.0f} megapixels"
            limit = f"above the limit of {MAX_MEGAPIXELS:,g}: refused as a decompression bomb"
            raise UnreadableImage(label, f"{size}, {limit}")
        if megapixels <= 0:
            raise UnreadableImage(label, "the image has no pixels")
    except BaseException:
        stream.close()
        raise
    return image, stream, label


def _open_stream(content: bytes | str | Path, name: str | None) -> tuple[IO[bytes], str]:
    _ignore_pillow_warnings()
    if isinstance(content, bytes):
        return BytesIO(content), "image" if name is None else name
    label = str(content) if name is None else name
    try:
        return open_regular(Path(content)), label
    except (OSError, ValueError) as error:  # ValueError: a null character in a path
        raise UnreadableImage.of_file(label, error) from None


def _find_stored(stream: IO[bytes], label: str) -> Stored | None:
    try:
        stored = find_stored(stream)
    except ImportError as error:
        raise UserError(f'Reading {label} needs {error.name}: pip install "frugalvit[science]".') from None
    except Exception as error:  # hostile bytes raise every kind of error
        raise UnreadableImage(label, str(error) if isinstance(error, ValueError) else _reason(error, None)) from None
    if stored is not None and not 0 < math.prod(stored.shape) <= 3e6 * MAX_MEGAPIXELS:
        raise UnreadableImage(label, f"its shape is {stored.shape}: empty, or above {MAX_MEGAPIXELS:,g} megapixels RGB")
    return stored


@functools.cache
def known_formats() -> tuple[str, ...]:
    """Return the formats that the installed Pillow can read: some builds lack AVIF."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _identify(stream: IO[bytes], label: str) -> Image.Image:
    """Open the file with the first format that accepts it. ``Image.open`` would apply Pillow's pixel limit."""
    prefix = stream.read(132)
    for format_name in known_formats():
        factory, accepts = Image.OPEN[format_name]
        try:
            accepted = accepts is None or accepts(prefix)
            if accepted and not isinstance(accepted, str):  # a string means: this build of Pillow lacks the decoder
                stream.seek(0)
                return factory(stream, label)
        except Exception:  # a damaged header raises every kind of error
            continue
    raise UnreadableImage(label, _describe_file(prefix))


def _describe_file(prefix: bytes) -> str:
    """Return why a file without a readable header is not an image, and what to do."""
    if not prefix:
        return "the file is empty"
    if prefix[4:8] == b"ftyp" and prefix[8:12] in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"):
        return "a HEIC photo: convert it to JPEG"
    if prefix.startswith((b"\x93NUMPY", b"II*\0", b"MM\0*")) or prefix[128:] == b"DICM":
        return f"an array, a DICOM file or a TIFF of several channels, not {PHOTO}; or damaged"
    return "not an image of a known format, or damaged"


def _reason(error: Exception, format_name: str | None) -> str:
    """Turn an error of Pillow's decoder into the reason of an ``UnreadableImage``."""
    text = " ".join(str(error).split())
    kind = format_name or "image"
    if isinstance(error, MemoryError):
        return "too little memory to decode it"
    if isinstance(error, Image.DecompressionBombError):
        return "refused as a decompression bomb: it would unpack to far too many pixels or too much text"
    if isinstance(error, EOFError) or any(part in text.lower() for part in _TRUNCATED_TEXTS):
        return _TRUNCATED.format(kind)
    return f"its {kind} data is damaged" + (f" ({text})" if text else "")


_PILLOW = r"PIL\.|frugalvit\.data\.decode"


def _ignore_pillow_warnings() -> None:
    """Ignore Pillow's warnings about damaged files in this process.

    ``warnings.catch_warnings`` is not safe while several threads decode. The filter leaves out decompression bombs (a
    ``RuntimeWarning``), so the caller's own Pillow still warns of them.
    """
    if not any(getattr(entry[3], "pattern", None) == _PILLOW for entry in warnings.filters):
        warnings.filterwarnings("ignore", module=_PILLOW, category=UserWarning)


def _is_truncated(stream: IO[bytes], format_name: str) -> bool:
    """True if a JPEG, PNG or WebP ends too early; for other formats only decoding shows it."""
    size = stream.seek(0, os.SEEK_END)
    if format_name == "WEBP":
        stream.seek(4)
        return int.from_bytes(stream.read(4), "little") + 8 > size
    marker = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}.get(format_name)
    stream.seek(max(0, size - _TAIL))
    return marker is not None and marker not in stream.read()  # some programs append bytes after the marker
