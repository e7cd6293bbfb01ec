"""``open_data``: folder layouts, notes, selected classes and error messages."""

import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from frugalvit.cli.main import main
from frugalvit.data import check_trainable, image_size, open_data
from frugalvit.data.image_size import median_side
from frugalvit.data.unreadable import UnreadableImage
from frugalvit.data.webdataset.pack import pack
from frugalvit.errors import UserError
from helpers.data_layouts import fill, lock, picture, sizes


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
    assert "val is made from train" in source.notes[0] and "single image" in source.notes[0]
    again = open_data(tmp_path, val_fraction=0.2)
    assert again.splits["val"].names == source.splits["val"].names
    assert again.splits["val"].fingerprint() == source.splits["val"].fingerprint()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert open_data(moved, val_fraction=0.2).splits["val"].keys == source.splits["val"].keys


def test_train_and_test_take_val_from_train(tmp_path: Path) -> None:
    fill(tmp_path, {"train/cat": 10, "train/dog": 10, "test/cat": 2})
    assert sizes(open_data(tmp_path)) == {"train": 18, "val": 2, "test": 2}
    assert sizes(open_data(tmp_path, split="given")) == {"train": 20, "test": 2}


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


def test_unlabelled_layouts(tmp_path: Path) -> None:
    flat = fill(tmp_path / "flat", {".": 5})
    assert sizes(open_data(flat)) == {"train": 5} and open_data(flat).classes is None
    deep = fill(tmp_path / "deep", {"2023/05": 3, "2023/06": 2, "2024/01": 4})
    source = open_data(deep)
    assert sizes(source) == {"train": 9} and "more than one folder deep" in source.notes[0]
    assert f"'frugalvit data pack {deep} PACKED --labels folders'" in source.notes[0] and "CSV" in source.notes[0]
    assert open_data(deep, labels="folders").classes == ("2023", "2024")
    inside = fill(tmp_path / "inside", {"jpg": 3})
    assert "the only folder of images" in open_data(inside).notes[0]
    with pytest.raises(UserError, match=r"has no labels .*pretrain"):
        check_trainable(open_data(inside))
    masks = fill(tmp_path / "masks", {"images/train": 3, "images/val": 1, "masks/train": 3})
    assert sizes(open_data(masks)) == {"train": 3, "val": 1}
    with_splits = fill(tmp_path / "s", {"train": 3, "test": 2})
    assert sizes(open_data(with_splits)) == {"train": 3, "test": 2}


def test_median_side_ignores_unreadable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill(tmp_path, {".": 3})
    (folder / "page.jpg").write_text("<html></html>")
    examples = open_data(folder, split="given").splits["train"]
    side = median_side(examples)
    assert len(examples) == 4 and side == min(Image.open(folder / "000.png").size)
    assert capsys.readouterr().err == ""


def test_loose_images_beside_class_folders(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path / "few", {".": 1, "cat": 4, "dog": 4}))
    assert source.classes == ("cat", "dog") and any("1 loose image beside" in note for note in source.notes)
    source = open_data(fill(tmp_path / "many", {".": 9, "cat": 1, "dog": 1}))
    assert source.classes is None and len(source) == 11


def test_loose_images_on_request(tmp_path: Path) -> None:
    folder = fill(tmp_path, {"train": 2, "train/cat": 4, "train/dog": 4, "test": 3})
    left = open_data(folder, split="given")
    assert not left.loose and sizes(left) == {"train": 8}
    assert any("2 loose images beside the class folders" in note and "left out" in note for note in left.notes)
    kept = open_data(folder, split="given", loose=True)
    assert sizes(kept) == {"train": 8} and {split: len(part) for split, part in kept.loose.items()} == {
        "train": 2,
        "test": 3,
    }
    assert sum("pretrain and embed use them" in note and "--labels ignore" in note for note in kept.notes) == 2
    assert not open_data(folder, loose=True, labels="ignore").loose, "unlabelled images are all in train"
    assert not open_data(folder, loose=True, classes=["cat"]).loose, "--classes selects labelled images"


def test_split_without_class_folders_is_left_out(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, {"train/a": 3, "train/b": 3, "val/a": 1, "test": 4}))
    assert sizes(source) == {"train": 6, "val": 1} and any("without labels: left out" in note for note in source.notes)


