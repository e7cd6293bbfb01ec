"""Tables of paths and labels: CSV, TSV, JSONL, or a list of "path label" lines.

An image has several labels in a JSON list or, with --target labels, as ``cat|dog``; --target number reads numbers.
Other columns and another folder of images are named behind the table: ``table.csv:path=photo,label=species,root=img``.
"""

import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from frugalvit.data.dataset import DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.decode import ARRAYS, EXTENSIONS
from frugalvit.data.formats.base import OpenOptions
from frugalvit.data.formats.image_folder import SPLIT_NAMES, unknown_classes
from frugalvit.data.paths import is_file, local
from frugalvit.errors import UserError
from frugalvit.utils.files import read_user_text
from frugalvit.utils.text import pluralize, truncate_list

SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")
PATH_COLUMNS = ("path", "image", "file", "filename", "file_name", "filepath", "image_path", "img")
LABEL_COLUMNS = ("label", "class", "target", "category", "class_name", "label_name", "y")
SPLIT_COLUMNS = ("split", "subset", "fold", "set")
_COLUMNS = {"path": PATH_COLUMNS, "label": LABEL_COLUMNS, "split": SPLIT_COLUMNS}
WANTED_COLUMN = f"called {', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}"


class Row(NamedTuple):
    """One image of a table, with its line number."""

    path: str
    label: str | tuple[str, ...] | None  # a tuple: several labels, perhaps none of them
    split: str | None
    line: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.label if isinstance(self.label, tuple) else () if self.label is None else (self.label,)


def is_table(where: str) -> bool:
    """True for a file with the extension of a table."""
    where = split_columns(where)[0]
    return Path(where).suffix.lower() in SUFFIXES and is_file(where)


def split_columns(where: str) -> tuple[str, dict[str, str]]:
    """Split ``table.csv:path=photo,label=species,split=part,root=folder`` into the file and its options."""
    match = re.fullmatch(r"(.+\.\w+):((?:(?:path|label|split|root)=[^,=]+,?)+)", where)
    if match is None:
        return where, {}
    return match[1], dict(part.split("=") for part in match[2].rstrip(",").split(","))


def open_table(where: str, options: OpenOptions) -> DatasetSplits:
    """Open a table. Paths are relative to its folder or to ``root``; missing files count as unreadable images."""
    where, columns = split_columns(where)
    root = columns.pop("root", None)
    rows = read_rows(where, columns)
    if root is not None:
        folder = local(root).resolve()
        rows = [row._replace(path=str(folder / row.path)) for row in rows]
    source = build_splits(where, rows, Path(where).stem, options, columns.get("label", "value"))
    if source.classes is None and options.labels != "ignore":
        source.notes.insert(
            0,
            f"{where} has no labels in a column {WANTED_COLUMN}: read as unlabelled. {where}:label=COLUMN names "
            "another column.",
        )
    return source


def join_rows(by_split: dict[str, Path]) -> list[Row]:
    """Read one table per split; a missing table is an empty split."""
    tables = {split: read_rows(str(path)) for split, path in by_split.items() if path.is_file()}
    return [row._replace(split=split) for split, rows in tables.items() for row in rows]


def read_rows(where: str, columns: dict[str, str] | None = None) -> list[Row]:
    """Read the rows of a table. Errors name the line. ``columns``: other names of path, label and split."""
    path = Path(where)
    text = read_user_text(path, "utf-8-sig")
    suffix = path.suffix.lower()
    if suffix == ".txt":
        rows = list(_list_rows(text))
    else:
        records = _json_records(text, where) if suffix == ".jsonl" else _csv_records(text, where, suffix)
        rows = [_row(record, line, where) for line, record in _rename([*records], columns or {}, where)]
    if not rows:
        raise UserError(f"{where} names no images.")
    return rows


