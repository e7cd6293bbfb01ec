"""open_data reads every layout people use, says what it decided, and explains what is wrong in one line."""

from __future__ import annotations

import importlib.machinery
import json
import os
import pickle
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from frugalvit.data import check_trainable, open_data
from frugalvit.data.decode import BadImage
from frugalvit.errors import UserError


def picture(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (shade % 256, 0, 0)).save(path)
    return path


def fill(root: Path, counts: dict[str, int]) -> Path:
    """``{"train/cat": 3}``: three pictures in that folder."""
    for number, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture(root / folder / f"{i:03d}.png", 16 * number + i)
    return root


def sizes(source) -> dict[str, int]:
    return {split: len(examples) for split, examples in source.splits.items()}


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_splits_on_disk(tmp_path: Path, val: str) -> None:
    fill(tmp_path, {"train/cat": 4, "train/dog": 3, f"{val}/cat": 2, "test/dog": 1})
    source = open_data(tmp_path)
    assert source.classes == ("cat", "dog") and sizes(source) == {"train": 7, "val": 2, "test": 1}
    assert source.splits["train"].labels.tolist() == [0] * 4 + [1] * 3
    assert source.splits["test"].labels.tolist() == [1] and source.notes == [] and source.kind == "class folders"
    assert source.splits["test"].read(0).shape == (6, 8, 3)
    assert source.splits["val"].names[0] == f"{tmp_path}/{val}/cat/000.png"


def test_class_folders_alone_are_split_and_said(tmp_path: Path) -> None:
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


def test_train_and_test_make_val_from_train(tmp_path: Path) -> None:
    fill(tmp_path, {"train/cat": 10, "train/dog": 10, "test/cat": 2})
    assert sizes(open_data(tmp_path)) == {"train": 18, "val": 2, "test": 2}
    assert sizes(open_data(tmp_path, split="given")) == {"train": 20, "test": 2}


def test_val_alone_is_enough_to_look_at(tmp_path: Path) -> None:
    fill(tmp_path, {"val/cat": 2, "val/dog": 1})
    source = open_data(tmp_path)
    assert sizes(source) == {"val": 3} and source.classes == ("cat", "dog")
    with pytest.raises(UserError, match="no training images: found only val"):
        check_trainable(source)


def test_unlabelled_flat_nested_and_inside_one_folder(tmp_path: Path) -> None:
    flat = fill(tmp_path / "flat", {".": 5})
    assert sizes(open_data(flat)) == {"train": 5} and open_data(flat).classes is None
    deep = fill(tmp_path / "deep", {"2023/05": 3, "2023/06": 2, "2024/01": 4})
    source = open_data(deep)
    assert sizes(source) == {"train": 9} and "more than one folder deep" in source.notes[0]
    assert open_data(deep, labels="folders").classes == ("2023", "2024")
    inside = fill(tmp_path / "inside", {"jpg": 3})
    assert "the only folder of images" in open_data(inside).notes[0]
    with pytest.raises(UserError, match=r"has no labels .*pretrain"):
        check_trainable(open_data(inside))
    masks = fill(tmp_path / "masks", {"images/train": 3, "images/val": 1, "masks/train": 3})
    assert sizes(open_data(masks)) == {"train": 3, "val": 1}
    with_splits = fill(tmp_path / "s", {"train": 3, "test": 2})
    assert sizes(open_data(with_splits)) == {"train": 3, "test": 2}


def test_labels_can_be_ignored(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, {"cat": 4, "dog": 4}), labels="ignore")
    assert source.classes is None and sizes(source) == {"train": 8} and source.splits["train"].labels is None


def test_loose_images_beside_class_folders(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path / "few", {".": 1, "cat": 4, "dog": 4}))
    assert source.classes == ("cat", "dog") and any("1 loose images" in note for note in source.notes)
    source = open_data(fill(tmp_path / "many", {".": 9, "cat": 1, "dog": 1}))
    assert source.classes is None and len(source) == 11


def test_a_split_folder_without_class_folders_is_left_out(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, {"train/a": 3, "train/b": 3, "val/a": 1, "test": 4}))
    assert sizes(source) == {"train": 6, "val": 1} and any("without labels: left out" in note for note in source.notes)


