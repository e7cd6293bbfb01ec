"""A table of paths and labels (CSV, TSV, JSONL, or a list of "path label" lines) -> splits and classes."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from frugalvit.data.dataset import DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.decode import EXTENSIONS
from frugalvit.data.formats.folder import SPLIT_NAMES, unknown_classes
from frugalvit.errors import UserError
from frugalvit.utils.text import pluralize, truncate_list

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
PATH_COLUMNS = ("path", "image", "file", "filename", "file_name", "filepath", "image_path", "img")
LABEL_COLUMNS = ("label", "class", "target", "category", "class_name", "label_name", "y")
SPLIT_COLUMNS = ("split", "subset", "fold", "set")
WANTED_COLUMN = f"called {', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}"
_MAX_BYTES = 2**31  # a table above two gigabytes is no table of paths


class Row(NamedTuple):
    """One image of a table; ``line`` is where it stands. ``other`` is what the only column of another name says."""

    path: str
    label: str | None
    split: str | None
    line: int
    other: str | None = None


def open_table(where: str, labels: str = "auto", classes_from: Sequence[str] = ("train",)) -> DatasetSplits:
    """Paths are relative to the table's folder. A missing file stays in the list and is counted as a bad image."""
    notes: list[str] = []
    columns: list[str] = []
    rows = read_rows(where, columns)
    if labels != "ignore" and not any(row.label for row in rows):
        rows = _labelled_otherwise(rows, columns, where, notes)
    elif labels != "ignore" and len(named := [name for name in LABEL_COLUMNS if name in columns]) > 1:
        others = " and ".join(f"'{name}'" for name in named[1:])
        notes.append(f"{where}: labels from '{named[0]}'; {others} {'is' if len(named) == 2 else 'are'} not used.")
    for name in dict.fromkeys(columns[at] for at in _found(columns) if at is not None):
        if (count := columns.count(name)) > 1 and (labels != "ignore" or name not in LABEL_COLUMNS):
            notes.append(f"{where} has {count} columns called '{name}', the first is read: rename or remove the rest.")
    source = _source(where, rows, Path(where).stem, labels, classes_from)
    return replace(source, notes=[*notes, *source.notes])


def _labelled_otherwise(rows: list[Row], columns: list[str], where: str, notes: list[str]) -> list[Row]:
    """A column beside the paths means the labels whatever it is called, if every row has one and some share theirs."""
    values = [row.other for row in rows]
    if all(values) and len(set(values)) < len(values):
        other = next(name for name in columns if name not in PATH_COLUMNS)
        notes.append(f"{where}: its column '{other}' is taken for the labels, as there is no other beside the paths.")
        return [row._replace(label=row.other) for row in rows]
    if empty := [name for name in LABEL_COLUMNS if name in columns]:
        notes.append(f"{where}: its column '{empty[0]}' is empty, so read as unlabelled until it is filled in.")
        return rows
    has = f"has {'the column' if len(columns) == 1 else 'the columns'} {truncate_list(columns, 8)}"
    lacks = f"{has} and no labels (a column {WANTED_COLUMN})" if columns else "is a list of images without labels"
    notes.append(f"{where} {lacks}: read as unlabelled.")
    return rows


def open_lists(train: Path, test: Path | None, labels: str = "auto") -> DatasetSplits:
    """DomainNet's layout: ``clipart_train.txt`` and ``clipart_test.txt`` beside ``clipart/``; folders are classes."""
    name = train.name.removesuffix("_train.txt")
    rows = join_rows({"train": train, "test": test})
    rows = [row._replace(label=Path(row.path).parent.name) for row in rows]
    return _source(str(train), rows, name, labels, ("train",), kind=f"lists beside the folder {name}")


def join_rows(by_split: dict[str, Path | None]) -> list[Row]:
    """The rows of one table per split."""
    return [
        row._replace(split=split)
        for split, path in by_split.items()
        if path is not None
        for row in read_rows(str(path))
    ]


def open_rows(where: Path, rows: list[Row], name: str) -> DatasetSplits:
    """A source from rows already read; ``where`` is a file in the folder that their paths start from."""
    return _source(str(where), rows, name, "auto", ("train",))


