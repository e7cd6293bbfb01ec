"""``open_data``: folder layouts, notes, selected classes and error messages."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frugalvit.data import image_size, open_data
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.image_size import median_side
from frugalvit.data.splits import check_trainable
from frugalvit.errors import UserError
from helpers.data_layouts import fill, picture, sizes


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_splits_on_disk(tmp_path: Path, val: str) -> None:
    fill(tmp_path, {"train/cat": 4, "train/dog": 3, f"{val}/cat": 2, "test/dog": 1})
    source = open_data(tmp_path)
    assert source.classes == ("cat", "dog") and sizes(source) == {"train": 7, "val": 2, "test": 1}
    assert source.splits["train"].labels.tolist() == [0] * 4 + [1] * 3
    assert source.splits["test"].labels.tolist() == [1] and source.notes == [] and source.kind == "class folders"
    assert source.splits["test"].read(0).shape == (6, 8, 3)
    assert source.splits["val"].names[0] == f"{tmp_path}/{val}/cat/000.png"


def test_class_folders_get_a_val_split_with_a_note(tmp_path: Path) -> None:
    fill(tmp_path, {"cat": 20, "dog": 10, "one of a kind": 1})
    source = open_data(tmp_path, val_fraction=0.2)
    assert sizes(source) == {"train": 25, "val": 6}
    assert np.bincount(source.splits["val"].labels, minlength=3).tolist() == [4, 2, 0]
    assert "val is made from train" in source.notes[0]
    again = open_data(tmp_path, val_fraction=0.2)
    assert again.splits["val"].names == source.splits["val"].names
    fingerprint = source.splits["val"].fingerprint()
    assert again.splits["val"].fingerprint() == fingerprint
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    moved_val = open_data(moved, val_fraction=0.2).splits["val"]
    assert moved_val.keys == source.splits["val"].keys and moved_val.fingerprint() == fingerprint


def test_val_alone_opens_but_cannot_train(tmp_path: Path) -> None:
    fill(tmp_path, {"val/cat": 2, "val/dog": 1})
    source = open_data(tmp_path)
    assert sizes(source) == {"val": 3} and source.classes == ("cat", "dog")
    with pytest.raises(UserError, match="no training images, only val"):
        check_trainable(source)


def test_undecodable_folder_names_become_valid_class_names(tmp_path: Path) -> None:
    first, second = (os.fsdecode(name) for name in (b"caf\xe8", b"caf\xe9"))
    try:
        fill(tmp_path, {"cat": 3, first: 2, second: 1})
    except OSError:
        pytest.skip("this file system has only names in an encoding")
    source = open_data(tmp_path, split="given")
    assert source.classes == (r"caf\udce8", r"caf\udce9", "cat")
    assert np.bincount(source.splits["train"].labels).tolist() == [2, 1, 3]
    for name in (second, r"caf\udce9"):
        chosen = open_data(tmp_path, split="given", classes=["cat", name])
        assert chosen.classes == (r"caf\udce9", "cat") and sizes(chosen) == {"train": 4}


@pytest.mark.parametrize(
    ("counts", "expected", "note"),
    [
        ({".": 5}, {"train": 5}, ""),
        ({"2023/05": 3, "2023/06": 2, "2024/01": 4}, {"train": 9}, "more than one folder deep"),
        ({"jpg": 3}, {"train": 3}, "the only folder of images"),
        (
            {"images/train": 3, "images/val": 1, "masks/train": 3},
            {"train": 3, "val": 1},
            "; masks beside it holds masks.",
        ),
        ({"train": 3, "test": 2}, {"train": 3, "test": 2}, ""),
        ({".": 9, "cat": 1, "dog": 1}, {"train": 11}, "9 loose images"),
    ],
    ids=["flat", "deep", "inside", "masks", "splits", "loose"],
)
def test_unlabelled_layouts(counts: dict[str, int], expected: dict[str, int], note: str, tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, counts))
    assert source.classes is None and sizes(source) == expected and note in "".join(source.notes)
    with pytest.raises(UserError, match=r"has no labels.*pretrain"):
        check_trainable(source)


def test_labels_folders_takes_top_folders_as_classes(tmp_path: Path) -> None:
    fill(tmp_path, {"2023/05": 3, "2023/06": 2, "2024/01": 4})
    assert open_data(tmp_path, labels="folders").classes == ("2023", "2024")


def test_loose_images_on_request(tmp_path: Path) -> None:
    folder = fill(tmp_path, {"train": 2, "train/cat": 4, "train/dog": 4, "test": 3})
    left = open_data(folder, split="given")
    assert not left.loose and sizes(left) == {"train": 8}
    assert any("2 unlabelled images beside the class folders: left out" in note for note in left.notes)
    with_loose = open_data(folder, split="given", loose=True)
    assert sizes(with_loose) == {"train": 8}
    assert {split: len(part) for split, part in with_loose.loose.items()} == {"train": 2, "test": 3}
    assert not open_data(folder, loose=True, labels="ignore").loose, "unlabelled images are all in train"
    assert not open_data(folder, loose=True, classes=["cat"]).loose, "--classes selects labelled images"


def test_tiny_imagenet(tmp_path: Path) -> None:
    fill(tmp_path, {"train/n01/images": 3, "train/n02/images": 3, "val/images": 2, "test/images": 4})
    (tmp_path / "val/val_annotations.txt").write_text("000.png\tn02\t0\t0\n001.png\tn01\t0\t0\n")
    source = open_data(tmp_path)
    assert source.classes == ("n01", "n02") and sizes(source) == {"train": 6, "val": 2}
    assert [name[-7:] for name in source.splits["val"].names] == ["001.png", "000.png"]
    assert any("4 unlabelled images without class folders: left out" in note for note in source.notes)


def test_class_named_train(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, {"car": 3, "plane": 3, "train": 3}), split="given")
    assert source.classes == ("car", "plane", "train") and sizes(source) == {"train": 9}


def test_classes_that_train_lacks(tmp_path: Path) -> None:
    fill(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 1, "val/x": 1, "val/y": 1, "val/z": 1})
    with pytest.raises(UserError, match=rf"{tmp_path}/val has 3 classes .*: x, y, z"):
        open_data(tmp_path)


def test_an_empty_class_folder_is_left_out(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, {"train/a": 2, "train/b": 2, "train/void": 0, "val/a": 1}))
    check_trainable(source)
    assert source.classes == ("a", "b") and any("empty class folder left out: void" in note for note in source.notes)


@pytest.mark.parametrize("names", [("PNGImages", "PedMasks", "_mask"), ("images", "labels", "")])
def test_masks_beside_images_are_not_a_class(names: tuple[str, str, str], tmp_path: Path) -> None:
    images, masks, ending = names
    for number in range(3):
        for folder, mode, end in ((images, "RGB", ""), (masks, "L", ending)):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new(mode, (8, 8)).save(tmp_path / folder / f"{number}{end}.png")
    source = open_data(tmp_path)
    assert source.classes is None and sizes(source) == {"train": 3}


def test_classes_with_equal_names_or_odd_names_stay_classes(tmp_path: Path) -> None:
    """Numbered photographs have the same names in every class; a class may be called labels."""
    assert open_data(fill(tmp_path / "a", {"cat": 3, "dog": 3})).classes == ("cat", "dog")
    assert open_data(fill(tmp_path / "b", {"boxes": 3, "labels": 3})).classes == ("boxes", "labels")
    fill(tmp_path / "c", {"jpg": 3, "docs": 0})
    (tmp_path / "c" / "docs" / "readme.txt").write_text("no image")
    assert "the only folder of images" in open_data(tmp_path / "c").notes[0]


def test_archives_are_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "photos.zip").write_bytes(b"PK")
    for where in (tmp_path, tmp_path / "photos.zip"):
        with pytest.raises(UserError, match="Unpack"):
            open_data(where)


def test_empty_and_ambiguous_folders_are_errors(tmp_path: Path) -> None:
    fill(tmp_path, {"nothing": 0, "both/train/a": 1, "both/val/a": 1, "both/valid/a": 1})
    for folder, message in (
        ("nothing", "holds no images"),
        ("missing", "No folder, file or known"),
        ("x" * 300 + ".tar", "No folder, file or known"),
        ("both", "has both 'val' and 'valid'"),
    ):
        with pytest.raises(UserError, match=message):
            open_data(tmp_path / folder)


def test_folder_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"locked": 2, "open": 2})
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=f"{tmp_path}/locked: Permission denied"):
        open_data(tmp_path)


def test_only_unreadable_images_are_an_error(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_text("<html></html>")
    bad = open_data(tmp_path).splits["train"]
    for measure in (median_side, lambda examples: image_size.probe_images(examples, (32, 32))):
        with pytest.raises(UserError, match=r"None of 2 .*0\.jpg: .*'frugalvit data'"):
            measure(bad)


def test_median_side_with_every_second_image_unreadable(tmp_path: Path) -> None:
    fill(tmp_path, {".": 128})
    for number in range(0, 128, 2):
        (tmp_path / f"{number:03d}.png").write_text("<html></html>")
    assert median_side(open_data(tmp_path).splits["train"]) == 6


def test_litter_links_and_odd_names(tmp_path: Path) -> None:
    fill(tmp_path, {"schöne Blumen": 2, "日本": 2, "__MACOSX": 2, ".git": 1})
    for name in (".DS_Store", "Thumbs.db", "._000.png", "png"):
        (tmp_path / "日本" / name).write_bytes(b"x")
    (tmp_path / "日本" / "notes.txt").write_text("hello")
    (tmp_path / "日本" / "UPPER.PNG").write_bytes((tmp_path / "日本" / "000.png").read_bytes())
    (tmp_path / "日本" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "日本" / "self").symlink_to(tmp_path / "日本", target_is_directory=True)
    (tmp_path / "日本" / "dead.png").symlink_to(tmp_path / "gone.png")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "日本" / "pipe.png")
    source = open_data(tmp_path, split="given")
    train = source.splits["train"]
    assert source.classes == ("schöne Blumen", "日本") and len(train) == 6
    dead = next(i for i, name in enumerate(train.names) if name.endswith("dead.png"))
    with pytest.raises(UnreadableImage, match="missing"):
        train.read(dead)


def test_linked_class_folders_count(tmp_path: Path) -> None:
    fill(tmp_path / "all", {"a": 3, "b": 3})
    for split in ("train", "val"):
        (tmp_path / "d" / split).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "d" / split / name).symlink_to(tmp_path / "all" / name, target_is_directory=True)
    assert sizes(open_data(tmp_path / "d")) == {"train": 6, "val": 6}


def test_select_classes_by_a_file(tmp_path: Path) -> None:
    names = ("n01", "polar", "polar bear")
    fill(tmp_path / "in", {f"{split}/{name}": 2 for split in ("train", "val") for name in names})
    fill(tmp_path / "in", {"val/only there": 1})  # an extra class is allowed with --classes
    table = tmp_path / "table.csv"
    rows = [f"in/train/{name}/00{i}.png,{name}" for name in names for i in range(2)]
    table.write_text("path,label\n" + "\n".join(rows) + "\n")
    file = tmp_path / "list.txt"
    file.write_text("polar bear\n\n  n01 \npolar bear\n")
    source = open_data(tmp_path / "in", classes=file)
    assert source.classes == ("n01", "polar bear") and sizes(source) == {"train": 4, "val": 4}
    assert open_data(tmp_path / "in", classes=file, labels="folders").classes == ("n01", "polar bear")
    assert sizes(open_data(table, classes=file, split="given")) == {"train": 4}
    for where in (tmp_path / "in", table):
        with pytest.raises(UserError, match=r"--classes: polar bea\. Did you mean 'polar bear'"):
            open_data(where, classes=["polar bea", "polar"])
    with pytest.raises(UserError, match=r"nolist\.txt"):
        open_data(tmp_path / "in", classes=tmp_path / "nolist.txt")


def test_datasets_pickle_and_subset(tmp_path: Path) -> None:
    train = open_data(fill(tmp_path, {"a": 3, "b": 3}), split="given").splits["train"]
    copy = pickle.loads(pickle.dumps(train))
    assert copy.names == train.names and copy.fingerprint() == train.fingerprint()
    mask = np.array([True, False, False, False, False, True])
    assert train.subset(mask).labels.tolist() == [0, 1]
    picture(tmp_path / "a" / "000.png", 77)
    os.utime(tmp_path / "a" / "000.png", ns=(1, 1))
    assert train.fingerprint() != copy.subset([0]).fingerprint()


def test_real_flowers(data_root: Path) -> None:
    source = open_data(data_root / "flowers102")
    assert sizes(source) == {"train": 1020, "val": 1020, "test": 6149} and len(source.classes) == 102
    assert sizes(open_data(data_root / "flowers102", split="train+val")) == {"train": 2040, "test": 6149}
