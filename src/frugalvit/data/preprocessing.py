"""Turn any image into the input of a network: the same pixels in training's evaluation and everywhere else.

This file needs only NumPy and Pillow. ``frugalvit export`` copies it beside the model:

    config = json.load(open("FOLDER/config.json"))
    images = preprocess("photo.jpg", config)             # float32 (1, C, h, w), for ONNX
    images = transform(read_rgb("photo.jpg"))[None]      # with timm's transform
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x0112
LUMA = (0.2989, 0.587, 0.114)
_WIDEST = 8  # times the area of the crop


def preprocess(path: str | Path, config: dict[str, Any]) -> np.ndarray:
    """Read an image file as the network of this config.json needs it: float32 (1, C, h, w)."""
    settings = config["pretrained_cfg"]
    size, is_squashed = tuple(settings["input_size"][1:]), settings.get("crop_mode") == "squash"
    crop = CenterCrop(size, settings["crop_pct"], settings["interpolation"], is_squashed)
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
        """Convert uint8 (H, W, 3) to (h, w, 3)."""
        height, width = pixels.shape[:2]
        rows, columns = self.resized(height, width)
        if (rows, columns) == (height, width) == self.size:
            return pixels if pixels.flags.writeable else pixels.copy()
        top, left = round((rows - self.size[0]) / 2), round((columns - self.size[1]) / 2)
        bottom, right = top + self.size[0], left + self.size[1]
        image, kind = Image.fromarray(pixels), Image.Resampling[self.interpolation.upper()]
        if rows * columns <= _WIDEST * self.size[0] * self.size[1]:
            return np.array(image.resize((columns, rows), kind).crop((left, top, right, bottom)))
        # Only the crop of a panorama: all of it, enlarged, could fill the memory. Its 32-bit box rounds differently.
        box = (left * width / columns, top * height / rows, right * width / columns, bottom * height / rows)
        return np.array(image.resize((self.size[1], self.size[0]), kind, box))


def upright_rgb(image: Image.Image) -> np.ndarray:
    """Return the pixels of a Pillow image: uint8 (H, W, 3), rotated upright by EXIF."""
    image.load()
    # Read the orientation after loading: TIFF rotates itself, and PNG may store EXIF after its pixels.
    return _rotate(_to_rgb(image), exif_orientation(image))


def exif_orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, 1 to 8; 1 if the EXIF data are damaged."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
        return int(value) if 1 <= int(value) <= 8 else 1
    except Exception:  # damaged EXIF raises every kind of error
        return 1


def _rotate(pixels: np.ndarray, orientation: int) -> np.ndarray:
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
    return np.asarray(image.convert("RGB"))


def _grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


def _from_integers(image: Image.Image) -> np.ndarray:
    """Scale 16-bit grey from its full range, a 32-bit TIFF from a range that fits its values."""
    values = np.asarray(image).astype(np.float64)
    # Pillow opens some 16-bit PNG and PPM with mode I, scaled to 65535.
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        if values.min() >= 0 and values.max() <= 255:
            return values.astype(np.uint8)
        if values.min() < 0 or values.max() > 65535:
            return _stretch(values)
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
