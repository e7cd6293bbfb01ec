"""Images and masks in their layouts; which labels count; every mistake one line."""

from __future__ import annotations

import json
import struct
import zlib
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


def test_labels_become_classes_and_255_counts_nowhere(data: Path) -> None:
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
    assert any("nor does 3: it is called 'void'" in note for note in found.notes)


@pytest.mark.parametrize(
    "names",
    [
        {"2": "disc", "10": "void", "0": "ground", "1": "square"} | {str(n): f"n{n}" for n in range(3, 10)},
        {"disc": 2, "void": 10, "ground": 0, "square": 1} | {f"n{n}": n for n in range(3, 10)},
        ["ground", "square", "disc", *(f"n{n}" for n in range(3, 10)), "void"],
    ],
)
def test_names_in_json_are_placed_by_their_labels(tmp_path: Path, names: object) -> None:
    data = make_scenes(tmp_path / "shapes", border=10)
    (data / "class_names.json").write_text(json.dumps(names))
    found = open_scenes(str(data))
    assert found.classes == ("ground", "square", "disc", *(f"n{n}" for n in range(3, 10)))
    assert found.ignored == 10 and found.table[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("file", "content"), [("classes.txt", "void\nground\nsquare\n"), ("classes.json", '["void", "ground", "square"]')]
)
def test_a_byte_order_mark_belongs_to_no_name(data: Path, file: str, content: str) -> None:
    """Editors on Windows begin files with one."""
    (data / file).write_text(content, encoding="utf-8-sig")
    found = open_scenes(str(data))
    assert found.classes == ("ground", "square") and found.ignored == 0


def test_a_name_for_255_may_stand_apart(data: Path) -> None:
    (data / "classes.json").write_text('{"0": "ground", "1": "square", "2": "disc", "255": "border"}')
    assert open_scenes(str(data)).classes == ("ground", "square", "disc")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("5", "must be a list of names"),
        ('"abc"', "must be a list of names"),
        ("{}", "must be a list of names"),
        ('[["a"], ["b"], ["c"]]', "must be a list of names"),
        ('{"a": 0, "b": "c"}', "must be a list of names"),
        ('{"a": 0, "b": 1, "void": -1}', "must be a list of names"),
        ('{"0": "a", "1": ["b"]}', "must be a list of names"),
        ('{"0": "a", "2": "c"}', "no name for the label 1"),
        ('{"a": 1, "b": 2}', "no name for the label 0"),
        ('{"a": 0, "b": 0}', "two names for one label"),
        ("{", "not readable JSON"),
        (json.dumps([str(n) for n in range(257)]), "names 257 classes"),
    ],
)
def test_names_that_fit_no_labels_are_one_line(data: Path, content: str, words: str) -> None:
    (data / "class_names.json").write_text(content)
    with pytest.raises(UserError, match=words) as error:
        open_scenes(str(data))
    assert "\n" not in str(error.value)


def test_an_ignored_label_in_the_middle_moves_the_others_up(data: Path) -> None:
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


def test_segnets_camvid_folders(tmp_path: Path) -> None:
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
def test_splits_are_called_as_those_of_classifiers(data: Path, word: str) -> None:
    for kind in ("images", "masks"):
        (data / kind / "val").rename(data / kind / word)
    assert list(open_scenes(str(data), split="given").splits) == ["train", "val"]
    for kind in ("images", "masks"):
        (data / kind / "val").mkdir()
    with pytest.raises(UserError, match=f"has both 'val' and '{word}': keep one of them as val"):
        open_scenes(str(data))


def test_masks_of_another_size_are_named(data: Path) -> None:
    path = data / "masks" / "train" / "3.png"
    Image.open(path).resize((20, 30)).save(path)
    with pytest.raises(UserError, match=r"3.png is 20×30 px, its image 3.png 48×48"):
        open_scenes(str(data))


def test_labels_beyond_the_classes_are_named(data: Path) -> None:
    with pytest.raises(UserError, match=r"holds the label 2, but there are 2 classes .*--ignore-index 2"):
        open_scenes(str(data), count=2)


def test_colour_masks_are_refused(data: Path) -> None:
    path = data / "masks" / "train" / "0.png"
    Image.open(path).convert("RGB").save(path)
    with pytest.raises(UserError, match="colour picture"):
        open_scenes(str(data))


def test_jpeg_masks_are_refused(data: Path) -> None:
    path = data / "masks" / "train" / "0.png"
    Image.open(path).save(path.with_suffix(".jpg"), quality=95)
    path.unlink()
    with pytest.raises(UserError, match=r"0\.jpg is a JPEG, which changes values.*Save masks as PNG"):
        open_scenes(str(data))