def test_tiny_imagenet(tmp_path: Path) -> None:
    fill(tmp_path, {"train/n01/images": 3, "train/n02/images": 3, "val/images": 2, "test/images": 4})
    (tmp_path / "val/val_annotations.txt").write_text("000.png\tn02\t0\t0\n001.png\tn01\t0\t0\n")
    source = open_data(tmp_path)
    assert source.classes == ("n01", "n02") and sizes(source) == {"train": 6, "val": 2}
    assert [name[-7:] for name in source.splits["val"].names] == ["001.png", "000.png"]
    assert any("without labels: left out" in note for note in source.notes)


def test_class_named_train(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, {"car": 3, "plane": 3, "train": 3}), split="given")
    assert source.classes == ("car", "plane", "train") and sizes(source) == {"train": 9}


def test_classes_that_train_lacks(tmp_path: Path) -> None:
    fill(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 1, "val/x": 1, "val/y": 1, "val/z": 1})
    with pytest.raises(UserError, match=rf"{tmp_path}/val has 3 classes .*: x, y, z.*--split remake"):
        open_data(tmp_path)
    source = open_data(tmp_path, split="remake")
    assert source.classes == ("a", "b", "x", "y", "z") and len(source) == 8


def test_empty_folders_and_single_classes_are_errors(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path / "empty", {"train/a": 2, "train/b": 2, "train/void": 0, "val/a": 1}))
    with pytest.raises(UserError, match="'void'"):
        check_trainable(source)
    source = open_data(fill(tmp_path / "one", {"train/a": 2, "val/a": 1}))
    with pytest.raises(UserError, match="only the class 'a'"):
        check_trainable(source)
    (tmp_path / "nothing").mkdir()
    for folder, message in (("nothing", "holds no images"), ("missing", "No folder, file or known")):
        with pytest.raises(UserError, match=message):
            open_data(tmp_path / folder)
    fill(tmp_path / "both", {"train/a": 1, "val/a": 1, "valid/a": 1})
    with pytest.raises(UserError, match="has both 'val' and 'valid'"):
        open_data(tmp_path / "both")


def test_unreadable_folders_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"photos/locked": 2, "photos/open": 2, "shut/locked": 2})
    lock(monkeypatch, "locked")
    assert any(
        f"no permission to read {tmp_path}/photos/locked" in note for note in open_data(tmp_path / "photos").notes
    )
    with pytest.raises(UserError, match=f"no permission to read {tmp_path}/shut/locked"):
        open_data(tmp_path / "shut", labels="folders")


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
    for name in (".DS_Store", "Thumbs.db", "._000.png"):
        (tmp_path / "日本" / name).write_bytes(b"x")
    (tmp_path / "日本" / "notes.txt").write_text("hello")
    (tmp_path / "日本" / "UPPER.PNG").write_bytes((tmp_path / "日本" / "000.png").read_bytes())
    (tmp_path / "日本" / "no_extension").write_bytes((tmp_path / "日本" / "000.png").read_bytes())
    (tmp_path / "日本" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "日本" / "self").symlink_to(tmp_path / "日本", target_is_directory=True)
    (tmp_path / "日本" / "dead.png").symlink_to(tmp_path / "gone.png")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "日本" / "pipe.png")
    source = open_data(tmp_path, split="given")
    train = source.splits["train"]
    assert source.classes == ("schöne Blumen", "日本") and len(train) == 7
    assert any("notes.txt" in note for note in source.notes)
    dead = next(i for i, name in enumerate(train.names) if name.endswith("dead.png"))
    with pytest.raises(UnreadableImage, match="missing"):
        train.read(dead)


def test_many_links_between_folders_are_fast(tmp_path: Path) -> None:
    fill(tmp_path, {f"c{i}": 1 for i in range(12)})
    for i in range(12):
        for j in range(12):
            (tmp_path / f"c{i}" / f"to{j}").symlink_to(tmp_path / f"c{j}", target_is_directory=True)
    began = time.monotonic()
    open_data(tmp_path)
    assert time.monotonic() - began < 5


def test_linked_class_folders_count(tmp_path: Path) -> None:
    fill(tmp_path / "all", {"a": 3, "b": 3})
    for split in ("train", "val"):
        (tmp_path / "d" / split).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "d" / split / name).symlink_to(tmp_path / "all" / name, target_is_directory=True)
    assert sizes(open_data(tmp_path / "d")) == {"train": 6, "val": 6}


