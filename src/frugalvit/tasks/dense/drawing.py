"""Draw boxes, masks and classes over images."""

import colorsys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_length
from PIL import Image, ImageDraw, ImageFont

from frugalvit.tasks.segmentation.metrics import IGNORED
from frugalvit.utils.files import write_atomically

_GREY = (90, 90, 90)
"""Colour of ignored pixels."""


def colour(number: int) -> tuple[int, int, int]:
    """Return the colour of a class: hues a golden section apart, in three shades."""
    saturation, value = ((0.85, 0.95), (0.6, 0.8), (0.95, 0.5))[number % 3]
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def colours_of(classes: Sequence[str]) -> dict[str, str]:
    """Return the colour of every class of a segmenter as #rrggbb."""
    return {name: "#{:02x}{:02x}{:02x}".format(*colour(number)) for number, name in enumerate(classes)}


def draw_objects(
    pixels: np.ndarray, objects: Sequence[dict[str, Any]], classes: Sequence[str], enlarge: int = 480
) -> Image.Image:
    """Draw boxes, names and masks of objects over an image (H, W, 3). ``score`` and ``segmentation`` are optional."""
    canvas = pixels.astype(np.float32)
    for entry in objects:
        if "segmentation" in entry:
            inside = np.asarray(run_length.decode(entry["segmentation"])).astype(bool).reshape(pixels.shape[:2])
            canvas[inside] = 0.55 * canvas[inside] + 0.45 * np.array(colour(entry["label"]), np.float32)
    picture = Image.fromarray(canvas.round().clip(0, 255).astype(np.uint8))
    size, factor = _enlarged(picture.size, enlarge)
    picture = picture.resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=max(11, round(max(picture.size) / 40)))
    by_score = sorted(objects, key=lambda entry: entry.get("score", 1.0))
    boxes = [_corners(entry["bbox"], factor, size) for entry in by_score]
    for entry, box in zip(by_score, boxes, strict=True):
        draw.rectangle(box, outline=colour(entry["label"]), width=max(1, min(2, round(factor))))
    for entry, box in zip(by_score, boxes, strict=True):  # after all boxes, so that no line crosses a name
        shade = colour(entry["label"])
        text = str(classes[entry["label"] - 1]) + (f" {entry['score']:.2f}" if "score" in entry else "")
        corner = place_label(box, draw.textbbox((0, 0), text, font=font), size)
        draw.rectangle(draw.textbbox(corner, text, font=font), fill=shade)
        draw.text(corner, text, fill="white" if sum(shade) < 420 else "black", font=font)
    return picture


def place_label(
    box: tuple[float, float, float, float], text: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[float, float]:
    """Return the position of a name so that it is not cut off: above its box, else below it, else inside.

    text: the corners of the name when drawn at (0, 0)
    """
    left, top, _, bottom = box
    x = max(0.0, min(left + 1, size[0] - 1 - text[2]))
    for y in (top - text[3] - 1, bottom + 1 - text[1]):
        if y + text[1] >= 0 and y + text[3] < size[1]:
            return x, y
    return x, top


def _corners(bbox: Sequence[float], factor: float, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the corners of a box in the enlarged image, clipped so that its lines are visible."""
    left, top, width, height = (value * factor for value in bbox)
    right, bottom = min(left + width, size[0] - 1), min(top + height, size[1] - 1)
    return min(left, right), min(top, bottom), right, bottom


def _enlarged(size: tuple[int, int], min_side: int) -> tuple[tuple[int, int], float]:
    """Return a size whose longer side is at least ``min_side``, and the factor."""
    factor = max(1.0, min_side / max(size))
    return (round(size[0] * factor), round(size[1] * factor)), factor


def draw_classes(
    pixels: np.ndarray, labels: np.ndarray | None, strength: float = 0.6, enlarge: int = 480
) -> Image.Image:
    """Colour an image (H, W, 3) by its classes (H, W); ignored pixels are grey. Without classes only enlarge it."""
    size, _ = _enlarged((pixels.shape[1], pixels.shape[0]), enlarge)
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    if labels is None:
        return image
    table = np.array([colour(number) for number in range(256)], np.float32)
    table[IGNORED] = _GREY
    classes = np.asarray(Image.fromarray(labels.astype(np.uint8)).resize(size, Image.Resampling.NEAREST))
    mixed = (1 - strength) * np.asarray(image, np.float32) + strength * table[classes]
    return Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))


def with_legend(picture: Image.Image, present: Iterable[int], classes: Sequence[str]) -> Image.Image:
    """Add a legend below the picture with the colours of the classes in it."""
    height = max(12, round(picture.width / 70))
    font, line = ImageFont.load_default(size=height), round(1.6 * height)
    named = [("ignored", _GREY) if n == IGNORED else (str(classes[n]), colour(n)) for n in sorted(set(present))]
    corners: list[tuple[int, int]] = []
    x = y = 0
    for name, _ in named:
        width = round(font.getlength(name)) + 2 * line
        if x and x + width > picture.width:
            x, y = 0, y + line
        corners.append((x, y))
        x += width
    canvas = Image.new("RGB", (picture.width, picture.height + y + line), "white")
    canvas.paste(picture, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for (name, shade), (left, top) in zip(named, corners, strict=True):
        corner, side = (left + line // 4, picture.height + top + line // 4), line // 2
        draw.rectangle((*corner, corner[0] + side, corner[1] + side), fill=shade)
        draw.text((left + line, picture.height + top + line / 2), name, fill="black", font=font, anchor="lm")
    return canvas


def side_by_side(pictures: Sequence[Image.Image], gap: int = 6) -> Image.Image:
    height = max(picture.height for picture in pictures)
    canvas = Image.new("RGB", (sum(p.width for p in pictures) + gap * (len(pictures) - 1), height), "white")
    left = 0
    for picture in pictures:
        canvas.paste(picture, (left, 0))
        left += picture.width + gap
    return canvas


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture atomically, as JPEG (.jpg) or else as PNG."""
    kind: dict[str, Any] = {"format": "JPEG", "quality": 88} if path.suffix == ".jpg" else {"format": "PNG"}
    write_atomically(path, lambda handle: picture.save(handle, **kind))
