"""Bytes -> pixels: every kind of image decoded right, or refused with a reason that a person understands.

The result is always RGB, uint8, (height, width, 3), upright as EXIF says. Transparency is laid on white. Grey, palette,
1-bit, CMYK and first frames of animations become RGB; 16-bit grey is scaled from its full range (not clipped), floating
point from [0, 1], [0, 255] or else its own range. Nothing larger than a limit of pixels is ever decoded.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import os
import stat
import warnings
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageChops

from frugalvit.data.file_types import describe_file_type, is_truncated
from frugalvit.errors import UserError

MAX_MEGAPIXELS = 200.0

# Formats that describe pixels and nothing else: no PostScript, PDF or other format that starts a program to be read.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA", "QOI", "SGI", "PCX")
_ORIENTATION = 0x0112
_DARK = 32  # of 255: the brightest pixel of a set of photographs is far above it
_CUT_WORDS = ("truncated", "unexpected end", "not enough", "no more images")
_TRUNCATED = "truncated: the file ends before the {} does"


class UnreadableImage(UserError):
    """An image that cannot be used: its ``name`` and the ``reason``."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[type[UnreadableImage], tuple[str, str]]:
        return UnreadableImage, (self.name, self.reason)  # an exception crosses process borders whole


class Header(NamedTuple):
    """What a file says of itself before its pixels are decoded; width and height as stored."""

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
    """The pixels of an encoded image, uint8 (height, width, 3), or ``UnreadableImage``.

    Args:
        content: the encoded bytes, or the path of a file.
        name: what to call it in a ``UnreadableImage``; a path is its own name.
        at_least: (height, width) that is enough. A JPEG twice as large or more is decoded at 1/2, 1/4 or 1/8 of its
            size, never below this, which is several times faster. Other formats ignore it.
        max_megapixels: anything larger is refused undecoded.
    """
    label = name if name is not None else (str(content) if not isinstance(content, bytes) else "image")
    image, stream = _open(content, label, max_megapixels)
    with stream:
        return pixels_of(image, label, at_least=at_least)


def as_pixels(picture: Any, *, at_least: tuple[int, int] | None = None) -> np.ndarray:
    """Pixels (H, W, 1 or 3) of a path, a file's bytes, a PIL image (as its file is seen), an array or a tensor.

    An array is uint8, (H, W) or (H, W, C); a tensor (H, W) or (C, H, W), uint8 or floats from 0 to 1. ``at_least`` is
    of files, as in :func:`decode`.
    """
    if isinstance(picture, str | bytes | os.PathLike):
        return decode(os.fspath(picture), at_least=at_least)
    if isinstance(picture, torch.Tensor):
        picture = _from_tensor(picture)
    pixels = pixels_of(picture) if isinstance(picture, Image.Image) else np.array(picture)
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or channels not in (1, 3) or not pixels.size:
        several = " Several images are a list of them." if pixels.ndim == 4 else ""
        kind = f"An array of {pixels.dtype} and shape {pixels.shape}" if pixels.ndim else f"A {type(picture).__name__}"
        raise UserError(
            f"{kind} is no image: give a path, a PIL image, or uint8 from 0 to 255 of shape (H, W), (H, W, 1) or "
            f"(H, W, 3).{several}"
        )
    return pixels.reshape(*pixels.shape[:2], channels)