def test_select_classes_by_a_file(tmp_path: Path) -> None:
    fill(tmp_path / "in", {f"{split}/n0{i}": 2 for split in ("train", "val") for i in range(5)})
    (tmp_path / "list.txt").write_text("n03 robin\nn01\n")
    source = open_data(tmp_path / "in", classes=tmp_path / "list.txt")
    assert source.classes == ("n01", "n03") and sizes(source) == {"train": 4, "val": 4}
    with pytest.raises(UserError, match=r"lacks 1 of .*--classes: n09"):
        open_data(tmp_path / "in", classes=["n01", "n09"])
    with pytest.raises(UserError, match=r"nolist\.txt"):
        open_data(tmp_path / "in", classes=tmp_path / "nolist.txt")


def test_select_classes_with_spaces(tmp_path: Path) -> None:
    """A full line is a name, or its first word if the dataset has only that."""
    fill(
        tmp_path / "in", {f"{split}/{name}": 2 for split in ("train", "val") for name in ("polar bear", "polar", "n01")}
    )
    fill(tmp_path / "in", {"val/only there": 1})  # an extra class is allowed with --classes
    for name, lines, kept in (
        ("both", "polar bear\n  n01 tench\n", ("n01", "polar bear")),
        ("short", "polar\n", ("polar",)),
    ):
        (tmp_path / f"{name}.txt").write_text(lines)
        for labels in ("auto", "folders"):
            assert open_data(tmp_path / "in", classes=tmp_path / f"{name}.txt", labels=labels).classes == kept
    table = tmp_path / "table.csv"
    rows = [f"in/train/{name}/00{i}.png,{name}" for name in ("polar bear", "polar", "n01") for i in range(2)]
    table.write_text("path,label\n" + "\n".join(rows) + "\n")
    source = open_data(table, classes=tmp_path / "both.txt", split="given")
    assert source.classes == ("n01", "polar bear") and sizes(source) == {"train": 4}
    (tmp_path / "unknown.txt").write_text("brown bear\npolar\n")
    for where in (tmp_path / "in", table):
        with pytest.raises(UserError, match=r"--classes: brown bear\. Did you mean 'polar bear'"):
            open_data(where, classes=tmp_path / "unknown.txt")


def test_repeated_class_in_list_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "in", {f"train/{name}": 2 for name in ("cat", "cow", "polar bear", "polar fox")})
    pack(open_data(tmp_path / "in", split="given"), tmp_path / "shards")
    rows = [f"in/train/{name}/00{i}.png,{name}" for name in ("cat", "cow", "polar bear", "polar fox") for i in range(2)]
    (tmp_path / "table.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    file = tmp_path / "list.txt"
    for lines, message in (
        ("cat\n\ncow\n cat \n", "--classes names 'cat' twice ('cat' and 'cat')"),
        ("cat a pet\ncow\ncat", "--classes names 'cat' twice ('cat a pet' and 'cat')"),
    ):
        file.write_text(lines)
        for place in ("in", "table.csv", "shards"):
            assert main(["data", str(tmp_path / place), "--classes", str(file)]) == 2
            printed = capsys.readouterr().err
            assert message in printed and printed.count("\n") == 1
    file.write_text("polar bear\npolar fox\n\n\n")
    assert open_data(tmp_path / "in", classes=file).classes == ("polar bear", "polar fox")


def test_domainnet(tmp_path: Path) -> None:
    fill(tmp_path, {"clipart/apple": 3, "clipart/bee": 2, "real/apple": 2})
    (tmp_path / "clipart_train.txt").write_text(
        "clipart/apple/000.png 0\nclipart/apple/001.png 0\nclipart/bee/000.png 1\n"
    )
    (tmp_path / "clipart_test.txt").write_text("clipart/apple/002.png 0\nclipart/bee/001.png 1\n")
    for place in (tmp_path / "clipart", tmp_path):
        source = open_data(place, split="given")
        assert source.name == "clipart" and source.classes == ("apple", "bee")
        assert sizes(source) == {"train": 3, "test": 2} and source.splits["test"].labels.tolist() == [0, 1]
    (tmp_path / "real_train.txt").write_text("real/apple/000.png 0\n")
    with pytest.raises(UserError, match="holds 2 domains: clipart, real"):
        open_data(tmp_path)


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
