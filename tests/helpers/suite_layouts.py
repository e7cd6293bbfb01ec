"""Small datasets in the real on-disk layouts of the suite: coloured squares, one colour a class."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40), (40, 200, 200))


def picture(label: int, number: int, size: int = 24) -> np.ndarray:
    """uint8 (H, W, 3): the colour of a class with noise that differs from image to image."""
    noise = np.random.default_rng(1000 * label + number).normal(0, 30, (size, size, 3))
    return np.clip(np.array(COLOURS[label % len(COLOURS)]) + noise, 0, 255).astype(np.uint8)


def write(path: Path, label: int, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(label, number)).save(path)


def folders(root: Path, splits: dict[str, int], classes: int = 3, suffix: str = "png") -> Path:
    """root/SPLIT/CLASS/*.png; the split "" puts class folders right into root."""
    for index, (split, each) in enumerate(splits.items()):
        for label in range(classes):
            for number in range(each):
                write(root / split / f"class{label}" / f"{number}.{suffix}", label, 100 * index + number)
    return root


def dtd(root: Path) -> None:
    base = root / "dtd" / "dtd"
    for index, split in enumerate(("train", "val", "test")):
        names = [f"{name}/{name}_{index}{i}.jpg" for name in ("banded", "dotted") for i in range(4)]
        (base / "labels").mkdir(parents=True, exist_ok=True)
        (base / "labels" / f"{split}1.txt").write_text("\n".join(names) + "\n")
        for number, name in enumerate(names):
            write(base / "images" / name, int(name.startswith("dotted")), 10 * index + number)


def oxford_pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    for index, split in enumerate(("trainval", "test")):
        lines = []
        for label, name in enumerate(("Abyssinian", "beagle", "great_pyrenees")):
            for i in range(5):
                stem = f"{name}_{index}{i}"
                lines.append(f"{stem} {label + 1} {int(label > 0) + 1} 1")
                write(base / "images" / f"{stem}.jpg", label, 10 * index + i)
        (base / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")


def fgvc_aircraft(root: Path) -> None:
    base = root / "fgvc-aircraft-2013b" / "data"
    variants = ("707-320", "A300B4", "Boeing 717")
    (base / "images").mkdir(parents=True)
    (base / "variants.txt").write_text("\n".join(variants) + "\n")
    for index, split in enumerate(("train", "val", "test")):
        lines = []
        for label, name in enumerate(variants):
            for i in range(4):
                number = f"{index}{label}{i}".rjust(7, "0")
                lines.append(f"{number} {name}")
                write(base / "images" / f"{number}.jpg", label, 10 * index + i)
        (base / f"images_variant_{split}.txt").write_text("\n".join(lines) + "\n")


def gtsrb(root: Path) -> None:
    base = root / "gtsrb"
    rows = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for label in range(3):
        for i in range(6):
            write(base / "GTSRB" / "Training" / f"{label:05d}" / f"00000_{i:05d}.ppm", label, i)
        for i in range(3):
            name = f"{label}{i}".rjust(5, "0") + ".ppm"
            write(base / "GTSRB" / "Final_Test" / "Images" / name, label, 50 + i)
            rows.append(f"{name};24;24;1;1;20;20;{label}")
    (base / "GT-final_test.csv").write_text("\n".join(rows) + "\n")


def food101(root: Path) -> None:
    base = root / "food-101"
    (base / "meta").mkdir(parents=True)
    for index, split in enumerate(("train", "test")):
        lists = {name: [f"{name}/{index}{i}" for i in range(6)] for name in ("apple_pie", "pho")}
        (base / "meta" / f"{split}.json").write_text(json.dumps(lists))
        for label, names in enumerate(lists.values()):
            for i, name in enumerate(names):
                write(base / "images" / f"{name}.jpg", label, 10 * index + i)


def caltech101(root: Path) -> None:
    folders(root / "caltech101" / "101_ObjectCategories", {"": 34}, classes=2, suffix="jpg")


def mnist(root: Path) -> None:
    base = root / "MNIST" / "raw"
    base.mkdir(parents=True)
    for index, (split, each) in enumerate((("train", 3), ("t10k", 2))):
        labels = np.arange(10 * each, dtype=np.uint8) % 10
        noise = np.random.default_rng(index).integers(0, 12, (len(labels), 28, 28))
        images = (noise + 24 * labels[:, None, None]).astype(np.uint8)
        (base / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *images.shape) + images.tobytes())
        (base / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, len(labels)) + labels.tobytes())


def stanford_cars(root: Path) -> None:
    base = root / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    names = np.array(["AM General Hummer", "Acura RL"], dtype=object)
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})
    files = (
        ("cars_train", base / "devkit" / "cars_train_annos.mat"),
        ("cars_test", base / "cars_test_annos_withlabels.mat"),
    )
    for index, (split, path) in enumerate(files):
        entries = np.zeros(10, dtype=[("fname", object), ("class", object)])
        for i in range(10):
            entries[i] = (f"{i:05d}.jpg", i % 2 + 1)
            write(base / split / f"{i:05d}.jpg", i % 2, 20 * index + i)
        savemat(path, {"annotations": entries})


def sun397(root: Path) -> None:
    base = root / "SUN397"
    for label, name in enumerate(("abbey", "apse/indoor")):
        for i in range(8):
            write(base / name[0] / name / f"sun_{label}{i}.jpg", label, i)
    (base / "ClassName.txt").write_text("/a/abbey\n/a/apse/indoor\n")


def voc2007(root: Path) -> None:
    base = root / "VOCdevkit" / "VOC2007"
    lists = base / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for index, (part, count) in enumerate((("train", 10), ("val", 6), ("test", 8))):
        stems = [f"{index}{i:05d}" for i in range(count)]
        (lists / f"{part}.txt").write_text("\n".join(stems) + "\n")
        marks: dict[str, list[str]] = {"bird": [], "boat": [], "cat": []}
        for i, stem in enumerate(stems):
            write(base / "JPEGImages" / f"{stem}.jpg", i % 3, 50 * index + i)
            marks["bird"].append("1" if i % 3 == 0 else "-1")
            marks["boat"].append("1" if i % 3 == 1 else "-1")
            marks["cat"].append("1" if i % 3 != 0 else "0" if i == 0 else "-1")
        for name, column in marks.items():
            lines = [f"{stem} {mark:>2}" for stem, mark in zip(stems, column, strict=True)]
            (lists / f"{name}_{part}.txt").write_text("\n".join(lines) + "\n")


def fer2013(root: Path) -> None:
    lines = ["emotion,pixels,Usage"]
    for usage, each in (("Training", 4), ("PublicTest", 2), ("PrivateTest", 2)):
        for label in range(7):
            for i in range(each):
                noise = np.random.default_rng(10 * label + i).integers(0, 9, 48 * 48)
                lines.append(f"{label},{' '.join(map(str, noise + 30 * label))},{usage}")
    (root / "fer2013").mkdir()
    (root / "fer2013" / "fer2013.csv").write_text("\n".join(lines) + "\n")


def ucf101(root: Path) -> None:
    folders(root / "ucf101", {"train": 5, "test": 2}, suffix="jpg")


def hateful_memes(root: Path) -> None:
    base = root / "hateful_memes"
    for index, (split, count) in enumerate((("train", 20), ("dev", 8))):
        rows = []
        for i in range(count):
            name = f"img/{index}{i:04d}.png"
            write(base / name, i % 2, 50 * index + i)
            rows.append(json.dumps({"id": i, "img": name, "label": i % 2, "text": "words"}))
        (base / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


_WRITERS = (food101, sun397, stanford_cars, fgvc_aircraft, voc2007, dtd, oxford_pets, caltech101, mnist, fer2013)
LAYOUTS: dict[str, Callable[[Path], None]] = {
    writer.__name__: writer for writer in (*_WRITERS, gtsrb, ucf101, hateful_memes)
}
