"""Make small datasets: bright rectangles and discs on noise, with COCO annotations or masks."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {"square": (230, 40, 40), "disc": (40, 90, 240)}
CATEGORIES = [{"id": 3, "name": "square"}, {"id": 17, "name": "disc"}]  # ids with gaps


def draw(random: np.random.Generator, side: int) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
    """Return a noisy image with one square and one disc, and their masks."""
    pixels = random.integers(60, 120, (side, side, 3), dtype=np.uint8)
    shapes = []
    for half, kind in enumerate(COLOURS):
        size = int(random.integers(side // 4, side // 3))
        top = int(random.integers(2, side - size - 2))
        left = int(random.integers(1, side // 2 - size - 1)) + half * side // 2
        rows, columns = np.mgrid[:side, :side]
        inside = (rows >= top) & (rows < top + size) & (columns >= left) & (columns < left + size)
        if kind == "disc":
            middle = (top + (size - 1) / 2, left + (size - 1) / 2)
            inside = (rows - middle[0]) ** 2 + (columns - middle[1]) ** 2 <= (size / 2) ** 2
        pixels[inside] = COLOURS[kind]
        shapes.append((kind, inside))
    return pixels, shapes


def annotation(identity: int, image: int, kind: str, inside: np.ndarray, polygons: bool) -> dict[str, Any]:
    rows, columns = np.nonzero(inside)
    top, left, bottom, right = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
    if polygons:  # the outline of the box
        segmentation: Any = [[float(v) for v in (left, top, right, top, right, bottom, left, bottom)]]
    else:
        segmentation = {"size": list(inside.shape), "counts": run_lengths(inside)}
    return {
        "id": identity,
        "image_id": image,
        "category_id": next(c["id"] for c in CATEGORIES if c["name"] == kind),
        "bbox": [float(v) for v in (left, top, right - left, bottom - top)],
        "area": float(inside.sum()),
        "iscrowd": 0,
        "segmentation": segmentation,
    }


def run_lengths(inside: np.ndarray) -> list[int]:
    """COCO's uncompressed run lengths: down the columns, zeros first."""
    flat = inside.T.ravel().astype(int)
    counts, value, run = [], 0, 0
    for pixel in flat:
        if pixel != value:
            counts.append(run)
            value, run = pixel, 0
        run += 1
    return [*counts, run]


def make_coco(root: Path, train: int = 8, val: int = 4, side: int = 64, seed: int = 0) -> Path:
    """Make a COCO folder; every other square is a polygon, the rest are run lengths."""
    random = np.random.default_rng(seed)
    (root / "images").mkdir(parents=True)
    identity = 0
    for split, count in (("train", train), ("val", val)):
        images, annotations = [], []
        for number in range(count):
            name = f"{split}_{number}.png"
            pixels, shapes = draw(random, side)
            Image.fromarray(pixels).save(root / "images" / name)
            image = 100 * (split == "val") + 7 * number + 5
            images.append({"id": image, "file_name": name, "height": side, "width": side})
            for kind, inside in shapes:
                identity += 1
                polygons = kind == "square" and number % 2 == 0
                annotations.append(annotation(identity, image, kind, inside, polygons))
        write(root, split, images, annotations)
    return root


def write(
    root: Path, split: str, images: list[Any], annotations: list[Any], categories: list[Any] | None = None
) -> None:
    content = {"images": images, "annotations": annotations, "categories": categories or CATEGORIES}
    (root / f"instances_{split}.json").write_text(json.dumps(content))


def edit(root: Path, split: str, change: Any) -> None:
    """Apply ``change`` to the content of a split's JSON file."""
    path = root / f"instances_{split}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def resize(path: Path, shape: tuple[int, int]) -> None:
    """Resize the image in a file to (height, width)."""
    with Image.open(path) as picture:
        resized = picture.resize((shape[1], shape[0]))
    resized.save(path)


def make_scenes(root: Path, train: int = 8, val: int = 4, side: int = 48, seed: int = 0, border: int = 255) -> Path:
    """Make images and masks: 0 ground, 1 square, 2 disc, and a frame of the label ``border``."""
    random = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        (root / "images" / split).mkdir(parents=True)
        (root / "masks" / split).mkdir(parents=True)
        for number in range(count):
            pixels, shapes = draw(random, side)
            labels = np.zeros((side, side), np.uint8)
            for label, (_, inside) in enumerate(shapes, 1):
                labels[inside] = label
            labels[:2] = labels[-2:] = border
            Image.fromarray(pixels).save(root / "images" / split / f"{number}.png")
            Image.fromarray(labels).save(root / "masks" / split / f"{number}.png")
    return root


def as_official_coco(root: Path) -> Path:
    """Rename the files of ``make_coco`` to COCO's own layout: train2017/, val2017/, annotations/."""
    (root / "annotations").mkdir()
    for split in ("train", "val"):
        (root / f"{split}2017").mkdir()
        for path in [*(root / "images").glob(f"{split}_*")]:
            path.rename(root / f"{split}2017" / path.name)
        (root / f"instances_{split}.json").rename(root / "annotations" / f"instances_{split}2017.json")
    (root / "images").rmdir()
    return root


def as_voc(root: Path) -> Path:
    """Move the files of ``make_scenes`` to the layout of Pascal VOC, with palette masks."""
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / name).mkdir(parents=True)
    for split in ("train", "val"):
        names = sorted(path.stem for path in (root / "images" / split).iterdir())
        for name in names:
            with Image.open(root / "images" / split / f"{name}.png") as picture:
                picture.save(root / "JPEGImages" / f"{split}{name}.jpg")
            with Image.open(root / "masks" / split / f"{name}.png") as mask:
                palette = mask.convert("P")
                palette.putdata(list(np.asarray(mask).ravel()))
            palette.save(root / "SegmentationClass" / f"{split}{name}.png")
        listing = root / "ImageSets" / "Segmentation" / f"{split}.txt"
        listing.write_text("\n".join(f"{split}{name}" for name in names), encoding="utf-8-sig")
    shutil.rmtree(root / "images")
    shutil.rmtree(root / "masks")
    return root
