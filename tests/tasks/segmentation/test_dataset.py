"""Layouts of images and masks, their labels, and one-line errors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.data.formats.masks import match_masks, read_labels
from frugalvit.errors import UserError
from frugalvit.tasks.segmentation.dataset import open_scenes
from frugalvit.tasks.segmentation.metrics import IGNORED
from helpers.dense_samples import as_voc, make_scenes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_scenes(tmp_path / "shapes")


def test_labels_become_classes_and_255_is_ignored(data: Path) -> None:
    found = open_scenes(str(data))
    assert found.classes == ("0", "1", "2")
    assert found.table[:3].tolist() == [0, 1, 2] and set(found.table[3:].tolist()) == {IGNORED}
    assert {split: len(scenes) for split, scenes in found.splits.items()} == {"train": 8, "val": 4}
    assert open_scenes(str(data), ignore=1).table[:3].tolist() == [0, IGNORED, 1], "other labels move up"


def test_class_names_are_read_and_void_is_ignored(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "shapes", border=3)
    (data / "classes.txt").write_text("ground\nsquare\ndisc\nvoid\n", encoding="utf-8-sig")
    found = open_scenes(str(data))
    assert found.classes == ("ground", "square", "disc")
    assert found.table[3] == IGNORED
    assert any("255 and 3" in note and "'void'" in note for note in found.notes)


def test_camvid_is_known_by_name_and_folders(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "CamVid", border=11)
    for root in (data, tmp_path / "segnet"):
        opened = open_scenes(str(root)) if root == data else open_scenes(str(as_segnet(data, root)))
        assert len(opened.classes) == 11 and opened.classes[0] == "sky"
        assert opened.table[11] == IGNORED


def as_segnet(data: Path, root: Path) -> Path:
    root.mkdir()
    for split in ("train", "val"):
        (data / "images" / split).rename(root / split)
        (data / "masks" / split).rename(root / f"{split}annot")
    return root


def test_voc_reads_lists_and_palettes(tmp_path: Path) -> None:
    opened = open_scenes(str(as_voc(make_scenes(tmp_path / "VOC2012"))))
    assert len(opened.classes) == 21 and opened.classes[15] == "person"
    assert {split: len(scenes) for split, scenes in opened.splits.items()} == {"train": 8, "val": 4}
    assert set(np.unique(read_labels(opened.splits["train"][0].truth))) == {0, 1, 2, 255}


def test_one_folder_of_each_is_split(tmp_path: Path) -> None:
    made = make_scenes(tmp_path / "made")
    root = tmp_path / "plain"
    root.mkdir()
    for folder in ("images", "masks"):
        (made / folder / "train").rename(root / folder)
    splits = open_scenes(str(root), val_fraction=0.25).splits
    assert {split: len(scenes) for split, scenes in splits.items()} == {"train": 6, "val": 2}


@pytest.mark.parametrize("word", ["valid", "validation", "dev"])
def test_splits_have_the_usual_names(data: Path, word: str) -> None:
    for folder in ("images", "masks"):
        (data / folder / "val").rename(data / folder / word)
    assert list(open_scenes(str(data), split="given").splits) == ["train", "val"]


def test_ade20k_starts_at_one(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "ade", border=0)
    (data / "masks").rename(data / "annotations")
    for folder in ("images", "annotations"):
        (data / folder / "train").rename(data / folder / "training")
        (data / folder / "val").rename(data / folder / "validation")
    found = open_scenes(str(data))
    assert found.table[:3].tolist() == [IGNORED, 0, 1]
    assert found.classes == ("1", "2")


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
    "too many labels": (lambda d: None, {"count": 2}, r"label 2, .*--ignore-index 2"),
    "colour": (lambda d: change_mask(d, 0, lambda m: np.stack([m] * 3, 2)), {}, r"0\.png is a colour image"),
    "jpeg": (as_jpeg, {}, r"0\.jpg is a JPEG"),
    "above 255": (lambda d: change_mask(d, 0, lambda m: m.astype(np.uint16) + 300), {}, "label 5"),
    "no mask": (lambda d: (d / "masks/train/5.png").unlink(), {}, r"No mask for .*5\.png"),
    "no masks": (lambda d: (d / "masks/train").rename(d / "other"), {}, r"there is no folder .*masks/train"),
    "no layout": (lambda d: (d / "images").rename(d / "other"), {}, "layout"),
    "one class": (lambda d: [change_mask(d, n, lambda m: m * 0) for n in range(8)], {"only": "train"}, "two classes"),
    "0 and 255": (lambda d: [change_mask(d, n, lambda m: m // 255 * 255) for n in range(8)], {"only": "train"}, "255"),
    "too many names": (lambda d: (d / "classes.txt").write_text("\n".join(map(str, range(257)))), {}, r"classes\.txt"),
    "only 255": (lambda d: [change_mask(d, n, lambda m: m * 0 + 255) for n in range(8)], {"only": "train"}, "255"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(data: Path, mistake: str) -> None:
    change, options, message = MISTAKES[mistake]
    change(data)
    with pytest.raises(UserError, match=message) as error:
        open_scenes(str(data), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("images", "masks", "wanted"),
    [
        ("a b", "a b", "a b"),
        ("a b", "a_L b_mask", "a_L b_mask"),
        ("a a_L", "a a_L", "a a_L"),
        ("a a_L", "a_mask a_L_mask", "a_mask a_L_mask"),
        ("x", "x x_mask", "x"),
        ("f/a g/a", "f/a_L g/a_mask", "f/a_L g/a_mask"),
        ("f/a", "g/a", "No mask for .*f/a.png"),
        ("a a_L", "a_L", r"No mask for .*a\.png"),
    ],
)
def test_images_are_matched_with_masks(images: str, masks: str, wanted: str, tmp_path: Path) -> None:
    for folder, names in (("images", images), ("masks", masks)):
        for name in names.split():
            path = tmp_path / folder / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    if "No mask" in wanted:
        with pytest.raises(UserError, match=wanted):
            match_masks(tmp_path / "images", tmp_path / "masks")
        return
    paths = [tmp_path / "images" / f"{name}.png" for name in images.split()]
    expected = [tmp_path / "masks" / f"{name}.png" for name in wanted.split()]
    assert sorted(match_masks(tmp_path / "images", tmp_path / "masks")) == sorted(zip(paths, expected, strict=True))


def numbered_masks(root: Path, counts: Sequence[int]) -> Path:
    """Write masks whose labels number the objects of each image."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for number, count in enumerate(counts):
        mask = np.zeros((16, 16), np.uint8)
        for value in range(1, count + 1):
            mask[2 * value, 2:6] = value
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
        Image.new("RGB", (16, 16), (number, 0, 0)).save(root / "images" / f"{number}.png")
    return root


def test_instances_are_not_classes(tmp_path: Path) -> None:
    """Labels that number objects are a question; the answers are one class, or classes as they are."""
    data = str(numbered_masks(tmp_path / "data", [1, 3, 2, 5, 1, 4]))
    with pytest.raises(UserError, match=r"k is 1 to 5\. Pass --instances true"):
        open_scenes(data, instances="auto")
    one = open_scenes(data, instances=True, split="given")
    assert one.classes == ("background", "object") and one.instances
    assert one.table[[0, 1, 5, 255]].tolist() == [0, 1, 1, 255]
    assert open_scenes(data, instances=False).classes == ("0", "1", "2", "3", "4", "5")
    for number, counts in enumerate(([1, 1, 1, 2, 1, 2], [1, 3, 2])):  # two numbers of labels, or few masks
        assert open_scenes(str(numbered_masks(tmp_path / str(number), counts)), instances="auto").classes
