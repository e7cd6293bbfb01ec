"""Pictures of what was found: boxes, masks and labels drawn over images."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_length
from PIL import Image, ImageDraw, ImageFont

from frugalvit.files import write_atomically
from frugalvit.transfer.scores import IGNORED


def colour(number: int) -> tuple[int, int, int]:
    """A colour for a class: hues a golden section apart in three shades, so that neighbours and near hues differ."""
    saturation, value = ((0.85, 0.95), (0.6, 0.8), (0.95, 0.5))[number % 3]
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


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
    factor = max(1.0, enlarge / max(picture.size))
    picture = picture.resize((round(picture.width * factor), round(picture.height * factor)), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=max(11, round(max(picture.size) / 40)))
    for entry in sorted(objects, key=lambda entry: entry.get("score", 1.0)):
        left, top, width, height = (value * factor for value in entry["bbox"])
        shade = colour(entry["label"])
        draw.rectangle((left, top, left + width, top + height), outline=shade, width=max(1, min(2, round(factor))))
        text = str(classes[entry["label"] - 1]) + (f" {entry['score']:.2f}" if "score" in entry else "")
        box = draw.textbbox((left + 1, top), text, font=font)
        draw.rectangle(box, fill=shade)
        draw.text((left + 1, top), text, fill="white" if sum(shade) < 420 else "black", font=font)
    return picture


def draw_classes(pixels: np.ndarray, labels: np.ndarray, strength: float = 0.6) -> Image.Image:
    """An image (H, W, 3) under the colours of its classes (H, W); what is ignored stays grey."""
    table = np.array([colour(number) for number in range(256)], np.float32)
    table[IGNORED] = 90
    mixed = (1 - strength) * pixels.astype(np.float32) + strength * table[labels]
    return Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))


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
