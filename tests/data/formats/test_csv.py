"""Tables of paths and labels: splits, classes, notes and error messages."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit.data import open_data
from frugalvit.data.formats.csv import LABEL_COLUMNS, PATH_COLUMNS, SPLIT_COLUMNS
from frugalvit.data.splits import check_trainable
from frugalvit.data.unreadable import UnreadableImage
from frugalvit.errors import UserError
from frugalvit.probing.splits import open_labelled
from helpers.data_layouts import fill, picture, sizes


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


@pytest.mark.parametrize("first", ["000.png,cat,", "000.png,cat,train", "000.png,cat,,"])
def test_table_without_header(first: str, tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    found = open_data(write_csv(tmp_path, f"{first}\n001.png,cat,val\n"), split="given").splits
    assert {split: len(examples) for split, examples in found.items()} == {"train": 1, "val": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no images"),
        ("path,label\n", "names no images"),
        ("a,b\n1,2\n", "no column of paths, only a, b"),
        ("path,label\n000.png\n", "line 2: expected at least 2 cells, got 1"),
        ("path,label\n000.png,cat, big\n001.png,dog\n", "line 2: .* got 3.* commas"),
        ("path,label,,\n000.png,cat, big\n", "line 2: .* got 3"),
        ("000.png,dog\n001.png,cat, big\n", "line 2: .* got 3"),
        ("path;label\n000.png;cat; big\n", "line 2: .* semicolons"),
        ("path,label\n000.png,\n001.png,x\n", "line 2: no label .1 of 2 rows.*--labels ignore"),
        ("path,label\n000.png,\n001.png,x\n2.png,\n", "lines 2, 4: no label .2 of 3 rows"),
        ("path,label\n,x\n", "line 2: the path is empty"),
        ("path,label,split\n000.png,x,holdout\n", "line 2: unknown split 'holdout'"),
        ("path,label\n000.png,x\n000.png,y\n", "two labels, 'x' .line 2. and 'y' .line 3."),
        ("path,label\n000.png,x\n./000.png,y\n", "two labels, 'x' .line 2. and 'y' .line 3."),
        ("path,label,split\n000.png,x,train\n000.png,y,val\n", "two labels, 'x' .line 2. and 'y' .line 3."),
        ("path,label,split\n000.png,x,train\n001.png,y,val\n", "1 class that train lacks: y"),
    ],
)
def test_errors_in_csv_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    fill(tmp_path, {".": 2})
    with pytest.raises(UserError, match=message):
        open_data(write_csv(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"x": 1}', "no path"),
        ('{"path": "a", "label": []}', "expected one label"),
    ],
)
def test_errors_in_jsonl(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_data(write_csv(tmp_path, line, "t.jsonl"))


def test_quoted_values_and_trailing_empty_cells(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    assert open_data(write_csv(tmp_path, 'path,label\n000.png,"cat, big"\n001.png,dog,,\n')).classes == (
        "cat, big",
        "dog",
    )


@pytest.mark.parametrize(
    ("header", "values", "note"),
    [
        ("path,class,label", "b,a", "labels from 'label'; not used: 'class'"),
        ("path,y,target,category", "b,a,c", "labels from 'target'; not used: 'category' and 'y'"),
    ],
)
def test_second_label_column_is_noted(tmp_path: Path, header: str, values: str, note: str) -> None:
    fill(tmp_path, {".": 1})
    source = open_data(write_csv(tmp_path, f"{header}\n000.png,{values}\n"), split="given")
    assert source.classes == ("a",) and any(note in line for line in source.notes)


def test_image_in_two_splits_is_noted(tmp_path: Path) -> None:
    fill(tmp_path, {".": 3})
    rows = ["000.png,a,train", "./000.png,a,train", "001.png,b,train", "./001.png,b,val", "002.png,a,val"]
    source = open_data(write_csv(tmp_path, "\n".join(["path,label,split", *rows])), split="given")
    assert [len(examples) for examples in source.splits.values()] == [2, 2]
    assert any("1 repeated row left out" in note for note in source.notes)
    assert any("1 image in several splits" in note and "001.png" in note for note in source.notes)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.5])
def test_no_image_is_in_both_train_and_new_val(tmp_path: Path, fraction: float) -> None:
    """An empty split means train. Paths may be full, go through a link, or contain ``..``."""
    fill(tmp_path / "photos", {".": 12})
    (tmp_path / "link").symlink_to(tmp_path / "photos", target_is_directory=True)
    (tmp_path / "photos" / "t.csv").touch()
    ways = ["{}", str(tmp_path / "photos" / "{}"), str(tmp_path / "link" / "{}"), "../photos/{}", "./{}"]
    for splits in (("", "train", "training"), ("",)):
        rows = [f"{way.format(f'{i:03d}.png')},{i % 2},{split}" for i in range(12) for way in ways for split in splits]
        source = open_data(
            write_csv(tmp_path / "photos", "\n".join(["path,label,split", *rows])), val_fraction=fraction
        )
        train, val = (set(source.splits[split].keys) for split in ("train", "val"))
        assert sizes(source)["train"] + sizes(source)["val"] == len(train | val) == 12 and not train & val
        repeated = 12 * (len(ways) * len(splits) - 1)
        assert f"{repeated} repeated rows left out" in source.notes[0]
    full = f"path,label\n000.png,x\n{tmp_path / 'photos' / '000.png'},y\n"
    with pytest.raises(UserError, match=r"two labels, 'x' .line 2. and 'y' .line 3."):
        open_data(write_csv(tmp_path / "photos", full))


def test_remake_keeps_repeated_images_on_one_side(tmp_path: Path) -> None:
    fill(tmp_path, {".": 24})
    rows = [f"{i:03d}.png,{i % 2},{split}" for i in range(24) for split in ("train", "val")]
    table = write_csv(tmp_path, "\n".join(["path,label,split", *rows]))
    for fraction in (0.1, 0.2, 0.3):
        source = open_data(table, split="remake", val_fraction=fraction)
        assert sum(sizes(source).values()) == 48
        assert not set(source.splits["train"].names) & set(source.splits["val"].names)


def test_unlabelled_tables_and_unknown_files(tmp_path: Path) -> None:
    fill(tmp_path, {".": 2})
    source = open_data(write_csv(tmp_path, "path\n000.png\n001.png\n000.png\n"))
    assert source.classes is None and len(source) == 2 and "1 repeated row" in source.notes[1]
    assert "a column called label, class," in source.notes[0]
    (tmp_path / "x.zip").write_bytes(b"PK")
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    for name, message in (("x.zip", "archive"), ("000.png", "no format"), ("x.csv", "not UTF-8")):
        with pytest.raises(UserError, match=message):
            open_data(tmp_path / name)


@pytest.mark.parametrize("text", ["file,species\n000.png,robin\n001.png,robin\n", "file,photo\n000.png,1\n001.png,2\n"])
def test_table_without_label_column_lists_its_columns(tmp_path: Path, text: str) -> None:
    fill(tmp_path, {".": 3})
    table = write_csv(tmp_path, text)
    source = open_data(table)
    columns = text.partition("\n")[0].replace(",", ", ")
    assert source.classes is None and f"only {columns}:" in source.notes[0]
    for refuse in (lambda: check_trainable(source), lambda: open_labelled(str(table), None)):
        with pytest.raises(
            UserError, match="a column called label, class, target, category, class_name, label_name or"
        ):
            refuse()


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_empty_label_column_is_noted(tmp_path: Path, suffix: str) -> None:
    """'frugalvit embed --select' writes such tables."""
    fill(tmp_path, {".": 2})
    text = "path,label\n000.png,\n001.png,\n" if suffix == "csv" else '{"path": "000.png", "label": null}\n'
    source = open_data(write_csv(tmp_path, text, f"to_label.{suffix}"))
    assert source.classes is None
    with pytest.raises(UserError, match="its column 'label' is empty"):
        check_trainable(source)


def test_tables_from_windows(tmp_path: Path) -> None:
    """Backslashes between folders, a byte order mark, and line ends of two characters."""
    fill(tmp_path, {"train/cat": 2, "train/dog": 2})
    rows = [f"train\\{label}\\{i:03d}.png,{label}" for label in ("cat", "dog") for i in range(2)]
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["path,label", *rows, ""]).encode())
    source = open_data(tmp_path / "t.csv", split="given")
    assert source.classes == ("cat", "dog") and source.splits["train"].read(3).shape == (6, 8, 3)
    odd = picture(tmp_path / "odd\\name.png")  # a legal name here
    (tmp_path / "o.csv").write_text("path,label\nodd\\name.png,a\n")
    assert open_data(tmp_path / "o.csv", split="given").splits["train"].names == [str(odd)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_tables(tmp_path: Path, encoding: str) -> None:
    fill(tmp_path, {".": 2})
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "t.tsv").write_bytes((mark + "path\tlabel\r\n000.png\tKäfer\r\n001.png\tx\r\n").encode(encoding))
    assert open_data(tmp_path / "t.tsv", split="given").classes == ("Käfer", "x")


def test_labels_that_mean_missing_are_noted(tmp_path: Path) -> None:
    labels = ["NaN", "null", "None", "N/A", "NA", "nan", "cat", "NA"]
    fill(tmp_path, {".": len(labels)})
    rows = [f"{number:03d}.png,{label}" for number, label in enumerate(labels)]
    source = open_data(write_csv(tmp_path, "\n".join(["path,label", *rows])), split="given")
    assert source.classes == ("N/A", "NA", "NaN", "None", "cat", "nan", "null")
    assert len(source.notes) == 6
    assert any("'NA' (2 rows) counts as a class" in note for note in source.notes)


def test_keys_do_not_depend_on_how_the_table_is_addressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"images": 8, "a/.hidden": 8, "a/in": 8, "a2": 8})
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    in_full = [str(tmp_path / place) for place in ("a2", "a/in", "link/in2")]
    fill(tmp_path / "a", {"in2": 8})
    rows = [f"{place}/{i:03d}.png,x" for place in ("../images", ".hidden", *in_full) for i in range(8)]
    write_csv(tmp_path / "a", "path,label\n" + "\n".join(rows))
    expected = ["../images", ".hidden", in_full[0], "in", "in2"]
    for home, where in [
        (".", "a/t.csv"), ("a", "t.csv"), ("a", "./t.csv"), ("a/in", "../t.csv"), ("a2", "../a/t.csv"),
        ("images", str(tmp_path / "a/t.csv")), (".", "link/t.csv"), ("a2", str(tmp_path / "link/t.csv")),
    ]:  # fmt: skip
        monkeypatch.chdir(tmp_path / home)
        keys = open_data(where, split="given").splits["train"].keys
        assert keys == [f"{place}/{i:03d}.png" for place in expected for i in range(8)], (home, where)
    odd = ["/nowhere\0/x.png 1", "/a" * 3000 + ".png 1", "in/000.png 1"]
    keys = open_data(write_csv(tmp_path / "a", "\n".join(odd), "odd.txt"), split="given").splits["train"].keys
    assert keys == [row.removesuffix(" 1") for row in odd]


def test_select_classes_of_a_table(tmp_path: Path) -> None:
    fill(tmp_path, {".": 6})
    rows = [
        "000.png,2,train",
        "001.png,10,train",
        "002.png,3,train",
        "003.png,10,val",
        "004.png,2,val",
        "005.png,3,test",
    ]
    table = write_csv(tmp_path, "path,label,split\n" + "\n".join(rows))
    (tmp_path / "list.txt").write_text("10 ten\n2\n")
    for classes in (["10", "2"], tmp_path / "list.txt"):
        source = open_data(table, classes=classes)
        assert source.classes == ("2", "10") and sizes(source) == {"train": 2, "val": 2}
        assert source.splits["train"].labels.tolist() == [0, 1] and source.splits["val"].labels.tolist() == [1, 0]
        assert source.splits["val"].read(0)[0, 0, 0] == 3 and "the 2 classes of --classes" in source.notes[0]
        assert "test has no image" in source.notes[1]
    bare = open_data(table, classes=["3"], labels="ignore")
    assert bare.classes is None and sizes(bare) == {"train": 1, "test": 1} and bare.splits["train"].labels is None
    with pytest.raises(UserError, match=r"lacks 1 of .*--classes: 7"):
        open_data(table, classes=["2", "7"])
    with pytest.raises(UserError, match="has no labels, so --classes"):
        open_data(write_csv(tmp_path, "path\n000.png\n", "bare.csv"), classes=["2"])


@settings(max_examples=60)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".txt"])
def test_fuzzed_tables(tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    for prefix in (b"", b"path,label\n", b'{"path": "'):
        path.write_bytes(prefix + content)
        with contextlib.suppress(UserError):
            open_data(path)


@settings(max_examples=60)
@given(st.text(max_size=300))
def test_fuzzed_names(where: str) -> None:
    with contextlib.suppress(UserError):
        open_data("/nowhere/" + where)


def test_start_page_names_every_column() -> None:
    page = (Path(__file__).parents[3] / "docs" / "start.md").read_text(encoding="utf-8")
    sentence = page.partition("A table (CSV")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == {*PATH_COLUMNS, *LABEL_COLUMNS, *SPLIT_COLUMNS}
