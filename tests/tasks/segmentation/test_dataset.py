"""Layouts of images and masks, their labels, and one-line errors."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.errors import UserError
from frugalvit.tasks.segmentation.dataset import match_masks, open_scenes, read_labels
from frugalvit.tasks.segmentation.metrics import IGNORED
from helpers.dense_samples import make_scenes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_scenes(tmp_path / "shapes")


def test_labels_become_classes_and_255_is_ignored(data: Path) -> None:
    found = open_scenes(str(data))
    assert found.classes == ("0", "1", "2")
    assert found.table[:3].tolist() == [0, 1, 2] and set(found.table[3:].tolist()) == {IGNORED}
    assert {split: len(scenes) for split, scenes in found.splits.items()} == {"train": 8, "val": 4}


def test_class_names_are_read_and_void_is_ignored(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "shapes", border=3)
    (data / "classes.txt").write_text("ground\nsquare\ndisc\nvoid\n")
    found = open_scenes(str(data))
    assert found.classes == ("ground", "square", "disc")
    assert found.table[3] == IGNORED
    assert any("255 and 3" in note and "'void'" in note for note in found.notes)


@pytest.mark.parametrize(
    "names",
    [
        {"2": "disc", "10": "void", "0": "ground", "1": "square"} | {str(n): f"n{n}" for n in range(3, 10)},
        {"disc": 2, "void": 10, "ground": 0, "square": 1} | {f"n{n}": n for n in range(3, 10)},
        ["ground", "square", "disc", *(f"n{n}" for n in range(3, 10)), "void"],
    ],
)
def test_names_in_json_are_in_the_order_of_labels(tmp_path: Path, names: object) -> None:
    data = make_scenes(tmp_path / "shapes", border=10)
    (data / "class_names.json").write_text(json.dumps(names))
    found = open_scenes(str(data))
    assert found.classes == ("ground", "square", "disc", *(f"n{n}" for n in range(3, 10)))
    assert found.ignored == 10 and found.table[:3].tolist() == [0, 1, 2]


def test_an_ignored_label_shifts_the_others(data: Path) -> None:
    found = open_scenes(str(data), ignore=1)
    assert found.classes == ("0", "2")
    assert found.table[:3].tolist() == [0, IGNORED, 1]


def test_camvid_is_known_by_name(tmp_path: Path) -> None:
    found = open_scenes(str(make_scenes(tmp_path / "CamVid", border=11)))
    assert len(found.classes) == 11 and found.classes[0] == "sky"
    assert found.table[11] == IGNORED


def test_ade20k_starts_at_one(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "ade", border=0)
    (data / "masks").rename(data / "annotations")
    for folder in ("images", "annotations"):
        (data / folder / "train").rename(data / folder / "training")
        (data / folder / "val").rename(data / folder / "validation")
    found = open_scenes(str(data))
    assert found.table[:3].tolist() == [IGNORED, 0, 1]
    assert found.classes == ("1", "2")


def test_voc_reads_lists_and_palettes(tmp_path: Path) -> None:
    made = make_scenes(tmp_path / "made")
    root = tmp_path / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    for split in ("train", "val"):
        names = []
        for path in sorted((made / "images" / split).iterdir()):
            name = f"{split}{path.stem}"
            names.append(name)
            Image.open(path).save(root / "JPEGImages" / f"{name}.jpg")
            mask = Image.open(made / "masks" / split / path.name).convert("P")
            mask.putdata(list(np.asarray(Image.open(made / "masks" / split / path.name)).ravel()))
            mask.save(root / "SegmentationClass" / f"{name}.png")
        (root / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names), encoding="utf-8-sig")
    found = open_scenes(str(root))
    assert len(found.classes) == 21 and found.classes[15] == "person"
    assert {split: len(scenes) for split, scenes in found.splits.items()} == {"train": 8, "val": 4}
    assert set(np.unique(read_labels(found.splits["train"][0].mask))) == {0, 1, 2, 255}


def test_camvid_folders_of_segnet(tmp_path: Path) -> None:
    made = make_scenes(tmp_path / "made", border=11)
    root = tmp_path / "segnet"
    root.mkdir()
    for split in ("train", "val"):
        (made / "images" / split).rename(root / split)
        (made / "masks" / split).rename(root / f"{split}annot")
    assert len(open_scenes(str(root)).classes) == 11


def test_one_folder_of_each_is_split(tmp_path: Path) -> None:
    made = make_scenes(tmp_path / "made")
    root = tmp_path / "plain"
    root.mkdir()
    (made / "images" / "train").rename(root / "images")
    (made / "masks" / "train").rename(root / "masks")
    found = open_scenes(str(root), val_fraction=0.25)
    assert {split: len(scenes) for split, scenes in found.splits.items()} == {"train": 6, "val": 2}


@pytest.mark.parametrize("word", ["valid", "validation", "dev"])
def test_splits_have_the_usual_names(data: Path, word: str) -> None:
    for kind in ("images", "masks"):
        (data / kind / "val").rename(data / kind / word)
    assert list(open_scenes(str(data), split="given").splits) == ["train", "val"]
    for kind in ("images", "masks"):
        (data / kind / "val").mkdir()
    with pytest.raises(UserError, match=f"'val' and '{word}'"):
        open_scenes(str(data))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("label", "instead"), [(0, 1), (1, 0)])
def test_255_is_not_a_class(data: Path, label: int, instead: int, named: bool) -> None:
    """Black and white masks, as many tools write them, with and without a file of class names."""
    for path in data.glob("masks/*/*.png"):
        Image.fromarray(np.where(np.asarray(Image.open(path)) == 1, 255, label).astype(np.uint8)).save(path)
    if named:
        (data / "classes.txt").write_text("ground\nsquare\n")
    with pytest.raises(UserError, match=f"label {label} besides 255.* Write {instead} instead of 255"):
        open_scenes(str(data))
    assert named or len(open_scenes(str(data), count=2).classes) == 2, "--label-count overrides this"


def grey_png(labels: np.ndarray, bits: int) -> bytes:
    """A grey PNG with few bits per pixel, which Pillow reads but does not write."""
    height, width = labels.shape
    digits = (labels[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    rows = np.packbits(digits.reshape(height, -1).astype(np.uint8), axis=1)
    pixels = b"".join(b"\0" + row.tobytes() for row in rows)
    parts = ((b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)), (b"IDAT", zlib.compress(pixels)))
    chunks = [
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in (*parts, (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_labels_of_few_bits_are_not_scaled(tmp_path: Path, bits: int) -> None:
    """Pillow scales two bits to 0, 85, 170, 255, but not the indices of palettes."""
    labels = np.arange(2**bits, dtype=np.uint8).reshape(2, -1)
    (tmp_path / "grey.png").write_bytes(grey_png(labels, bits))
    palette = Image.fromarray(labels, "P")
    palette.putpalette(bytes(range(256)) * 3)
    palette.save(tmp_path / "palette.png", bits=bits)
    for name in ("grey.png", "palette.png"):
        found = read_labels(tmp_path / name)
        assert found.dtype == np.uint8 and np.array_equal(found, labels), name


@pytest.mark.parametrize(
    "content",
    [
        *("5", '"abc"', "{}", '[["a"], ["b"], ["c"]]', '{"a": 0, "b": "c"}', '{"a": 0, "b": 1, "void": -1}', "{"),
        *('{"0": "a", "1": ["b"]}', '{"0": "a", "2": "c"}', '{"a": 1, "b": 2}', '{"a": 0, "b": 0}', '{"a": true}'),
        json.dumps([str(n) for n in range(257)]),
    ],
)
def test_wrong_class_names_are_one_line(data: Path, content: str) -> None:
    (data / "class_names.json").write_text(content)
    with pytest.raises(UserError, match=r"class_names\.json") as error:
        open_scenes(str(data))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "classes"),
    [
        ("classes.txt", "void\nground\nsquare\n", ("ground", "square")),
        ("classes.json", '["void", "ground", "square"]', ("ground", "square")),
        ("classes.json", '{"0": "ground", "1": "square", "2": "disc", "255": "border"}', ("ground", "square", "disc")),
    ],
)
def test_names_with_a_byte_order_mark_or_255(data: Path, file: str, content: str, classes: tuple[str, ...]) -> None:
    (data / file).write_text(content, encoding="utf-8-sig")
    assert open_scenes(str(data)).classes == classes


def change_mask(data: Path, number: int, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    path = data / "masks" / "train" / f"{number}.png"
    Image.fromarray(change(np.array(Image.open(path)))).save(path)
    return path


def as_jpeg(data: Path) -> None:
    path = data / "masks" / "train" / "0.png"
    Image.open(path).save(path.with_suffix(".jpg"), quality=95)
    path.unlink()


MISTAKES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "wrong size": (lambda d: change_mask(d, 3, lambda m: m[:30, :20]), {}, r"3\.png has 20×30 px.*48×48"),
    "too many labels": (lambda d: None, {"count": 2}, r"label 2, .*--label-count 3.*--ignore-index 2"),
    "colour": (lambda d: change_mask(d, 0, lambda m: np.stack([m] * 3, 2)), {}, r"0\.png is a colour image"),
    "jpeg": (as_jpeg, {}, r"0\.jpg is a JPEG"),
    "above 255": (lambda d: change_mask(d, 0, lambda m: m.astype(np.uint16) + 300), {}, "label 5"),
    "no mask": (lambda d: (d / "masks/train/5.png").unlink(), {}, r"No mask for .*5\.png"),
    "no masks": (lambda d: (d / "masks/train").rename(d / "other"), {}, r"there is no folder .*masks/train"),
    "no layout": (lambda d: (d / "masks").rename(d / "other"), {}, "layout"),
    "one class": (lambda d: [change_mask(d, n, lambda m: m * 0) for n in range(8)], {"only": "train"}, "two classes"),
    "only 255": (lambda d: [change_mask(d, n, lambda m: m * 0 + 255) for n in range(8)], {"only": "train"}, "255"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(data: Path, mistake: str) -> None:
    change, options, message = MISTAKES[mistake]
    change(data)
    with pytest.raises(UserError, match=message) as error:
        open_scenes(str(data), **options)
    assert "\n" not in str(error.value)


def test_classes_in_no_mask_are_noted(data: Path) -> None:
    assert not any("in no mask" in note for note in open_scenes(str(data)).notes)

    def add_stray_label(labels: np.ndarray) -> np.ndarray:
        labels[10, 10] = 50
        return labels

    change_mask(data, 3, add_stray_label)
    assert any("47 of 51 classes are in no mask: 3, 4" in note for note in open_scenes(str(data)).notes)
    assert not any("in no mask" in note for note in open_scenes(str(data), ignore=50, count=3).notes)


def touch(root: Path, images: str, masks: str) -> tuple[Path, Path]:
    """Two folders with empty files of these names."""
    for kind, names in (("images", images), ("masks", masks)):
        for name in names.split():
            path = root / kind / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root / "images", root / "masks"


@pytest.mark.parametrize(
    ("images", "masks", "wanted"),
    [
        ("a b", "a b", "a b"),
        ("a b", "a_L b_mask", "a_L b_mask"),
        ("a a_L", "a a_L", "a a_L"),
        ("a a_L", "a_mask a_L_mask", "a_mask a_L_mask"),
        ("x", "x x_mask", "x"),
        ("f/a g/a", "f/a_L g/a_mask", "f/a_L g/a_mask"),
        ("f/a", "f/a_L g/a", "f/a_L"),
        ("f/a g/b", "a b", "a b"),
        ("f/a g/a", "a", "a a"),  # two images of one scene
    ],
)
def test_images_are_matched_with_masks(images: str, masks: str, wanted: str, tmp_path: Path) -> None:
    folders = touch(tmp_path, images, masks)
    paths, expected = (
        [folder / f"{name}.png" for name in names.split()]
        for folder, names in zip(folders, (images, wanted), strict=True)
    )
    assert sorted(match_masks(*folders)) == sorted(zip(paths, expected, strict=True))


@pytest.mark.parametrize(
    ("images", "masks", "message"),
    [
        ("x", "x_L x_mask", r"x\.png .*x_mask\.png and .*x_L\.png"),
        ("a", "f/a g/a", r"a\.png .*f/a\.png and .*g/a\.png"),
        ("a a_L", "a_L", r"No mask for .*a\.png"),
        ("a a_L", "a", r"No mask for .*a_L\.png"),
        ("a b c", "b", r"a\.png and 1 more"),
    ],
)
def test_missing_and_ambiguous_masks(images: str, masks: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        match_masks(*touch(tmp_path, images, masks))
    assert "\n" not in str(error.value)
