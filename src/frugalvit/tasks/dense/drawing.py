"""Pictures of what was found: boxes, masks and labels drawn over images."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_length
from PIL import Image, ImageDraw, ImageFont

from frugalvit.tasks.detection.metrics import IGNORED
from frugalvit.utils.files import write_atomically

_GREY = (90, 90, 90)
"""The colour of pixels that count nowhere."""


def colour(number: int) -> tuple[int, int, int]:
    """A colour for a class: hues a golden section apart in three shades, so that neighbours and near hues differ."""
    saturation, value = ((0.85, 0.95), (0.6, 0.8), (0.95, 0.5))[number % 3]
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def colours_of(classes: Sequence[str]) -> dict[str, str]:
    """The colour of every class of a segmenter as #rrggbb."""
    return {name: "#{:02x}{:02x}{:02x}".format(*colour(number)) for number, name in enumerate(classes)}


def draw_objects(
    pixels: np.ndarray, objects: Sequence[dict[str, Any]], classes: Sequence[str], enlarge: int = 480
) -> Image.Image:
    """An image (H, W, 3) with the boxes, names and masks of objects (``score`` and ``segmentation`` where known)."""
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
    surest_last = sorted(objects, key=lambda entry: entry.get("score", 1.0))
    boxes = [_corners(entry["bbox"], factor, size) for entry in surest_last]
    for entry, box in zip(surest_last, boxes, strict=True):
        draw.rectangle(box, outline=colour(entry["label"]), width=max(1, min(2, round(factor))))
    for entry, box in zip(surest_last, boxes, strict=True):  # after all boxes: no line runs through a name
        shade = colour(entry["label"])
        text = str(classes[entry["label"] - 1]) + (f" {entry['score']:.2f}" if "score" in entry else "")
        place = label_place(box, draw.textbbox((0, 0), text, font=font), size)
        draw.rectangle(draw.textbbox(place, text, font=font), fill=shade)
        draw.text(place, text, fill="white" if sum(shade) < 420 else "black", font=font)
    return picture


def label_place(
    box: tuple[float, float, float, float], text: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[float, float]:
    """Where a name is written so that it is whole: above its box, else below it, else inside; left of the edge.

    text: the corners of the name written at (0, 0), which begin a little below and to the right of it
    """
    left, top, _, bottom = box
    x = max(0.0, min(left + 1, size[0] - 1 - text[2]))
    for y in (top - text[3] - 1, bottom + 1 - text[1]):
        if y + text[1] >= 0 and y + text[3] < size[1]:
            return x, y
    return x, top


def _corners(bbox: Sequence[float], factor: float, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """A box in the enlarged picture, its lines within it."""
    left, top, width, height = (value * factor for value in bbox)
    right, bottom = min(left + width, size[0] - 1), min(top + height, size[1] - 1)
    return min(left, right), min(top, bottom), right, bottom


def _enlarged(size: tuple[int, int], least: int) -> tuple[tuple[int, int], float]:
    """The size of a picture whose longer side is at least so long, and the factor."""
    factor = max(1.0, least / max(size))
    return (round(size[0] * factor), round(size[1] * factor)), factor


def draw_classes(
    pixels: np.ndarray, labels: np.ndarray | None, strength: float = 0.6, enlarge: int = 480
) -> Image.Image:
    """An image (H, W, 3) under the colours of its classes (H, W); what is ignored is grey. Without classes: itself."""
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
    """The picture over a strip that names the colours of the classes that are in it, in as many lines as it takes."""
    height = max(12, round(picture.width / 70))
    font, line = ImageFont.load_default(size=height), round(1.6 * height)
    named = [("counts nowhere", _GREY) if n == IGNORED else (str(classes[n]), colour(n)) for n in sorted(set(present))]
    places: list[tuple[int, int]] = []
    x = y = 0
    for name, _ in named:
        width = round(font.getlength(name)) + 2 * line
        if x and x + width > picture.width:
            x, y = 0, y + line
        places.append((x, y))
        x += width
    whole = Image.new("RGB", (picture.width, picture.height + y + line), "white")
    whole.paste(picture, (0, 0))
    draw = ImageDraw.Draw(whole)
    for (name, shade), (left, top) in zip(named, places, strict=True):
        corner, side = (left + line // 4, picture.height + top + line // 4), line // 2
        draw.rectangle((*corner, corner[0] + side, corner[1] + side), fill=shade)
        draw.text((left + line, picture.height + top + line / 2), name, fill="black", font=font, anchor="lm")
    return whole


def side_by_side(pictures: Sequence[Image.Image], gap: int = 6) -> Image.Image:
    height = max(picture.height for picture in pictures)
    whole = Image.new("RGB", (sum(p.width for p in pictures) + gap * (len(pictures) - 1), height), "white")
    left = 0
    for picture in pictures:
        whole.paste(picture, (left, 0))
        left += picture.width + gap
    return whole


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture atomically: JPEG for looking at, PNG where every value counts."""
    kind: dict[str, Any] = {"format": "JPEG", "quality": 88} if path.suffix == ".jpg" else {"format": "PNG"}
    write_atomically(path, lambda handle: picture.save(handle, **kind))