def test_tiny_imagenet(tmp_path: Path) -> None:
    fill(tmp_path, {"train/n01/images": 3, "train/n02/images": 3, "val/images": 2, "test/images": 4})
    (tmp_path / "val/val_annotations.txt").write_text("000.png\tn02\t0\t0\n001.png\tn01\t0\t0\n")
    source = open_data(tmp_path)
    assert source.classes == ("n01", "n02") and sizes(source) == {"train": 6, "val": 2}
    assert [name[-7:] for name in source.splits["val"].names] == ["001.png", "000.png"]
    assert any("without labels: left out" in note for note in source.notes)


def test_a_class_of_trains(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path, {"car": 3, "plane": 3, "train": 3}), split="given")
    assert source.classes == ("car", "plane", "train") and sizes(source) == {"train": 9}


def test_classes_that_train_lacks(tmp_path: Path) -> None:
    fill(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 1, "val/x": 1, "val/y": 1, "val/z": 1})
    with pytest.raises(UserError) as caught:
        open_data(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/val has 3 classes that {tmp_path}/train lacks: x, y, z. Move them, or pass --split remake."
    )
    source = open_data(tmp_path, split="remake")
    assert source.classes == ("a", "b", "x", "y", "z") and len(source) == 8


def test_empty_class_one_class_and_nothing(tmp_path: Path) -> None:
    source = open_data(fill(tmp_path / "empty", {"train/a": 2, "train/b": 2, "train/void": 0, "val/a": 1}))
    with pytest.raises(UserError, match="no training image: 'void'"):
        check_trainable(source)
    source = open_data(fill(tmp_path / "one", {"train/a": 2, "val/a": 1}))
    with pytest.raises(UserError, match="one class only"):
        check_trainable(source)
    (tmp_path / "nothing").mkdir()
    for place, words in ((tmp_path / "nothing", "holds no images"), (tmp_path / "missing", "no folder, file or known")):
        with pytest.raises(UserError, match=words):
            open_data(place)
    fill(tmp_path / "both", {"train/a": 1, "val/a": 1, "valid/a": 1})
    with pytest.raises(UserError, match="has both 'val' and 'valid'"):
        open_data(tmp_path / "both")


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
    with pytest.raises(BadImage, match="missing"):
        train.read(dead)


def test_links_between_many_folders_end_soon(tmp_path: Path) -> None:
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


def test_imagenet_100_by_a_list(tmp_path: Path) -> None:
    fill(tmp_path / "in", {f"{split}/n0{i}": 2 for split in ("train", "val") for i in range(5)})
    (tmp_path / "list.txt").write_text("n03 robin\nn01\n")
    source = open_data(tmp_path / "in", classes=tmp_path / "list.txt")
    assert source.classes == ("n01", "n03") and sizes(source) == {"train": 4, "val": 4}
    with pytest.raises(UserError, match="lacks 1 of the classes asked for: n09"):
        open_data(tmp_path / "in", classes=["n01", "n09"])
    with pytest.raises(UserError, match="cannot be read as a list"):
        open_data(tmp_path / "in", classes=tmp_path / "nolist.txt")


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


def test_examples_travel_between_processes(tmp_path: Path) -> None:
    train = open_data(fill(tmp_path, {"a": 3, "b": 3}), split="given").splits["train"]
    copy = pickle.loads(pickle.dumps(train))
    assert copy.names == train.names and copy.fingerprint() == train.fingerprint()
    mask = np.array([True, False, False, False, False, True])
    assert train.subset(mask).labels.tolist() == [0, 1]
    picture(tmp_path / "a" / "000.png", 77)
    os.utime(tmp_path / "a" / "000.png", ns=(1, 1))
    assert train.fingerprint() != copy.subset([0]).fingerprint()


def test_ten_thousand_files_at_once(tmp_path: Path) -> None:
    for folder in range(50):
        (tmp_path / f"c{folder:02d}").mkdir()
        for i in range(200):
            (tmp_path / f"c{folder:02d}" / f"{i}.jpg").touch()
    began = time.monotonic()
    source = open_data(tmp_path)
    assert len(source) == 10_000 and time.monotonic() - began < 5  # 0.1 s on an idle machine


def test_real_flowers(data_root: Path) -> None:
    source = open_data(data_root / "flowers102")
    assert sizes(source) == {"train": 1020, "val": 1020, "test": 6149} and len(source.classes) == 102
    assert sizes(open_data(data_root / "flowers102", split="train+val")) == {"train": 2040, "test": 6149}


