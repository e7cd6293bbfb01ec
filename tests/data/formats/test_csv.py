"""Tables of paths and labels: splits, classes, notes and error messages."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from frugalvit.data import open_data
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.formats.csv import LABEL_COLUMNS, PATH_COLUMNS, SPLIT_COLUMNS, class_list
from frugalvit.data.splits import check_trainable
from frugalvit.errors import UserError
from frugalvit.probing.splits import open_labelled
from helpers.data_layouts import fill, sizes


def write_csv(root: Path, text: str, name: str = "t.csv") -> Path:
    path = root / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_tsv_and_jsonl_are_equivalent(tmp_path: Path) -> None:
    fill(tmp_path, {"my images": 4})
    rows = [("my images/000.png", "cat", "train"), ("my images/001.png", "dog", "train")]
    rows += [("my images/002.png", "dog", "valid"), ("my images/003.png", "cat", "test")]
    tables = [
        write_csv(tmp_path, "Path,Label,Split\n" + "\n".join(map(",".join, rows))),
        write_csv(tmp_path, "\ufeff\r\nfilename;class;split\r\n" + "\r\n".join(map(";".join, rows)), "semicolon.csv"),
        write_csv(tmp_path, "image\ttarget\tsplit\n" + "\n".join(map("\t".join, rows)), "t.tsv"),
        write_csv(
            tmp_path, "\n".join(json.dumps({"file": a, "label": b, "split": c}) for a, b, c in rows) + "\n", "t.jsonl"
        ),
    ]
    for table in tables:
        source = open_data(table)
        assert source.classes == ("cat", "dog") and sizes(source) == {"train": 2, "val": 1, "test": 1}, table
        assert source.splits["val"].labels.tolist() == [1] and source.splits["val"].read(0)[0, 0, 0] == 2


def test_integer_labels_sort_by_value(tmp_path: Path) -> None:
    fill(tmp_path, {".": 4})
    table = write_csv(tmp_path, "000.png 10\n001.png 2\n# comment\n002.png 1\n003.png 10\n", "list.txt")
    source = open_data(table, split="given")
    assert source.classes == ("1", "2", "10") and source.splits["train"].labels.tolist() == [2, 1, 0, 2]


def test_missing_files_are_noted_and_unreadable(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    source = open_data(write_csv(tmp_path, "path,label\n000.png,a\n001.png,b\ngone.png,b\n"), split="given")
    assert "1 of its 3 files" in source.notes[0] and "gone.png" in source.notes[0]
    with pytest.raises(UnreadableImage, match="missing"):
        source.splits["train"].read(2)
    with pytest.raises(UserError, match="none of its 1 files"):
        open_data(write_csv(tmp_path, "path,label\nx.png,a\n"))


@pytest.mark.parametrize("text", ["path,label\n000.png\n001.png,dog", "path,label\n000.png,\n001.png,x\n"])
def test_rows_without_a_label_are_unlabelled(tmp_path: Path, text: str) -> None:
    fill(tmp_path, {".": 2})
    (tmp_path / "table.csv").write_text(text, encoding="utf-8")
    source = open_data(tmp_path / "table.csv", loose=True)
    assert sizes(source) == {"train": 1} and [Path(name).name for name in source.loose["train"].names] == ["000.png"]
    assert "1 unlabelled image in train" in " ".join(source.notes)
    assert "left out" in " ".join(open_data(tmp_path / "table.csv").notes)


@pytest.mark.parametrize("text", ["000.png,\n001.png,x\n000.png,y\n", "000.png,y\n001.png,x\n./000.png,\n"])
def test_a_label_replaces_an_empty_one(tmp_path: Path, text: str) -> None:
    """The rows of 'embed --select' can be appended to the table that they come from."""
    fill(tmp_path, {".": 2})
    source = open_data(write_csv(tmp_path, f"path,label\n{text}"), split="given", loose=True)
    labels = dict(
        zip([Path(name).name for name in source.splits["train"].names], source.splits["train"].labels, strict=True)
    )
    assert labels == {"000.png": 1, "001.png": 0} and not source.loose


def test_a_missing_table_is_named_without_its_columns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no table .*plants\.csv \(for"):
        open_data(f"{tmp_path}/plants.csv:path=photo,label=species")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no images"),
        ("path,label\n", "names no images"),
        ("a,b\n1,2\n", "line 2: no path in the columns a, b"),
        ("path,label\n000.png,cat, big\n001.png,dog\n", "line 2: .* got 3.*','"),
        ("path;label\n000.png;cat; big\n", "line 2: .* got 3.*';'"),
        ("path,label\n,x\n", "line 2: no path"),
        ("path,label,split\n000.png,x,holdout\n", "line 2: unknown split 'holdout'"),
        ("path,label\n000.png,x\n./000.png,y\n", "two labels, 'x' .line 2. and 'y' .line 3."),
        ("path,label,split\n000.png,x,train\n000.png,y,val\n", "two labels, 'x' .line 2. and 'y' .line 3."),
        ("path,label,split\n000.png,x,train\n001.png,y,val\n", "1 class that train lacks: y"),
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"x": 1}', "no path"),
        ('{"path": "000.png", "label": []}', "lists of labels are empty"),
        ('{"path": "a", "label": {"x": 1}}', "expected a text"),
        ('{"path": "a", "label": ["x", ""]}', "expected a text"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    fill(tmp_path, {".": 2})
    with pytest.raises(UserError, match=message):
        open_data(write_csv(tmp_path, text, "t.jsonl" if text.startswith(("{", "[")) else "t.csv"))


def test_several_labels_and_numbers(tmp_path: Path) -> None:
    """Lists are labels; a|b is one class unless --target labels splits it. An empty list is not a missing label."""
    fill(tmp_path, {".": 4})
    lists = ['["cat", "dog", "cat"]', '"dog"', "[]", "null"]
    lines = [f'{{"path": "{i:03d}.png", "label": {label}}}' for i, label in enumerate(lists)]
    cells = "path,label\n000.png,cat | dog\n001.png,dog\n002.png,|\n003.png,\n"
    found = [open_data(write_csv(tmp_path, "\n".join(lines), "t.jsonl"), split="given", loose=True)]
    found += [open_data(write_csv(tmp_path, cells), split="given", loose=True, target="labels")]
    for source in found:
        train = source.splits["train"]
        assert source.target == "labels" and source.classes == ("cat", "dog") and train.labels is None
        assert train.targets is not None and train.targets.tolist() == [[1, 1], [0, 1], [0, 0]]
        assert len(source.loose["train"]) == 1
        assert train.subset([1]).targets.tolist() == [[0, 1]]  # type: ignore[union-attr]
        assert train.fingerprint() != train.subset([0, 1, 2]).fingerprint(labels=False)
    source = open_data(write_csv(tmp_path, cells), split="given")
    assert source.classes == ("cat | dog", "dog", "|") and "--target labels" in source.notes[0]
    numbers = write_csv(tmp_path, "path,age\n000.png,1.5\n001.png,-2e1\n002.png,0\n003.png,\n", "n.csv")
    source = open_data(f"{numbers}:label=age", split="given", target="number", loose=True)
    assert source.target == "number" and source.classes == ("age",) and len(source.loose["train"]) == 1
    assert source.splits["train"].targets.tolist() == [[1.5], [-20], [0]]  # type: ignore[union-attr]


@pytest.mark.parametrize(("numbers", "noted"), [(12, True), (3, False)])
def test_a_table_of_numbers_suggests_its_target(tmp_path: Path, numbers: int, noted: bool) -> None:
    fill(tmp_path, {".": 12})
    rows = [f"{image:03d}.png,{image % numbers}.5" for image in range(12)]
    notes = open_data(write_csv(tmp_path, "\n".join(["path,label", *rows]))).notes
    assert any("--target number" in note for note in notes) is noted


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("path,label\n000.png,tall\n", "number", "line 2: --target number"),
        ("path,label\n000.png,nan\n", "number", "line 2: --target number"),
        ('{"path": "000.png", "label": ["a", "b"]}', "class", "one label per image"),
        ("path\n000.png\n", "labels", "--target labels"),
        ("path,label\n000.png,a\n", "many", "choose auto, class, labels or number"),
    ],
)
def test_wrong_target(tmp_path: Path, text: str, target: str, message: str) -> None:
    fill(tmp_path, {".": 1})
    with pytest.raises(UserError, match=message):
        open_data(write_csv(tmp_path, text, "t.jsonl" if text.startswith("{") else "t.csv"), target=target)


def test_quoted_values_and_trailing_empty_cells(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    source = open_data(write_csv(tmp_path, 'path,label\n000.png,"cat, big"\n001.png,dog,,\n'))
    assert source.classes == ("cat, big", "dog")


def test_image_in_two_splits_is_noted(tmp_path: Path) -> None:
    fill(tmp_path, {".": 3})
    rows = ["000.png,a,train", "./000.png,a,train", "001.png,b,train", "./001.png,b,val", "002.png,a,val"]
    source = open_data(write_csv(tmp_path, "\n".join(["path,label,split", *rows])), split="given")
    assert [len(examples) for examples in source.splits.values()] == [2, 2]
    assert any("1 repeated row left out" in note for note in source.notes)
    assert any("1 image in several splits" in note and "001.png" in note for note in source.notes)


def test_repeated_rows_are_left_out(tmp_path: Path) -> None:
    """An empty split means train. Paths may be full or contain ``..``."""
    fill(tmp_path / "photos", {".": 12})
    ways = ["{}", str(tmp_path / "photos" / "{}"), "../photos/{}", "./{}"]
    rows = [
        f"{way.format(f'{i:03d}.png')},{i % 2},{split}" for i in range(12) for way in ways for split in ("", "training")
    ]
    source = open_data(write_csv(tmp_path / "photos", "\n".join(["path,label,split", *rows])), val_fraction=0.3)
    train, val = (set(source.splits[split].keys) for split in ("train", "val"))
    assert sizes(source)["train"] + sizes(source)["val"] == len(train | val) == 12 and not train & val
    assert f"{12 * (2 * len(ways) - 1)} repeated rows left out" in source.notes[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "file,species\n000.png,robin\n001.png,robin\n"),
        ("to_label.csv", "path,label\n000.png,\n001.png,\n"),  # as 'frugalvit embed --select' writes it
        ("t.jsonl", '{"path": "000.png", "label": null}\n'),
    ],
)
def test_unlabelled_tables(tmp_path: Path, name: str, text: str) -> None:
    fill(tmp_path, {".": 2})
    table = write_csv(tmp_path, text, name)
    source = open_data(table)
    assert source.classes is None
    for refuse in (lambda: check_trainable(source), lambda: open_labelled(str(table), None)):
        with pytest.raises(UserError, match="a column called label, class, target, category, class_name, label_name"):
            refuse()


@pytest.mark.parametrize(
    ("name", "content", "message"), [("000.png", b"", "no format"), ("x.csv", b"\xff\xfe\x00", "not UTF-8")]
)
def test_unknown_files_are_errors(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_data(tmp_path / name)


def test_keys_do_not_depend_on_how_the_table_is_addressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"images": 8, "a/.hidden": 8, "a/in": 8, "a2": 8})
    full_paths = [str(tmp_path / folder) for folder in ("a2", "a/in")]
    rows = [f"{folder}/{i:03d}.png,x" for folder in ("../images", ".hidden", *full_paths) for i in range(8)]
    write_csv(tmp_path / "a", "path,label\n" + "\n".join(rows))
    expected = ["../images", ".hidden", full_paths[0], "in"]
    for home, where in [
        (".", "a/t.csv"), ("a", "t.csv"), ("a", "./t.csv"), ("a/in", "../t.csv"), ("a2", "../a/t.csv"),
        ("images", str(tmp_path / "a/t.csv")),
    ]:  # fmt: skip
        monkeypatch.chdir(tmp_path / home)
        keys = open_data(where, split="given").splits["train"].keys
        assert keys == [f"{folder}/{i:03d}.png" for folder in expected for i in range(8)], (home, where)
    odd = ["/nowhere\0/x.png 1", "/a" * 3000 + ".png 1", "in/000.png 1"]
    keys = open_data(write_csv(tmp_path / "a", "\n".join(odd), "odd.txt"), split="given").splits["train"].keys
    assert keys == [row.removesuffix(" 1") for row in odd]


def test_select_classes_of_a_table(tmp_path: Path) -> None:
    fill(tmp_path, {".": 6})
    labels = ["2,train", "10,train", "3,train", "10,val", "2,val", "3,test"]
    rows = [f"{number:03d}.png,{label}" for number, label in enumerate(labels)]
    table = write_csv(tmp_path, "path,label,split\n" + "\n".join(rows))
    source = open_data(table, classes=["10", "2"])
    assert source.classes == ("2", "10") and sizes(source) == {"train": 2, "val": 2}
    assert source.splits["train"].labels.tolist() == [0, 1] and source.splits["val"].labels.tolist() == [1, 0]
    assert source.splits["val"].read(0)[0, 0, 0] == 3 and "the 2 classes of --classes" in source.notes[0]
    assert "test has no image" in source.notes[1]
    unlabelled = open_data(table, classes=["3"], labels="ignore")
    assert unlabelled.classes is None and sizes(unlabelled) == {"train": 1, "test": 1}
    with pytest.raises(UserError, match=r"lacks 1 of .*--classes: 7"):
        open_data(table, classes=["2", "7"])
    with pytest.raises(UserError, match="has no labels, so --classes"):
        open_data(write_csv(tmp_path, "path\n000.png\n", "bare.csv"), classes=["2"])


@settings(max_examples=60)
@given(st.text(max_size=300))
def test_fuzzed_names(name: str) -> None:
    with pytest.raises(UserError):
        open_data("/nowhere/" + name)


def test_start_page_names_every_column() -> None:
    page = (Path(__file__).parents[3] / "docs" / "start.md").read_text(encoding="utf-8")
    sentence = page.partition("A table (CSV")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == {*PATH_COLUMNS, *LABEL_COLUMNS, *SPLIT_COLUMNS}


def test_other_columns_and_another_folder(tmp_path: Path) -> None:
    """The named columns count, even if another column has a usual name; rows without a label are unlabelled."""
    (tmp_path / "img").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "img" / f"{number}.png")
    table = tmp_path / "birds.csv"
    table.write_text("Photo,label,Species\n0.png,x,wren\n1.png,x,owl\n2.png,x,owl\n3.png,x,\n")
    source = open_data(f"{table}:path=photo,label=species,root={tmp_path / 'img'}", split="given", loose=True)
    assert source.classes == ("owl", "wren") and len(source.splits["train"]) == 3 and len(source.loose["train"]) == 1
    assert Path(source.splits["train"].names[0]).is_file()
    with pytest.raises(UserError, match=r"no column 'species2' for the label\. It has: photo, label, species"):
        open_data(f"{table}:path=photo,label=species2")


def test_a_record_may_lack_a_named_column(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    (tmp_path / "t.jsonl").write_text('{"file": "000.png"}\n{"file": "001.png", "kind": "owl"}\n')
    source = open_data(f"{tmp_path / 't.jsonl'}:label=kind", split="given", loose=True)
    assert (len(source.splits["train"]), len(source.loose["train"])) == (1, 1)


@pytest.mark.parametrize("between", [" ", "\t", ",", ", ", ";"])
def test_lists_separate_path_and_label(between: str, tmp_path: Path) -> None:
    fill(tmp_path / "my, photos", {".": 4})
    lines = [f"my, photos/{i:03d}.png{between}{i % 2}" for i in range(4)]
    (tmp_path / "t.txt").write_text("\n".join(lines))
    source = open_data(tmp_path / "t.txt", split="given")
    assert source.classes == ("0", "1") and all(Path(name).is_file() for name in source.splits["train"].names)


def test_two_labels_do_not_matter_where_labels_are_ignored(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    (tmp_path / "t.csv").write_text("path,label\n000.png,--1\n000.png,2\n001.png,2\n")
    assert len(open_data(tmp_path / "t.csv", labels="ignore").splits["train"]) == 2
    assert class_list(["--1", "2", "10"]) == ["--1", "10", "2"]