def find_lists(where: Path) -> tuple[Path, Path | None] | None:
    """The lists that belong to a folder: beside it (``domainnet/clipart``), or inside when it holds one domain only."""
    beside = where.parent / f"{where.name}_train.txt"
    if beside.is_file():
        test = where.parent / f"{where.name}_test.txt"
        return beside, test if test.is_file() else None
    inside = [path for path in sorted(where.glob("*_train.txt")) if (where / path.name[: -len("_train.txt")]).is_dir()]
    if len(inside) > 1:
        names = [path.name.removesuffix("_train.txt") for path in inside]
        raise UserError(
            f"{where} holds {len(names)} domains: {truncate_list(names, 8)}. Give one, for example {where / names[0]}."
        )
    if not inside:
        return None
    test = where / inside[0].name.replace("_train.txt", "_test.txt")
    return inside[0], test if test.is_file() else None


def read_rows(where: str, columns: list[str] | None = None) -> list[Row]:
    """The rows of a table, or ``UserError`` naming the line that is wrong; its columns are added to ``columns``."""
    columns = [] if columns is None else columns
    path = Path(where)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{where} is larger than 2 GB: too large for a table of paths.")
        text = path.read_text(encoding=_encoding(path))
    except UnicodeError:  # of utf-16 also a plain one
        raise UserError(f"{where} is not UTF-8 text: save it as that (in a spreadsheet 'CSV UTF-8').") from None
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}.") from None
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        rows = list(_json_rows(text, where, columns))
    elif suffix == ".txt":
        rows = list(_list_rows(text))
    else:
        rows = list(_csv_rows(text, where, "\t" if suffix == ".tsv" else None, columns))
    if not rows:
        raise UserError(f"{where} names no images.")
    return rows


def _encoding(path: Path) -> str:
    """UTF-8, or what the mark at the beginning says: spreadsheets call UTF-16 'Unicode text'."""
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # before the other, whose mark begins alike
        return "utf-32"
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def _csv_rows(text: str, where: str, delimiter: str | None, columns: list[str]) -> Iterator[Row]:
    if delimiter is None:
        first = text.split("\n", 1)[0]
        delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    path_at = label_at = split_at = other_at = None
    width = line = 0
    try:
        for line, cells in enumerate(reader, 1):
            if not any(cell.strip() for cell in cells):
                continue
            if path_at is None:
                first_cells = [cell.strip().lower() for cell in cells]
                width = len(cells)
                if Path(first_cells[0]).suffix in EXTENSIONS:  # no header: path, label, split
                    path_at, label_at, split_at = 0, 1 if len(cells) > 1 else None, 2 if len(cells) > 2 else None
                else:
                    columns += first_cells
                    width = max(place for place, cell in enumerate(first_cells, 1) if cell)  # columns with a name
                    path_at, label_at, split_at = _columns(columns, where)
                    other_at = 1 - path_at if len(columns) == 2 and columns[1 - path_at] not in _KNOWN else None
                    continue
            needed = max(at for at in (path_at, label_at, split_at) if at is not None)
            if len(cells) <= needed:
                raise UserError(f"{where}, line {line}: {len(cells)} cells where {needed + 1} are needed.")
            if any(cell.strip() for cell in cells[width:]):  # empty ones at the end are a spreadsheet's
                raise UserError(
                    f"{where}, line {line}: {len(cells)} cells where the first line has {width}: put a value with "
                    f"{_DELIMITERS[delimiter]} in quotes{', or name the column' if columns else ''}."
                )
            label = cells[label_at].strip() if label_at is not None else None
            split = cells[split_at].strip() if split_at is not None else None
            other = cells[other_at].strip() if other_at is not None and len(cells) > other_at else None
            yield _row(cells[path_at].strip(), label, split, line, where)._replace(other=other)
    except csv.Error as error:
        raise UserError(f"{where}, near line {line + 1}: {error}.") from None


def _found(columns: list[str]) -> list[int | None]:
    """Where the paths, the labels and the splits stand."""
    return [next((columns.index(n) for n in names if n in columns), None) for names in _COLUMNS]


