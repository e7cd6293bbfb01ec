"""What is seen of images before anything is decoded: which are none, and which EXIF turns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.data.splits import hold_out
from frugalvit.errors import UserError
from frugalvit.tasks.dense.image_headers import make_splits
from frugalvit.tasks.detection.coco import CocoData, open_coco
from frugalvit.tasks.segmentation.dataset import SceneData, open_scenes
from helpers.dense_samples import edit, make_coco, make_scenes

KINDS = ["coco", "scenes"]


def made(kind: str, root: Path, **more: Any) -> tuple[Path, Path]:
    """A dataset, and its second training image, the size of which its objects or its mask must have."""
    if kind == "coco":
        return make_coco(root, **more), root / "images" / "train_1.png"
    return make_scenes(root, **more), root / "images" / "train" / "1.png"


def opened(kind: str, data: Path, **more: Any) -> CocoData | SceneData:
    return open_coco(str(data), **more) if kind == "coco" else open_scenes(str(data), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_no_images_are_left_out_or_too_many(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = made(kind, tmp_path / "data", side=40)
    path.write_bytes(b"<html>no image</html>")
    with pytest.raises(
        UserError, match=r"1 of 8 images cannot be read, .*; mend or remove it, or raise --cache.max-bad"
    ) as one:
        opened(kind, data)
    assert str(one.value).count(str(path)) == 1 and "\n" not in str(one.value)
    capsys.readouterr()
    found = opened(kind, data, max_bad=0.2)
    assert len(found.splits["train"]) == 7 and path not in [item.path for item in found.splits["train"]]
    assert capsys.readouterr().err.count(str(path)) == 1
    other = path.with_name(path.name.replace("1", "4"))
    other.write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 8 images cannot be read, the first of them .*; mend or remove them"):
        opened(kind, data, max_bad=0.2)
    for image in path.parent.glob("*train*" if kind == "coco" else "*"):
        image.write_bytes(b"")
    with pytest.raises(UserError, match="None of the 8 images can be read, the first of them"):
        opened(kind, data, max_bad=1.0)


def test_a_mask_that_is_no_image_is_named_once(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "data")
    path = data / "masks" / "train" / "1.png"
    path.write_bytes(b"no mask")
    with pytest.raises(UserError, match=r"1\.png is not a readable mask") as error:
        open_scenes(str(data), max_bad=1.0)
    assert str(error.value).count(str(path)) == 1


def turn(path: Path, orientation: int, size: tuple[int, int] | None = None) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.open(path).copy()
    picture.resize(size or picture.size).save(path, exif=exif)


@pytest.mark.parametrize("kind", KINDS)
def test_exif_is_named_where_it_swaps_the_sides(kind: str, tmp_path: Path) -> None:
    """The objects, or the mask, were made on the picture as it is stored, 40 wide and 24 high."""
    data, path = made(kind, tmp_path / "data", side=40)
    turn(path, 6, (40, 24))
    if kind == "coco":
        edit(data, "train", lambda content: content["images"][1].update(height=24))
        words = r"says that .*train_1.png is 40×24 px, as it is stored, but EXIF turns it to 24×40: remove EXIF"
    else:
        Image.fromarray(np.zeros((24, 40), np.uint8)).save(data / "masks" / "train" / "1.png")
        words = r"1.png is 40×24 px, as its image 1.png is stored, but EXIF turns it to 24×40: remove EXIF"
    with pytest.raises(UserError, match=words) as error:
        opened(kind, data)
    assert "\n" not in str(error.value) and "exiftool" in str(error.value)


@pytest.mark.parametrize("orientation", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_images_that_exif_turns_unseen_are_counted(kind: str, orientation: int, tmp_path: Path) -> None:
    data, path = made(kind, tmp_path / "data", side=40)
    turn(path, orientation)
    told = [note for note in opened(kind, data).notes if "EXIF" in note]
    if orientation == 1:
        assert not told
    else:
        assert len(told) == 1 and f"EXIF turns or mirrors 1 image, such as {path.name}" in told[0]


def test_a_picture_whose_turned_size_fits_needs_no_note(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "data", side=40)
    turn(data / "images" / "train" / "1.png", 6, (40, 24))
    Image.fromarray(np.zeros((40, 24), np.uint8)).save(data / "masks" / "train" / "1.png")
    assert not any("EXIF" in note for note in open_scenes(str(data)).notes)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.5])
def test_an_image_that_train_and_val_both_name_stays_on_one_side(tmp_path: Path, fraction: float) -> None:
    data = make_coco(tmp_path / "data", train=12)
    (data / "instances_val.json").write_bytes((data / "instances_train.json").read_bytes())
    found = open_coco(str(data), "remake", fraction)
    train, val = ({image.path for image in found.splits[split]} for split in ("train", "val"))
    assert len(train | val) == 12 and train and val and not train & val
    assert sum(len(images) for images in found.splits.values()) == 24


def test_a_list_that_names_images_twice_leaks_none_into_val(tmp_path: Path) -> None:
    """Pascal VOC's layout: an image is a line of a list."""
    data = make_scenes(tmp_path / "data", train=12)
    (data / "images" / "train").rename(data / "JPEGImages")
    (data / "masks" / "train").rename(data / "SegmentationClass")
    for path in (data / "JPEGImages").iterdir():
        path.rename(path.with_suffix(".jpg"))
    lists = data / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for fraction in (0.1, 0.2, 0.3, 0.5):
        (lists / "train.txt").write_text("".join(f"{i % 12}\n" for i in range(36)))
        found = open_scenes(str(data), val_fraction=fraction)
        train, val = ({scene.path for scene in found.splits[split]} for split in ("train", "val"))
        assert len(train | val) == 12 and train and val and not train & val
    (lists / "train.txt").write_text("3\n3\n")
    assert list(open_scenes(str(data)).splits) == ["train"], "one image, none of which can be held out"


def test_without_copies_the_hash_of_a_name_alone_decides() -> None:
    items = [SimpleNamespace(path=Path(f"{folder}/{i}.png")) for folder in "ab" for i in range(20)]
    held = hold_out([item.path.name for item in items], None, 0.2, 0)
    found = make_splits({"train": items}, "auto", 0.2, [])
    assert found["val"] == [item for item, out in zip(items, held, strict=True) if out] and len(found["train"]) == 32