def _from_tensor(image: torch.Tensor) -> np.ndarray:
    """uint8 (H, W, C) of (C, H, W) or (H, W): as torchvision's ``to_tensor`` and ``decode_image`` give them."""
    shape = tuple(image.shape)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)) or not image.numel():
        several = ": several images are a list of them" if len(shape) == 4 else ""
        raise UserError(
            f"A tensor of shape {shape} is no image{several}. Give (H, W), (1, H, W) or (3, H, W), uint8 or floats "
            "from 0 to 1."
        )
    image = image.detach().cpu()
    if image.is_floating_point():
        if not 0 <= image.min() <= image.max() <= 1:
            raise UserError(
                "A tensor of floats is an image if they lie from 0 to 1: normalise nothing, the model does that."
            )
        image = (image * 255).round().to(torch.uint8)
    return (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()


def pixels_of(image: Image.Image, name: str = "image", *, at_least: tuple[int, int] | None = None) -> np.ndarray:
    """The pixels of an image that Pillow has opened or made, as ``decode`` gives those of its file."""
    try:
        if at_least is not None and image.format in ("JPEG", "MPO"):  # which alone can be decoded smaller
            height, width = at_least
            if _orientation(image) >= 5:
                height, width = width, height
            image.draft(None, (width, height))
        if image.format == "TIFF":
            _silence_libtiff()
        image.load()
        # TIFF turns itself while loading and PNG may carry EXIF behind its pixels: ask afterwards.
        turned = _upright(_to_rgb(image), _orientation(image))
    except UnreadableImage as bad:
        raise UnreadableImage(name, bad.reason) from None
    except Exception as error:  # decoders meet hostile bytes in every way there is; the file is bad, not the program
        raise UnreadableImage(name, _reason(error, image.format)) from None
    # Pillow's memory is read-only and torch warns about that: hand out a whole, writable array.
    return np.array(turned, order="C")


def read_header(
    content: bytes | str | Path,
    name: str | None = None,
    *,
    whole: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Header:
    """Format, size and mode without decoding a pixel, or ``UnreadableImage``; ``whole`` refuses what is cut short, too."""
    label = name if name is not None else (str(content) if not isinstance(content, bytes) else "image")
    image, stream = _open(content, label, max_megapixels)
    with stream:
        header = Header(image.format or "?", image.width, image.height, image.mode)
        if whole and _is_cut_short(stream, header.format):
            raise UnreadableImage(label, _TRUNCATED.format(header.format))
    return header


def _open(content: bytes | str | Path, label: str, max_megapixels: float) -> tuple[Image.Image, IO[bytes]]:
    """Find the format by the file's first bytes and read its header; pixel limits hold before anything is decoded."""
    _quieten()
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
            raise UnreadableImage(
                label, f"{size}, above the limit of {max_megapixels:,g}: refused as a decompression bomb"
            )
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
        raise UnreadableImage(label, f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from None


@functools.cache
def known_formats() -> tuple[str, ...]:
    """Those of ``FORMATS`` that the installed Pillow can read: not every one knows AVIF."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _identify(stream: IO[bytes], prefix: bytes, label: str) -> Image.Image:
    """Pillow's own search for a format, over ours alone, without its global pixel limit and warnings."""
    failure: Exception | None = None
    claimed = None
    for format_name in known_formats():
        factory, accepts = Image.OPEN[format_name]
        # TGA begins with no signature and its reader accepts nearly anything: its name or its end must vouch for it.
        if accepts is None and not (label.lower().endswith(".tga") or _ends_as_tga(stream)):
            continue
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
    found = describe_file_type(prefix)
    if found:
        raise UnreadableImage(label, found)
    if failure is not None and claimed is not None:
        cut = _is_cut_short(stream, claimed)
        raise UnreadableImage(label, _TRUNCATED.format(claimed) if cut else _reason(failure, claimed, header=True))
    raise UnreadableImage(label, "not an image: no known format begins like this")


def _ends_as_tga(stream: IO[bytes]) -> bool:
    """Members of shards have lost their names' endings; all but the oldest TGA say at their end what they are."""
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - 18))
    return stream.read(18) == b"TRUEVISION-XFILE.\0"


def _is_cut_short(stream: IO[bytes], format_name: str) -> bool:
    return is_truncated(stream, stream.seek(0, os.SEEK_END), format_name)


def _to_rgb(image: Image.Image) -> np.ndarray:
    """(H, W, 3) uint8 from any mode that Pillow can give."""
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
        # Pillow takes every CMYK JPEG for Adobe's, which stores the inks inverted; this one carries no such mark.
        image = ImageChops.invert(image)
    if mode == "LAB":
        image = _lab_to_rgb(image)
    return np.asarray(image.convert("RGB"))


def _grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


def _from_integers(image: Image.Image) -> np.ndarray:
    """16-bit grey from its full range; the one value a PNG may name as transparent is white, as it lies on white."""
    values = np.asarray(image).astype(np.float64)
    if image.mode == "I" and image.format not in ("PNG", "PPM") and values.min() >= 0 and values.max() <= 255:
        return values.astype(np.uint8)  # 32 bits that hold 8: an array of integers, saved as it was
    # Pillow gives some 16-bit PNG and PPM the mode I, scaled to 65535; a wider TIFF is stretched over its own range.
    fits = image.mode != "I" or image.format in ("PNG", "PPM") or (values.min() >= 0 and values.max() <= 65535)
    grey = _from_16_bit(values) if fits else _stretch(values)
    clear = image.info.get("transparency")
    return np.where(values == clear, np.uint8(255), grey) if isinstance(clear, int) else grey


def almost_black(brightest: int) -> str:
    """A word where no pixel is bright: 12 bits in files of 16, say, or labels instead of pictures; else nothing."""
    if brightest >= _DARK:
        return ""
    return (
        f"no pixel is brighter than {brightest} of 255, so these images look almost black: 16-bit files with 12 bits "
        "in them, or masks? Rescale them first"
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


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    if converted is None:
        raise UnreadableImage("", "its LAB colours cannot be converted")
    return converted


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8; damaged EXIF data turn nothing."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
        return int(value) if 1 <= int(value) <= 8 else 1
    except Exception:  # EXIF is a format of its own, and as often damaged as any
        return 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _reason(error: Exception, format_name: str | None, header: bool = False) -> str:
    """Pillow's complaint in words for the owner of the file."""
    text = " ".join(str(error).split())
    kind = format_name or "image"
    if isinstance(error, Image.DecompressionBombError):
        return "refused as a decompression bomb: it would unpack to far more pixels or text than it should"
    if isinstance(error, MemoryError):
        return "too large for the memory of this machine"
    low = text.lower()
    if isinstance(error, EOFError) or any(word in low for word in _CUT_WORDS):
        return _TRUNCATED.format(kind)
    if header:
        return f"its {kind} header is damaged" + (f" ({text})" if text else "")
    return f"its {kind} data are damaged" + (f" ({text})" if text else "")


def _quieten() -> None:
    """Keep Pillow's warnings from the user: what matters of them becomes a reason.

    ``warnings.catch_warnings`` would be the usual way, but it is not safe when several threads decode. This holds for
    the whole program, so it is of complaints about files alone: a caller's own use of Pillow stays protected against
    decompression bombs, of which a ``RuntimeWarning`` tells.
    """
    if not any(getattr(entry[3], "pattern", None) == _PILLOW for entry in warnings.filters):
        warnings.filterwarnings("ignore", module=_PILLOW, category=UserWarning)


_PILLOW = r"PIL\.|frugalvit\.data\.decode"


@functools.cache
def _silence_libtiff() -> None:
    """Keep libtiff from writing to standard error behind everybody's back: its failures reach us as exceptions anyway.

    Wheels of Pillow bring the library along; where it is linked in or hidden, it keeps talking.
    """
    beside = Path(Image.__file__).parent
    bundled = [*beside.parent.glob("pillow.libs/libtiff*"), *beside.glob(".dylibs/libtiff*")]
    found = str(bundled[0]) if bundled else ctypes.util.find_library("tiff")
    if found:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(found)
            for setter in (library.TIFFSetErrorHandler, library.TIFFSetWarningHandler):
                setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
                setter(None)