def _csv_records(text: str, where: str, suffix: str) -> Iterator[tuple[int, dict[str, Any]]]:
    delimiter = "\t" if suffix == ".tsv" else max(",;\t", key=text.lstrip("\r\n").partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = (cells for cells in reader if any(cell.strip() for cell in cells))  # without empty lines
    try:
        columns = [cell.strip().lower() for cell in next(rows, [])]
        known = (*PATH_COLUMNS, *LABEL_COLUMNS, *SPLIT_COLUMNS)
        if twice := [name for name in dict.fromkeys(columns) if name in known and columns.count(name) > 1]:
            raise UserError(f"{where} has several columns {twice[0]!r}. Rename or delete all but one.")
        for cells in rows:
            if any(cell.strip() for cell in cells[len(columns) :]):  # spreadsheets add empty cells at the end
                raise UserError(
                    f"{where}, line {reader.line_num}: expected {len(columns)} cells as in the first line, got "
                    f"{len(cells)}. Put values that contain '{delimiter}' in quotes."
                )
            yield reader.line_num, dict(zip(columns, cells, strict=False))
    except csv.Error as error:
        raise UserError(f"{where}, line {reader.line_num}: {error}.") from None


def _json_records(text: str, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}, line {line}: not JSON ({error}).") from None
        if not isinstance(record, dict):
            raise UserError(f'{where}, line {line}: expected an object, as {{"path": …, "label": …}}.')
        yield line, {str(key).lower(): value for key, value in record.items()}


def _list_rows(text: str) -> Iterator[Row]:
    """Read lines such as ``some path.jpg 17`` or ``a.jpg,17``. The last word is the label, unless it ends the path."""
    for line, content in enumerate(text.splitlines(), 1):
        content = content.strip()
        if not content or content.startswith("#"):
            continue
        head, last = re.fullmatch(r"(?:(.*)[\s,;])?(.*)", content).groups()  # type: ignore[union-attr]
        has_label = head and Path(last).suffix.lower() not in EXTENSIONS | ARRAYS
        yield Row(head.rstrip(" \t,;"), last, None, line) if has_label else Row(content, None, None, line)


def _rename(
    records: list[tuple[int, dict[str, Any]]], columns: dict[str, str], where: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Give path, label and split of each record these names; other columns for the same thing do not count."""
    known = dict.fromkeys(name for _, record in records for name in record)
    for kind, name in columns.items():
        if records and name.lower() not in known:
            raise UserError(f"{where} has no column '{name}' for the {kind}. It has: {truncate_list(list(known), 8)}.")
    replaced = {name for kind in columns for name in _COLUMNS[kind]}
    for line, record in records:
        chosen = {kind: record.get(name.lower()) for kind, name in columns.items()}
        yield line, {name: value for name, value in record.items() if name not in replaced} | chosen


def _row(record: dict[str, Any], line: int, where: str) -> Row:
    """Read path, label and split of a record from the first column with a known name."""
    groups = _COLUMNS.values()
    path, label, split = (next((record[name] for name in group if name in record), None) for group in groups)
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise UserError(
            f"{where}, line {line}: no path in the columns {truncate_list(list(record), 8) or 'of the table'}. Rename "
            f"the column with the paths to path, or name your columns: {where}:path=COLUMN,label=COLUMN."
        )
    label = (label.strip() or None) if isinstance(label, str) else label
    names = label if isinstance(label, list) else [] if label is None else [label]
    if not all(isinstance(name, str | int | float) and str(name).strip() for name in names):
        raise UserError(f"{where}, line {line}: expected a text, a number or a list of texts, got {label!r:.60}.")
    texts = tuple(dict.fromkeys(str(name).strip() for name in names))
    split = str(split or "").strip().lower()
    if split and split not in SPLIT_NAMES:
        raise UserError(
            f"{where}, line {line}: unknown split '{split}'. Write train, val or test, or rename this column."
        )
    one = texts[0] if texts else None
    return Row(path.strip(), texts if isinstance(label, list) else one, SPLIT_NAMES.get(split), line)


def build_splits(where: str, rows: list[Row], name: str, options: OpenOptions, column: str = "value") -> DatasetSplits:
    """Build a dataset from rows; their paths are relative to the folder of ``where``.

    column: the name of the numbers of --target number
    """
    notes: list[str] = []
    folder = Path(where).parent
    rows = [row._replace(label=None) for row in rows] if options.labels == "ignore" else rows
    rows = _drop_repeated(rows, where, notes)
    labelled = options.labels != "ignore" and any(row.label is not None for row in rows)
    is_number = labelled and options.target == "number"
    several = not is_number and (options.target == "labels" or any(isinstance(row.label, tuple) for row in rows))
    if several:
        rows = [row._replace(label=_split_label(row.label)) for row in rows]
    by_split: dict[str, list[Row]] = {}
    for row in rows:
        by_split.setdefault(row.split or "train", []).append(row)
    classes = class_list(name for row in by_split.get("train", []) for name in row.names)
    classes = [column] if is_number else classes or class_list(name for row in rows for name in row.names)
    if labelled and not classes:
        raise UserError(f"{where}: all lists of labels are empty. Give some image a label.")
    if labelled and options.target == "auto" and not several:
        notes += _suggest_target(where, classes, sum(row.label is not None for row in rows))
    index = {label: i for i, label in enumerate(classes)}
    splits: dict[str, ImageDataset] = {}
    loose: dict[str, ImageDataset] = {}  # rows without a label
    for split in ("train", "val", "test"):
        members = by_split.get(split, [])
        if labelled and (unlabelled := [str(folder / row.path) for row in members if row.label is None]):
            loose[split] = FileExamples(unlabelled, None, str(folder))
            members = [row for row in members if row.label is not None]
        unknown = class_list(name for row in members for name in row.names if name not in index)
        if labelled and unknown and not is_number:
            raise unknown_classes(f"{split} in {where}", "train", unknown)
        if members:
            single = labelled and not several and not is_number
            numbers = np.array([index[name] for row in members for name in row.names]) if single else None
            images = splits[split] = FileExamples([str(folder / row.path) for row in members], numbers, str(folder))
            if is_number:
                images.targets = np.array([[_read_number(row, where)] for row in members], np.float32)
            elif labelled and several:
                images.targets = np.array([np.isin(classes, row.names) for row in members], np.int8)
    listed = (*splits.values(), *loose.values())
    missing = [name for examples in listed for name in examples.names if not is_file(name)]
    if len(missing) == len(rows):
        raise UserError(
            f"{where}: none of its {len(rows):,} files exists. Paths must be relative to the table's folder, with '/' "
            "between folders."
        )
    if missing:
        notes.append(f"{where}: {len(missing):,} of its {len(rows):,} files are missing: {truncate_list(missing)}.")
    return DatasetSplits(name, where, "table", tuple(classes) if labelled else None, splits, notes, loose)


def _suggest_target(where: str, classes: list[str], images: int) -> list[str]:
    """Return a note if the classes seem to be lists of labels, or numbers."""
    if any("|" in name for name in classes):
        return [f"{where}: a label with '|' counts as one class. --target labels reads several labels."]
    if len(classes) > max(10, images / 2) and all(_as_number(name) is not None for name in classes):
        return [f"{where}: each number counts as a class. --target number learns numbers."]
    return []


def _split_label(label: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Split "cat|dog" into its labels; a single | means that the image has none of them."""
    if not isinstance(label, str):
        return label
    return tuple(dict.fromkeys(name.strip() for name in label.split("|") if name.strip()))


def _read_number(row: Row, where: str) -> float:
    if (number := _as_number(str(row.label))) is None:
        raise UserError(f"{where}, line {row.line}: --target number needs a number, got {row.label!r:.60}.")
    return number


def _as_number(text: str) -> float | None:
    """Return a finite number; None for other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def class_list(labels: Iterable[str | None]) -> list[str]:
    """Return the sorted distinct labels. Integers are sorted by value: 2 comes before 10."""
    distinct = {label for label in labels if label}
    if distinct and all(re.fullmatch(r"-?[0-9]{1,20}", label) for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def _drop_repeated(rows: list[Row], where: str, notes: list[str]) -> list[Row]:
    """Drop repeated images within a split. A label counts more than an empty one; two labels are an error."""
    folder = os.path.abspath(Path(where).parent)  # noqa: PTH100  (os.path is several times as fast as pathlib)
    first: dict[tuple[str, str], Row] = {}
    labelled: dict[str, Row] = {}
    for row in rows:
        image = os.path.normpath(os.path.join(folder, row.path))  # noqa: PTH118
        key = (image, row.split or "train")
        if first.setdefault(key, row).label is None:
            first[key] = row
        before = labelled.setdefault(image, row)
        if before.label is None:
            labelled[image] = row
        elif row.label is not None and before.label != row.label:
            raise UserError(
                f"{where}: {row.path} has two labels, '{before.label}' (line {before.line}) and '{row.label}' "
                f"(line {row.line}). Delete one of these lines."
            )
    if len(first) < len(rows):
        notes.append(f"{where}: {pluralize(len(rows) - len(first), 'repeated row')} left out.")
    times = Counter(image for image, _ in first)
    if shared := [labelled[image].path for image, count in times.items() if count > 1]:
        count = pluralize(len(shared), "image")
        notes.append(f"{where}: {count} in several splits, so scores are too high: {truncate_list(shared)}.")
    return list(first.values())