def _columns(columns: list[str], where: str) -> tuple[int, int | None, int | None]:
    found = _found(columns)
    if found[0] is None:
        raise UserError(
            f"{where} has no column of paths: it has {truncate_list(columns, 8) or 'none'}; one must be called "
            f"{', '.join(PATH_COLUMNS[:4])}."
        )
    return found[0], found[1], found[2]


_COLUMNS = (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS)
_KNOWN = frozenset({*PATH_COLUMNS, *LABEL_COLUMNS, *SPLIT_COLUMNS})


def _json_rows(text: str, where: str, columns: list[str]) -> Iterator[Row]:
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}, line {line}: not JSON ({error}).") from None
        if not isinstance(record, dict):
            raise UserError(f'{where}, line {line}: an object was expected, as {{"path": …, "label": …}}.')
        keys = {str(key).lower(): value for key, value in record.items()}
        path, label, split = (next((keys[n] for n in names if n in keys), None) for names in _COLUMNS)
        if not isinstance(path, str):
            raise UserError(f"{where}, line {line}: no path; one key must be called {', '.join(PATH_COLUMNS[:4])}.")
        columns += [key for key in keys if key not in columns]
        row = _row(path, _label_text(label, where, line), None if split is None else str(split), line, where)
        others = [value for key, value in keys.items() if key not in _KNOWN]
        alone = len(keys) == 2 and len(others) == 1 and isinstance(others[0], str | int)
        yield row._replace(other=str(others[0])) if alone else row


def _label_text(label: Any, where: str, line: int) -> str | None:
    if label is None or isinstance(label, str):
        return label
    if isinstance(label, bool | int):
        return str(label)
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    raise UserError(f"{where}, line {line}: a label must be a word or a whole number, one per image.")


def _list_rows(text: str) -> Iterator[Row]:
    """``some path.jpg 17``: the label is the last word when the path does not end there."""
    for line, content in enumerate(text.splitlines(), 1):
        content = content.strip()
        if not content or content.startswith("#"):
            continue
        head, _, last = content.rpartition(" ")
        if head and Path(last).suffix.lower() not in EXTENSIONS:
            yield Row(head.strip(), last, None, line)
        else:
            yield Row(content, None, None, line)


def _row(path: str, label: str | None, split: str | None, line: int, where: str) -> Row:
    if not path or "\0" in path:
        raise UserError(f"{where}, line {line}: the path is empty or damaged.")
    if split:
        known = SPLIT_NAMES.get(split.lower())
        if known is None:
            raise UserError(f"{where}, line {line}: split '{split}' is none of train, val, test.")
        split = known
    return Row(path, label, split or None, line)


def _source(
    where: str, rows: list[Row], name: str, labels: str, classes_from: Sequence[str], kind: str = "table"
) -> DatasetSplits:
    notes: list[str] = []
    rows = _without_repeats(rows, where, notes)
    labelled = labels != "ignore" and any(row.label for row in rows)
    if labelled:
        bare = [row for row in rows if not row.label]
        if bare:
            lines = f"line{'s' * (len(bare) > 1)} {truncate_list([str(row.line) for row in bare])}"
            raise UserError(
                f"{where}, {lines}: no label ({len(bare):,} of {len(rows):,} rows). Label or delete them; pre-training "
                "needs none: there, give --labels ignore."
            )
        _note_odd_labels(rows, where, notes)
    folder = Path(where).parent
    by_split: dict[str, list[Row]] = {}
    for row in rows:
        by_split.setdefault(row.split or "train", []).append(row)
    classes = class_list(row.label for split in classes_from for row in by_split.get(split, []) if row.label)
    classes = classes or class_list(row.label for row in rows if row.label)
    index = {label: i for i, label in enumerate(classes)}
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "val", "test"):
        members = by_split.get(split, [])
        if labelled:
            unknown = class_list(row.label for row in members if row.label not in index and row.label)
            if unknown:
                raise unknown_classes(f"{split} in {where}", "train", unknown, split)
        if members:
            numbers = np.array([index[row.label] for row in members if row.label]) if labelled else None
            splits[split] = FileExamples([_file(folder, row.path) for row in members], numbers, str(folder))
    _note_missing(splits, where, notes)
    return DatasetSplits(name, where, kind, tuple(classes) if labelled else None, splits, notes)


