"""Draw boxes, masks and classes over images."""

import colorsys
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_length
from PIL import Image, ImageDraw, ImageFont

from frugalvit.runs import layout
from frugalvit.tasks.segmentation.metrics import IGNORED
from frugalvit.utils.files import make_folder, write_atomically

_GREY = (90, 90, 90)  # colour of ignored pixels
_SHOWN = 6  # number of the best and of the worst images in a report


def colour(number: int) -> tuple[int, int, int]:
    """Return the colour of a class: hues a golden section apart, in three shades."""
    saturation, value = ((0.85, 0.95), (0.6, 0.8), (0.95, 0.5))[number % 3]
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def colours_of(classes: Sequence[str]) -> dict[str, str]:
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
    picture = _enlarge(canvas.round().clip(0, 255).astype(np.uint8), enlarge)
    factor = picture.width / pixels.shape[1]
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=max(11, round(max(picture.size) / 40)))
    for entry in sorted(objects, key=lambda entry: entry.get("score", 1.0)):
        shade = colour(entry["label"])
        left, top, width, height = (value * factor for value in entry["bbox"])
        right, bottom = min(left + width, picture.width - 1), min(top + height, picture.height - 1)
        left, top = min(left, right), min(top, bottom)
        draw.rectangle((left, top, right, bottom), outline=shade, width=max(1, min(2, round(factor))))
        text = str(classes[entry["label"] - 1]) + (f" {entry['score']:.2f}" if "score" in entry else "")
        corner = (max(0.0, min(left, picture.width - draw.textlength(text, font=font))), top)
        draw.rectangle(draw.textbbox(corner, text, font=font), fill=shade)
        draw.text(corner, text, fill="white" if sum(shade) < 420 else "black", font=font)
    return picture


def _enlarge(pixels: np.ndarray, min_side: int, mode: Image.Resampling = Image.Resampling.BICUBIC) -> Image.Image:
    """Return an image (H, W) or (H, W, 3) whose longer side is at least ``min_side``."""
    factor = max(1.0, min_side / max(pixels.shape[:2]))
    return Image.fromarray(pixels).resize((round(pixels.shape[1] * factor), round(pixels.shape[0] * factor)), mode)


def draw_classes(
    pixels: np.ndarray, labels: np.ndarray | None, strength: float = 0.6, enlarge: int = 480
) -> Image.Image:
    """Colour an image (H, W, 3) by its classes (H, W); ignored pixels are grey. Without classes only enlarge it."""
    image = _enlarge(pixels, enlarge)
    if labels is None:
        return image
    table = np.array([colour(number) for number in range(256)], np.float32)
    table[IGNORED] = _GREY
    classes = np.asarray(_enlarge(labels.astype(np.uint8), enlarge, Image.Resampling.NEAREST))
    mixed = (1 - strength) * np.asarray(image, np.float32) + strength * table[classes]
    return Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))


def with_legend(picture: Image.Image, present: Iterable[int], classes: Sequence[str]) -> Image.Image:
    """Add a legend below the picture with the colours of the classes in it, in columns of equal width."""
    height = max(12, round(picture.width / 70))
    font, line = ImageFont.load_default(size=height), round(1.6 * height)
    named = [("ignored", _GREY) if n == IGNORED else (str(classes[n]), colour(n)) for n in sorted(set(present))]
    width = math.ceil(max((font.getlength(name) for name, _ in named), default=0)) + 2 * line
    columns = max(1, picture.width // width)
    rows = math.ceil(len(named) / columns)
    canvas = Image.new("RGB", (picture.width, picture.height + line * rows), "white")
    canvas.paste(picture, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for number, (name, shade) in enumerate(named):
        top, left, margin = picture.height + number // columns * line, number % columns * width, line // 4
        draw.rectangle((left + margin, top + margin, left + line - margin, top + line - margin), fill=shade)
        draw.text((left + line, top + line / 2), name, fill="black", font=font, anchor="lm")
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


def draw_best_and_worst(
    scores: Iterable[tuple[float, int]], draw: Callable[[float, int], tuple[Image.Image, str]], folder: Path
) -> dict[str, list[dict[str, str]]]:
    """Draw the images of the best and worst (score, index): score, index -> picture, caption. Return the files."""
    ranked, _ = sorted(scores), make_folder(folder / layout.PICTURES)
    shown: dict[str, list[dict[str, str]]] = {"best": [], "worst": []}
    for kind, chosen in (("best", ranked[::-1]), ("worst", ranked)):
        for number, (score, index) in enumerate(chosen[:_SHOWN], 1):
            picture, caption = draw(score, index)
            name = f"{layout.PICTURES}/{kind}_{number}.jpg"
            save_picture(picture, folder / name)
            shown[kind].append({"image": name, "caption": caption})
    return shown
