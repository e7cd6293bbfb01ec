"""Turn any image into the input of a network: the same pixels in training's evaluation and everywhere else.

It needs NumPy and Pillow; TIFF with many channels needs tifffile, DICOM pydicom. ``export`` copies it beside the model:

    config = json.load(open("FOLDER/config.json"))
    images = preprocess("photo.jpg", config)             # float32 (1, C, h, w), for ONNX
    images = transform(read_rgb("photo.jpg"))[None]      # with timm's transform
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

ORIENTATION = 0x0112
LUMA = (0.2989, 0.587, 0.114)
_WIDEST = 8  # times the area of the crop


def preprocess(path: str | Path, config: dict[str, Any]) -> np.ndarray:
    """Read an image file as the network of this config.json needs it: float32 (1, C, h, w)."""
    settings = config["pretrained_cfg"]
    size, is_squashed = tuple(settings["input_size"][1:]), settings.get("crop_mode") == "squash"
    crop = CenterCrop(size, settings["crop_pct"], settings["interpolation"], is_squashed)
    if config.get("frugalvit", {}).get("keywords", {}).get("pixel_type", "uint8") != "uint8":
        pixels = crop(read_values(path)).astype(np.float32)
    else:
        pixels = crop(np.asarray(read_rgb(path))).astype(np.float32) / 255
        if len(settings["mean"]) == 1:
            pixels = pixels @ np.array(LUMA, np.float32)[:, None]
    normalized = (pixels - np.float32(settings["mean"])) / np.float32(settings["std"])
    return np.ascontiguousarray(normalized.transpose(2, 0, 1)[None])


def read_rgb(path: str | Path) -> Image.Image:
    """Read an image file as 8-bit RGB, upright, on white where it is transparent."""
    with Image.open(path) as image:
        return Image.fromarray(np.ascontiguousarray(upright_rgb(image)))


@dataclass(frozen=True)
class CenterCrop:
    """Resize the shorter edge to ``size / crop_pct`` and crop the centre, as timm's and torchvision's evaluation do.

    size: height and width of the result. ``squash`` resizes both edges, which changes the aspect ratio.
    """

    size: tuple[int, int]
    crop_pct: float = 0.875
    interpolation: str = "bicubic"
    squash: bool = False

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of a resized image, before the crop."""
        rows, columns = (math.floor(side / self.crop_pct) for side in self.size)
        if self.squash:
            return rows, columns
        if rows == columns:
            return (rows, int(rows * width / height)) if height <= width else (int(rows * height / width), rows)
        ratio = min(height / rows, width / columns)
        return round(height / ratio), round(width / ratio)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Convert (H, W, C) to (h, w, C)."""
        height, width = pixels.shape[:2]
        rows, columns = self.resized(height, width)
        if (rows, columns) == (height, width) == self.size:
            return pixels if pixels.flags.writeable else pixels.copy()
        top, left = round((rows - self.size[0]) / 2), round((columns - self.size[1]) / 2)
        bottom, right = top + self.size[0], left + self.size[1]
        kind = Image.Resampling[self.interpolation.upper()]
        if rows * columns <= _WIDEST * self.size[0] * self.size[1]:
            return on_planes(pixels, lambda image: image.resize((columns, rows), kind).crop((left, top, right, bottom)))
        # Only the crop of a panorama: all of it, enlarged, could fill the memory. Its 32-bit box rounds differently.
        box = (left * width / columns, top * height / rows, right * width / columns, bottom * height / rows)
        return on_planes(pixels, lambda image: image.resize((self.size[1], self.size[0]), kind, box))


def on_planes(pixels: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    """Apply a change of Pillow images to (H, W, C): to 8-bit RGB at once, to float32 channel by channel."""
    if pixels.dtype == np.uint8:
        return np.array(change(Image.fromarray(pixels)))
    planes = (np.ascontiguousarray(plane) for plane in np.moveaxis(pixels, 2, 0))
    return np.stack([np.asarray(change(Image.fromarray(plane))) for plane in planes], 2)


def upright_rgb(image: Image.Image) -> np.ndarray:
    """Return the pixels of a Pillow image: uint8 (H, W, 3), rotated upright by EXIF."""
    image.load()
    # Read the orientation after loading: TIFF rotates itself, and PNG may store EXIF after its pixels.
    return rotate(_to_rgb(image), exif_orientation(image))


def exif_orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, 1 to 8; 1 if the EXIF data are damaged."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
        return int(value) if 1 <= int(value) <= 8 else 1
    except Exception:  # damaged EXIF raises every kind of error
        return 1


def rotate(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Convert an image of any Pillow mode to (H, W, 3) uint8."""
    mode = image.mode
    if mode == "I" or mode.startswith("I;16"):  # first, because the conversion to RGBA clips them
        # Pillow opens some 16-bit PNG and PPM with mode I, scaled to 65535.
        is_16_bit = mode != "I" or image.format in ("PNG", "PPM")
        return _grey(_to_8_bit(np.asarray(image), (65535,) if is_16_bit else (255, 65535)))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, coloured).convert("RGB"))
    if mode == "RGB":
        return np.asarray(image)
    if mode in ("L", "1"):
        return _grey(np.asarray(image.convert("L")))
    if mode == "F":
        return _grey(_to_8_bit(np.nan_to_num(np.asarray(image), nan=0, posinf=0, neginf=0), (1, 255)))
    return np.asarray(image.convert("RGB"))


def _grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