_NO_LABEL = ("nan", "null", "none", "n/a", "na", "<na>")
"""What programs write where there is no value; for all we know it may be the name of a class."""


def _note_odd_labels(rows: list[Row], where: str, notes: list[str]) -> None:
    """Labels that make a class of their own, which nobody may have meant."""
    counts = Counter(row.label for row in rows if row.label)
    for label in sorted(label for label in counts if label.strip().lower() in _NO_LABEL):
        meant = "if it means that there is none, delete these rows"
        notes.append(f"{where}: '{label}', the label of {pluralize(counts[label], 'row')}, counts as a class; {meant}.")
    numbers: dict[str, list[str]] = {}
    for label in counts:
        if len(label) < 40 and (found := _WHOLE.fullmatch(label)):
            numbers.setdefault(found[1] + found[2], []).append(label)
    for alike in numbers.values():
        if len(alike) > 1:
            words = " and ".join(f"'{label}' ({pluralize(counts[label], 'row')})" for label in sorted(alike))
            notes.append(f"{where}: {words} are classes of their own, though the same number; write them alike.")


_WHOLE = re.compile(r"\+?(-?)0*([0-9]+)(?:\.0*)?")


def _file(folder: Path, path: str) -> str:
    """The file a table names; a table written on Windows has backslashes, which elsewhere mean nothing."""
    given = str(folder / path)
    if "\\" not in path or os.sep == "\\" or _is_file(given):
        return given
    slashed = str(folder / PureWindowsPath(path).as_posix())
    return slashed if _is_file(slashed) else given


def class_list(labels: Iterable[str | None]) -> list[str]:
    """Sorted, and by value where all are whole numbers: 2 comes before 10."""
    distinct = {label for label in labels if label}
    if distinct and all(label.lstrip("-").isascii() and label.lstrip("-").isdigit() for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def _without_repeats(rows: list[Row], where: str, notes: list[str]) -> list[Row]:
    """Each image once in a split, however its path is written; and an image has one label wherever it stands."""
    first: dict[tuple[str, str], Row] = {}
    labelled: dict[str, Row] = {}
    for row, image in zip(rows, _images_of(rows, Path(where).parent), strict=True):
        first.setdefault((image, row.split or "train"), row)
        before = labelled.setdefault(image, row)
        if before.label != row.label:
            raise UserError(
                f"{where} gives {row.path} two labels, '{before.label}' (line {before.line}) and '{row.label}' "
                f"(line {row.line}): one label per image."
            )
    if len(first) < len(rows):
        notes.append(f"{where}: {pluralize(len(rows) - len(first), 'repeated row')} left out.")
    times = Counter(image for image, _ in first)
    if shared := [labelled[image].path for image, count in times.items() if count > 1]:
        notes.append(
            f"{where}: {pluralize(len(shared), 'image')} in several splits, so scores flatter: {truncate_list(shared)}."
        )
    return list(first.values())


def _images_of(rows: list[Row], folder: Path) -> list[str]:
    """One text per row, the same for ``a.png``, ``./a.png`` and the full path of that file, also through a link."""
    keys = FileExamples([_file(folder, row.path) for row in rows], None, str(folder)).keys
    root = folder.resolve()
    return [os.path.normpath(os.path.join(root, key)) for key in keys]  # noqa: PTH118  (a fifth of pathlib's time)


def _note_missing(splits: dict[str, ImageDataset], where: str, notes: list[str]) -> None:
    missing = [name for examples in splits.values() for name in examples.names if not _is_file(name)]
    total = sum(len(examples) for examples in splits.values())
    if missing and len(missing) == total:
        raise UserError(
            f"None of the {total:,} files that {where} names exists: paths are relative to the table's folder."
        )
    if missing:
        notes.append(
            f"{len(missing):,} of the {total:,} files that {where} names are missing: {truncate_list(missing)}."
        )


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name too long, or with characters no file has
        return False