@pytest.mark.parametrize("given", [{}, {"count": 60}, {"named": True}])
def test_classes_that_no_mask_holds_are_said(data: Path, given: dict[str, Any]) -> None:
    """One stray value makes many classes: it is named with its mask, unless somebody said how many there are."""
    assert not any("in no mask" in note for note in open_scenes(str(data)).notes)
    path = data / "masks" / "train" / "3.png"
    labels = np.array(Image.open(path))
    labels[10, 10] = 50
    Image.fromarray(labels).save(path)
    names = [f"n{number}" for number in range(51)]
    if given.pop("named", False):
        (data / "classes.txt").write_text("\n".join(names))
    found = open_scenes(str(data), **given)
    first = found.classes[3]
    note = next(note for note in found.notes if "in no mask" in note)
    assert note.startswith(f"{len(found.classes) - 4} of {len(found.classes)} classes in no mask: {first}, ")
    stray = f"the highest label is 50, in {path}: --ignore-index 50 if it is a slip"
    assert (stray in note) == (not given and first == "3")
    assert not any("in no mask" in note for note in open_scenes(str(data), ignore=50, count=3).notes)


def test_labels_above_255_are_refused(data: Path) -> None:
    path = data / "masks" / "train" / "0.png"
    Image.fromarray(np.full((48, 48), 300, np.uint16)).save(path)
    with pytest.raises(UserError, match="label 300"):
        open_scenes(str(data))


def test_missing_masks_and_folders_are_named(data: Path) -> None:
    (data / "masks" / "train" / "5.png").unlink()
    with pytest.raises(UserError, match=r"5.png has no mask"):
        open_scenes(str(data))
    for path in (data / "masks" / "train").iterdir():
        path.unlink()
    (data / "masks" / "train").rmdir()
    with pytest.raises(UserError, match="has no masks"):
        open_scenes(str(data))
    with pytest.raises(UserError, match="no layout known"):
        open_scenes(str(data / "images"))
    with pytest.raises(UserError, match="no folder"):
        open_scenes(str(data / "nowhere"))


def test_names_that_recur_are_paired_by_their_folders(tmp_path: Path) -> None:
    """Two films whose pictures are called the same: each has its own masks."""
    data = tmp_path / "films"
    for film, label in (("a", 1), ("b", 2)):
        for kind in ("images", "masks"):
            (data / kind / "train" / film).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8)).save(data / "images" / "train" / film / f"{number}.png")
            mask = np.full((8, 8), label, np.uint8)
            mask[:2] = 0
            Image.fromarray(mask).save(data / "masks" / "train" / film / f"{number}_mask.png")
    for scenes in open_scenes(str(data)).splits.values():
        for scene in scenes:
            assert scene.mask.parent.name == scene.path.parent.name
    (data / "images" / "train" / "0.png").write_bytes((data / "images" / "train" / "a" / "0.png").read_bytes())
    with pytest.raises(UserError, match="may have the mask"):
        open_scenes(str(data))


def test_one_class_is_nothing_to_tell_apart(data: Path) -> None:
    for path in data.glob("masks/*/*.png"):
        Image.fromarray(np.zeros((48, 48), np.uint8)).save(path)
    with pytest.raises(UserError, match="fewer than two classes"):
        open_scenes(str(data))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("label", "instead"), [(0, 1), (1, 0)])
def test_255_is_no_object(data: Path, label: int, instead: int, named: bool) -> None:
    """Masks of black and white, as many tools write them, whether or not a file names the classes."""
    for path in data.glob("masks/*/*.png"):
        Image.fromarray(np.where(np.asarray(Image.open(path)) == 1, 255, label).astype(np.uint8)).save(path)
    if named:
        (data / "classes.txt").write_text("ground\nsquare\n")
    with pytest.raises(
        UserError, match=f"hold only {label} beside 255, and 255 counts nowhere.* as {instead}"
    ) as error:
        open_scenes(str(data))
    assert "\n" not in str(error.value)
    assert named or len(open_scenes(str(data), count=2).classes) == 2  # somebody who says so has them


def test_masks_of_nothing_that_counts(data: Path) -> None:
    for path in data.glob("masks/*/*.png"):
        Image.fromarray(np.full((48, 48), 255, np.uint8)).save(path)
    with pytest.raises(UserError, match=r"hold nothing that counts beside 255.* as 1"):
        open_scenes(str(data))


def grey_png(labels: np.ndarray, bits: int) -> bytes:
    """A grey PNG with so few bits a pixel, which Pillow reads but does not write."""
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
def test_labels_of_few_bits_are_read_as_they_are(tmp_path: Path, bits: int) -> None:
    """Pillow makes 0, 85, 170, 255 of two bits; palettes have indices, which it leaves alone."""
    labels = np.arange(2**bits, dtype=np.uint8).reshape(2, -1)
    (tmp_path / "grey.png").write_bytes(grey_png(labels, bits))
    palette = Image.fromarray(labels, "P")
    palette.putpalette(bytes(range(256)) * 3)
    palette.save(tmp_path / "palette.png", bits=bits)
    for name in ("grey.png", "palette.png"):
        found = read_labels(tmp_path / name)
        assert found.dtype == np.uint8 and np.array_equal(found, labels), name


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