def _to_8_bit(values: np.ndarray, limits: tuple[int, ...]) -> np.ndarray:
    """Scale grey values from the first range 0..limit that holds them, else from their own range."""
    values = values.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    limit = next((limit for limit in limits if low >= 0 and high <= limit), None)
    low, high = (low, high) if limit is None else (0.0, limit)
    return np.rint((values - low) * (255.0 / max(high - low, 1e-12))).clip(0, 255).astype(np.uint8)


# -- files that hold more than 8-bit RGB: 16 bits, floating point, other numbers of channels


class Stored(NamedTuple):
    """What such a file holds, and a function that reads it."""

    kind: str
    shape: tuple[int, int, int]  # (H, W, C)
    read: Callable[[], np.ndarray]

    def load(self) -> np.ndarray:
        """Return float32 (H, W, C) in memory. NaN and infinity, which mark missing pixels, become 0."""
        return np.nan_to_num(np.array(self.read(), np.float32, order="C"), copy=False, nan=0, posinf=0, neginf=0)


def read_values(path: str | Path) -> np.ndarray:
    """Read the values of a file that holds more than 8-bit RGB: float32 (H, W, C)."""
    with Path(path).open("rb") as stream:
        if (stored := find_stored(stream)) is not None:
            return stored.load()
    raise ValueError(f"{path} holds 8-bit RGB. Give a file with 16-bit or floating-point values.")


def find_stored(stream: IO[bytes]) -> Stored | None:
    """Return what a file holds by its first bytes; None for 8-bit pictures, which Pillow decodes."""
    prefix = stream.read(132)
    stream.seek(0)
    if prefix.startswith(b"\x93NUMPY"):
        return _find_array(stream)
    if prefix[128:] == b"DICM":
        return _find_dicom(stream)
    if prefix[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return _find_tiff(stream)
    try:
        return _find_grey(Image.open(stream, formats=("PNG", "PPM", "JPEG2000")))
    except Exception:  # another format, or damaged: decoding it as a picture says why
        return None


def _find_grey(image: Image.Image) -> Stored | None:
    """Return the 16-bit, 32-bit or floating point grey values of a Pillow image."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Stored(str(image.format), (image.height, image.width, 1), lambda: np.asarray(image)[:, :, None])
    return None


def _find_array(stream: IO[bytes]) -> Stored:
    formats = np.lib.format
    version = formats.read_magic(stream)
    shape, _, dtype = (formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0)(stream)
    if dtype.kind not in "buif":
        raise ValueError(f"its values are {dtype}, not numbers")
    size, arrange = _arrange(shape)

    def read() -> np.ndarray:
        stream.seek(0)
        return arrange(formats.read_array(stream, allow_pickle=False))

    return Stored("NumPy", size, read)


def _find_dicom(stream: IO[bytes]) -> Stored:
    """Read values after the rescale of the file (Hounsfield units in CT); white is always the largest value."""
    import pydicom
    from pydicom.pixels.processing import apply_rescale
    from pydicom.pixels.utils import pixel_array

    data = pydicom.dcmread(stream)
    if "PixelData" not in data or int(data.get("NumberOfFrames") or 1) > 1:
        raise ValueError("it does not hold one image: write one file per image")
    shape = int(data.Rows), int(data.Columns), int(data.get("SamplesPerPixel", 1))

    def read() -> np.ndarray:
        values = pixel_array(data)
        if data.get("PhotometricInterpretation") == "MONOCHROME1":
            values = (-1 if values.dtype.kind == "i" else 2 ** int(data.BitsStored) - 1) - values.astype(np.int64)
        return apply_rescale(values, data).reshape(shape)

    return Stored("DICOM", shape, read)


# Programs that store the channels of an 8-bit image as pages say so in its description; other pages are documents.
_STACKS = ("ImageJ=", '{"shape":', "<?xml")


def _find_tiff(stream: IO[bytes]) -> Stored | None:
    """Return the channels of a TIFF (samples, planes or pages), or its 16-bit or floating point grey values."""
    try:
        image: Any = TiffImageFile(stream)
    except (OSError, SyntaxError):  # Pillow knows no TIFF with two or five channels
        image = None
    if image is not None and not _has_channels(image):
        return _find_grey(image)
    import tifffile

    stream.seek(0)
    series = tifffile.TiffFile(stream).series[0]
    axis = next((series.axes.index(name) for name in "CS" if name in series.axes), None)
    size, arrange = _arrange(series.shape, axis)
    return Stored("TIFF", size, lambda: arrange(series.asarray()))


def _has_channels(image: Any) -> bool:
    tags = image.tag_v2
    bits, samples = max(tags.get(258, (1,))), tags.get(277, 1)
    if samples > 1:  # extra samples 1 and 2 are transparency, and colours of kind 5 are CMYK
        return bits > 8 or (samples > 3 and not {1, 2} & set(tags.get(338, ())) and tags.get(262) != 5)
    return (bits > 8 or str(tags.get(270, "")).startswith(_STACKS)) and image.n_frames > 1


def _arrange(shape: tuple[int, ...], axis: int | None = None) -> tuple[tuple[int, int, int], Callable[..., np.ndarray]]:
    """Return (H, W, C) and a function that moves the channels last: they are the shorter of the first and last axis."""
    shape, axis = ((*shape, 1), 2) if len(shape) == 2 else (shape, axis)
    if len(shape) != 3:
        raise ValueError(f"its shape is {shape}: write one image of (H, W) or (H, W, channels) per file")
    axis = axis if axis is not None else 0 if shape[0] < shape[2] else 2
    height, width = (side for number, side in enumerate(shape) if number != axis)
    return (height, width, shape[axis]), lambda values: np.moveaxis(values.reshape(shape), axis, 2)