# ---- tables ---------------------------------------------------------------------------------------------------------


def write_csv(root: Path, text: str, name: str = "t.csv") -> Path:
    path = root / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_tsv_and_jsonl_say_the_same(tmp_path: Path) -> None:
    fill(tmp_path, {"my images": 4})
    rows = [("my images/000.png", "cat", "train"), ("my images/001.png", "dog", "train")]
    rows += [("my images/002.png", "dog", "valid"), ("my images/003.png", "cat", "test")]
    tables = [
        write_csv(tmp_path, "Path,Label,Split\n" + "\n".join(map(",".join, rows))),
        write_csv(tmp_path, "\ufefffilename;class;split\r\n" + "\r\n".join(map(";".join, rows)), "semicolon.csv"),
        write_csv(tmp_path, "image\ttarget\tsplit\n" + "\n".join(map("\t".join, rows)), "t.tsv"),
        write_csv(tmp_path, "\n".join(map(",".join, rows)), "bare.csv"),
        write_csv(
            tmp_path, "\n".join(json.dumps({"file": a, "label": b, "split": c}) for a, b, c in rows) + "\n", "t.jsonl"
        ),
    ]
    for table in tables:
        source = open_data(table)
        assert source.classes == ("cat", "dog") and sizes(source) == {"train": 2, "val": 1, "test": 1}, table
        assert source.splits["val"].labels.tolist() == [1] and source.splits["val"].read(0)[0, 0, 0] == 2


def test_numbers_sort_by_value_and_lists_work(tmp_path: Path) -> None:
    fill(tmp_path, {".": 4})
    table = write_csv(tmp_path, "000.png 10\n001.png 2\n# comment\n002.png 1\n003.png 10\n", "list.txt")
    source = open_data(table, split="given")
    assert source.classes == ("1", "2", "10") and source.splits["train"].labels.tolist() == [2, 1, 0, 2]


def test_missing_files_are_counted_and_read_as_bad(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    source = open_data(write_csv(tmp_path, "path,label\n000.png,a\n001.png,b\ngone.png,b\n"), split="given")
    assert "1 of the 3 files" in source.notes[0] and "gone.png" in source.notes[0]
    with pytest.raises(BadImage, match="missing"):
        source.splits["train"].read(2)
    with pytest.raises(UserError, match="None of the 1 files"):
        open_data(write_csv(tmp_path, "path,label\nx.png,a\n"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no images"),
        ("path,label\n", "names no images"),
        ("a,b\n1,2\n", "no column of paths: it has a, b"),
        ("path,label\n000.png\n", "line 2: 1 cells"),
        ("path,label\n000.png,\n001.png,x\n", "line 2: no label"),
        ("path,label\n,x\n", "line 2: the path is empty"),
        ("path,label,split\n000.png,x,holdout\n", "split 'holdout' is none of"),
        ("path,label\n000.png,x\n000.png,y\n", "two labels, 'x' .line 2. and 'y' .line 3."),
        ("path,label,split\n000.png,x,train\n001.png,y,val\n", "1 class that train lacks: y"),
    ],
)
def test_mistakes_in_tables_name_their_line(tmp_path: Path, text: str, words: str) -> None:
    fill(tmp_path, {".": 2})
    with pytest.raises(UserError, match=words):
        open_data(write_csv(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "an object was expected"),
        ('{"x": 1}', "no path"),
        ('{"path": "a", "label": []}', "a word"),
    ],
)
def test_mistakes_in_jsonl(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_data(write_csv(tmp_path, line, "t.jsonl"))


def test_tables_without_labels_and_other_files(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    source = open_data(write_csv(tmp_path, "path\n000.png\n001.png\n000.png\n"))
    assert source.classes is None and len(source) == 2 and "1 repeated rows" in source.notes[0]
    (tmp_path / "x.zip").write_bytes(b"PK")
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    for name, words in (("x.zip", "unpack it"), ("000.png", "single file"), ("x.csv", "not UTF-8")):
        with pytest.raises(UserError, match=words):
            open_data(tmp_path / name)


@settings(max_examples=60)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".txt"])
def test_fuzzed_tables(tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    for prefix in (b"", b"path,label\n", b'{"path": "'):
        path.write_bytes(prefix + content)
        try:
            open_data(path)
        except UserError as error:
            message = str(error)
        else:
            message = "fine"
        assert message


@settings(max_examples=60)
@given(st.text(max_size=300))
def test_fuzzed_names(where: str) -> None:
    try:
        open_data("/nowhere/" + where)
    except UserError as error:
        assert str(error)  # noqa: PT017


# ---- named datasets -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRUGALVIT_DATASETS", str(tmp_path))
    return tmp_path


def lay_food101(root: Path) -> None:
    fill(root / "food-101" / "images", {"pie": 3, "soup": 3})
    (root / "food-101" / "meta").mkdir()
    for split, numbers in (("train", (0, 1)), ("test", (2,))):
        listed = {name: [f"{name}/{i:03d}" for i in numbers] for name in ("soup", "pie")}
        (root / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(listed))
    for path in (root / "food-101").rglob("*.png"):
        path.rename(path.with_suffix(".jpg"))


def lay_dtd(root: Path) -> None:
    fill(root / "dtd" / "dtd" / "images", {"dotted": 3, "banded": 3})
    (root / "dtd" / "dtd" / "labels").mkdir()
    for i, split in enumerate(("train", "val", "test")):
        (root / "dtd/dtd/labels" / f"{split}1.txt").write_text(f"dotted/{i:03d}.png\nbanded/{i:03d}.png\n")


def lay_gtsrb(root: Path) -> None:
    for label in ("00000", "00001"):
        picture(root / "gtsrb/GTSRB/Training" / label / "0.ppm")
    picture(root / "gtsrb/GTSRB/Final_Test/Images/00.ppm")
    (root / "gtsrb/GT-final_test.csv").write_text("Filename;Width;ClassId\n00.ppm;8;1\n")


def lay_pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    for stem in ("Beagle_1", "Beagle_2", "abyssinian_1"):
        picture(base / "images" / f"{stem}.jpg")
    (base / "annotations").mkdir()
    (base / "annotations/trainval.txt").write_text("Beagle_1 2 2 1\nabyssinian_1 1 1 1\n")
    (base / "annotations/test.txt").write_text("Beagle_2 2 2 1\nabyssinian_1 1 1 1\n")


def lay_ucf101(root: Path) -> None:
    fill(root / "ucf101", {"train/jump": 2, "train/run": 2, "test/run": 1})


def lay_hateful_memes(root: Path) -> None:
    fill(root / "hateful_memes", {"img": 3})
    rows = [json.dumps({"id": i, "img": f"img/{i:03d}.png", "label": i % 2, "text": "x"}) for i in range(3)]
    (root / "hateful_memes/train.jsonl").write_text("\n".join(rows[:2]))
    (root / "hateful_memes/dev.jsonl").write_text(rows[2])


def lay_fer2013(root: Path) -> None:
    (root / "fer2013").mkdir()
    pixels = " ".join(["7"] * 48 * 48)
    usages = ("Training", "Training", "PublicTest", "PrivateTest")
    lines = [f"{i},{pixels},{usage}" for i, usage in enumerate(usages)]
    (root / "fer2013/fer2013.csv").write_text("emotion,pixels,Usage\n" + "\n".join(lines))


def lay_country211(root: Path) -> None:
    fill(root / "country211", {f"{split}/{code}": 2 for split in ("train", "valid", "test") for code in ("AD", "AE")})


def lay_caltech101(root: Path) -> None:
    fill(root / "caltech101/101_ObjectCategories", {"ant": 33, "BACKGROUND_Google": 31})


def lay_sun397(root: Path) -> None:
    (root / "SUN397").mkdir()
    (root / "SUN397/ClassName.txt").write_text("/a/abbey\n/b/bar/indoor\n")
    for folder in ("a/abbey", "b/bar/indoor"):
        for i in range(4):
            picture(root / "SUN397" / folder / f"sun_{i}.jpg")
    (root / "SUN397/Training_01.txt").write_text("/a/abbey/sun_0.jpg\n/b/bar/indoor/sun_1.jpg\n")
    (root / "SUN397/Testing_01.txt").write_text("/a/abbey/sun_3.jpg\n")


LAYOUTS: dict[str, tuple[Callable[[Path], None], dict[str, int], tuple[str, ...]]] = {
    "food101": (lay_food101, {"train": 4, "test": 2}, ("pie", "soup")),
    "dtd": (lay_dtd, {"train": 2, "val": 2, "test": 2}, ("banded", "dotted")),
    "gtsrb": (lay_gtsrb, {"train": 2, "test": 1}, ("0", "1")),
    "oxford_pets": (lay_pets, {"train": 2, "test": 2}, ("Abyssinian", "Beagle")),
    "ucf101": (lay_ucf101, {"train": 4, "test": 1}, ("jump", "run")),
    "hateful_memes": (lay_hateful_memes, {"train": 2, "test": 1}, ("0", "1")),
    "fer2013": (lay_fer2013, {"train": 2, "val": 1, "test": 1}, ()),
    "country211": (lay_country211, {"train": 4, "val": 4, "test": 4}, ("AD", "AE")),
    "caltech101": (lay_caltech101, {"train": 60, "test": 4}, ("BACKGROUND_Google", "ant")),
    "sun397": (lay_sun397, {"train": 2, "test": 1}, ("abbey", "bar/indoor")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_named_datasets_that_are_in_place(home: Path, name: str) -> None:
    lay, expected, classes = LAYOUTS[name]
    lay(home)
    source = open_data(name, split="given")
    assert sizes(source) == expected and (not classes or source.classes == classes)
    assert list(source.classes) == sorted(source.classes)
    for examples in source.splits.values():
        assert examples.read(0).ndim == 3 and examples.labels.max() < len(source.classes)
    assert sizes(open_data(f"{name}:{home}", split="given")) == expected


def test_labels_follow_the_sorted_names(home: Path) -> None:
    lay_food101(home)
    train = open_data("food101", split="given").splits["train"]
    assert all(("pie", "soup")[label] in name for name, label in zip(train.names, train.labels, strict=True))


def test_sun397_without_lists_says_so(home: Path) -> None:
    lay_sun397(home)
    (home / "SUN397/Training_01.txt").unlink()
    source = open_data("sun397", split="given")
    assert sizes(source) == {"train": 4, "test": 4} and "half of every class" in source.notes[0]


def test_voc_has_several_labels_per_image(home: Path) -> None:
    main = home / "VOCdevkit/VOC2007/ImageSets/Main"
    main.mkdir(parents=True)
    for part, stems in (("trainval", ("1", "2")), ("test", ("3",))):
        (main / f"{part}.txt").write_text("\n".join(stems))
        for label, marks in (("cat", " 1"), ("bird", " 0"), ("cow", "-1")):
            (main / f"{label}_{part}.txt").write_text("\n".join(f"{stem} {marks}" for stem in stems))
        for stem in stems:
            picture(home / "VOCdevkit/VOC2007/JPEGImages" / f"{stem}.jpg")
    source = open_data("voc2007", split="given")
    assert source.classes == ("bird", "cat", "cow") and source.splits["train"].labels is None
    assert source.splits["train"].targets.tolist() == [[-1, 1, 0]] * 2
    with pytest.raises(UserError, match="several labels per image"):
        check_trainable(source)


def test_arrays_from_torchvision(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR and its like are checked by their hash, so a stand-in takes torchvision's place."""
    from torchvision import datasets

    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)

    class Fake:
        classes = ("zebra", "ant")

        def __init__(self, root: str, split: str) -> None:
            self.data, self.labels = pixels, np.array([0, 1] * 3)

    monkeypatch.setattr(datasets, "SVHN", Fake)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (home / name).touch()
    source = open_data("svhn", split="given")
    assert source.classes == ("ant", "zebra") and source.splits["train"].labels.tolist() == [1, 0] * 3
    np.testing.assert_array_equal(source.splits["test"].read(2), pixels[2].transpose(1, 2, 0))


def test_patch_camelyon_stays_on_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for h5py, which is needed for this dataset alone."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)

    class File(dict):
        def __init__(self, path: object) -> None:
            super().__init__(x=pixels, y=np.arange(5).reshape(5, 1, 1, 1) % 2)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    module = types.ModuleType("h5py")
    module.File = File
    module.__spec__ = importlib.machinery.ModuleSpec("h5py", None)
    monkeypatch.setitem(sys.modules, "h5py", module)
    (home / "pcam").mkdir()
    for split in ("train", "valid", "test"):
        for what in "xy":
            (home / "pcam" / f"camelyonpatch_level_2_split_{split}_{what}.h5").touch()
    source = open_data("pcam", split="given")
    part = source.splits["train"].subset([4, 1])
    assert sizes(source) == {"train": 5, "val": 5, "test": 5} and part.labels.tolist() == [0, 1]
    np.testing.assert_array_equal(part.read(0), pixels[4])
    assert len(part) == 2 and part.fingerprint() != source.splits["train"].fingerprint()


def test_downloads_are_whole_or_absent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    def good(root: str, download: bool = False, **arguments: object) -> object:
        if download and not (Path(root) / "eurosat").exists():
            fill(Path(root) / "eurosat/2750", {"Forest": 10, "River": 10})
        return datasets.ImageFolder(str(Path(root) / "eurosat/2750"))

    def broken(root: str, download: bool = False, **arguments: object) -> object:
        fill(Path(root) / "eurosat/2750", {"Forest": 1})
        raise RuntimeError("<urlopen error no route to host>")

    monkeypatch.setattr(datasets, "EuroSAT", broken)
    with pytest.raises(UserError, match=r"cannot be downloaded .*no route.*eurosat/2750"):
        open_data("eurosat")
    assert not (home / "eurosat").exists()
    monkeypatch.setattr(datasets, "EuroSAT", good)
    assert sizes(open_data("eurosat")) == {"train": 18, "val": 2} and (home / "eurosat/2750/Forest").is_dir()


def test_status_of_every_dataset(home: Path) -> None:
    from frugalvit.data import dataset_status, list_datasets

    infos = list_datasets()
    assert sum(info.suite for info in infos) == 18
    assert {info.status for info in infos} == {"downloadable", "by hand"}
    assert all(info.instruction for info in infos)
    lay_dtd(home)
    assert dataset_status("dtd").state == "present"
    assert [info.name for info in list_datasets("mnist")] == ["mnist", "fashion_mnist", "kmnist"]
    assert [info.name for info in list_datasets("cifar*0")] == ["cifar10", "cifar100"]
    with pytest.raises(UserError, match=r"Stanford Cars is not in .* put cars_train/"):
        open_data("stanford_cars")
    with pytest.raises(UserError, match="Did you mean 'cifar100'"):
        open_data("cifar-100")


def test_damaged_named_dataset(home: Path) -> None:
    lay_dtd(home)
    (home / "dtd/dtd/labels/val1.txt").unlink()
    with pytest.raises(UserError, match=r"Describable Textures in .* cannot be read"):
        open_data("dtd")


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def hub_dataset(count: int, names: list[str] | None = None):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (5, 4), (i, 0, 0)) for i in range(count)]
    labels = [i % 2 for i in range(count)]
    features = {
        "img": datasets.Image(),
        "label": datasets.ClassLabel(names=names) if names else datasets.Value("int64"),
    }
    return datasets.Dataset.from_dict({"img": images, "label": labels}, features=datasets.Features(features))


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_saved_datasets(tmp_path: Path, prefix: str) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": hub_dataset(6, ["zoo", "ant"]), "validation": hub_dataset(2, ["zoo", "ant"])}
    datasets.DatasetDict({**parts, "extra": hub_dataset(1, ["zoo", "ant"])}).save_to_disk(tmp_path / "d")
    source = open_data(f"{prefix}{tmp_path / 'd'}")
    assert source.classes == ("ant", "zoo") and sizes(source) == {"train": 6, "val": 2} and "extra" in source.notes[0]
    train = source.splits["train"]
    assert (
        train.labels.tolist() == [1, 0] * 3 and train.read(3)[0, 0, 0] == 3 and train.subset([5]).read(0)[0, 0, 0] == 5
    )
    assert pickle.loads(pickle.dumps(train)).read(2)[0, 0, 0] == 2
    assert train.header(0).format == "PNG" and train.stored_size(0) == len(train.raw(0))


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    hub_dataset(4).to_parquet(tmp_path / "d.parquet")
    source = open_data(tmp_path / "d.parquet", split="given")
    assert source.classes == ("0", "1") and source.splits["train"].read(1)[0, 0, 0] == 1
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match="cannot be read as a dataset"):
        open_data(tmp_path / "bad.parquet")


def test_hub_offline_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'x/y' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="cannot be reached and is not in the local cache"):
        open_data("hf:x/y")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'frugalvit\[streams\]'"):
        open_data("hf:x/y")
