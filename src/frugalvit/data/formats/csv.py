"""Tables of paths and labels: CSV, TSV, JSONL, or a list of "path label" lines."""

import codecs
import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from frugalvit.data.dataset import DatasetSplits, FileExamples, ImageDataset
from frugalvit.data.decode import EXTENSIONS
from frugalvit.data.formats.base import OpenOptions
from frugalvit.data.formats.folder import SPLIT_NAMES, unknown_classes
from frugalvit.data.paths import is_folder
from frugalvit.errors import UserError
from frugalvit.utils.text import pluralize, truncate_list

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
PATH_COLUMNS = ("path", "image", "file", "filename", "file_name", "filepath", "image_path", "img")
LABEL_COLUMNS = ("label", "class", "target", "category", "class_name", "label_name", "y")
SPLIT_COLUMNS = ("split", "subset", "fold", "set")
WANTED_COLUMN = f"called {', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}"
_MAX_BYTES = 2**31


class Row(NamedTuple):
    """One image of a table, with its line number."""

    path: str
    label: str | None
    split: str | None
    line: int


def is_table(where: str) -> bool:
    """True for a file with the extension of a table."""
    return Path(where).suffix.lower() in SUFFIXES and is_file(where)


def open_table(where: str, options: OpenOptions) -> DatasetSplits:
    """Open a table. Paths are relative to its folder; missing files count as unreadable images."""
    notes: list[str] = []
    columns: list[str] = []
    rows = read_rows(where, columns)
    label_columns = [name for name in LABEL_COLUMNS if name in columns]
    if options.labels != "ignore" and not any(row.label for row in rows):
        if label_columns:
            reason = f": its column '{label_columns[0]}' is empty"
        elif columns:
            reason = f" has no labels (a column {WANTED_COLUMN}), only {truncate_list(columns, 8)}"
        else:
            reason = " has no labels"
        notes.append(f"{where}{reason}: read as unlabelled.")
    elif options.labels != "ignore" and len(label_columns) > 1:
        others = " and ".join(f"'{name}'" for name in label_columns[1:])
        notes.append(f"{where}: labels from '{label_columns[0]}'; not used: {others}.")
    source = _build_splits(where, rows, Path(where).stem, options)
    return replace(source, notes=[*notes, *source.notes])


def has_lists(where: str) -> bool:
    """True for a folder with DomainNet's lists."""
    return is_folder(Path(where)) and find_lists(Path(where)) is not None


def open_lists(where: str, options: OpenOptions) -> DatasetSplits:
    """Open DomainNet: ``clipart_train.txt`` and ``clipart_test.txt`` beside ``clipart/``, with class folders."""
    lists = find_lists(Path(where))
    assert lists is not None
    name = lists["train"].name.removesuffix("_train.txt")
    rows = [row._replace(label=Path(row.path).parent.name) for row in join_rows(lists)]
    return _build_splits(str(lists["train"]), rows, name, options, kind=f"lists beside the folder {name}")


def join_rows(by_split: dict[str, Path]) -> list[Row]:
    """Read one table per split."""
    return [row._replace(split=split) for split, path in by_split.items() for row in read_rows(str(path))]


def open_rows(where: Path, rows: list[Row], name: str) -> DatasetSplits:
    """Build a dataset from rows; their paths are relative to the folder of ``where``."""
    return _build_splits(str(where), rows, name, OpenOptions())


def find_lists(where: Path) -> dict[str, Path] | None:
    """Find the lists by split, beside a folder (``domainnet/clipart``) or in a folder with one domain."""
    folder, name = where.parent, where.name
    if not (folder / f"{name}_train.txt").is_file():
        stems = [path.name.removesuffix("_train.txt") for path in sorted(where.glob("*_train.txt"))]
        domains = [stem for stem in stems if (where / stem).is_dir()]
        if len(domains) > 1:
            raise UserError(
                f"{where} holds {len(domains)} domains: {truncate_list(domains, 8)}. "
                f"Give one, for example {where / domains[0]}."
            )
        if not domains:
            return None
        folder, name = where, domains[0]
    paths = {split: folder / f"{name}_{split}.txt" for split in ("train", "test")}
    return {split: path for split, path in paths.items() if path.is_file()}


def read_rows(where: str, columns: list[str] | None = None) -> list[Row]:
    """Read the rows of a table and append its column names to ``columns``. Errors name the line."""
    columns = [] if columns is None else columns
    path = Path(where)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{where} is larger than 2 GB, too large for a table of paths.")
        text = path.read_text(encoding=_encoding(path))
    except UnicodeError:  # UTF-16 raises a plain one
        raise UserError(f"{where} is not UTF-8 text. Save it as UTF-8 (in a spreadsheet: 'CSV UTF-8').") from None
    except OSError as error:
        raise UserError(f"Cannot read {where}: {error.strerror or error}.") from None
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
    """UTF-8, or UTF-16 by its byte order mark, which spreadsheets call 'Unicode text'."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def _csv_rows(text: str, where: str, delimiter: str | None, columns: list[str]) -> Iterator[Row]:
    if delimiter is None:
        first = text.split("\n", 1)[0]
        delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    path_at = label_at = split_at = None
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
                    width = max(index for index, cell in enumerate(first_cells, 1) if cell)  # columns with a name
                    path_at, label_at, split_at = _find_columns(columns, where)
                    continue
            needed = max(at for at in (path_at, label_at, split_at) if at is not None)
            if len(cells) <= needed:
                raise UserError(f"{where}, line {line}: expected at least {needed + 1} cells, got {len(cells)}.")
            if any(cell.strip() for cell in cells[width:]):  # spreadsheets add empty cells at the end
                raise UserError(
                    f"{where}, line {line}: expected {width} cells as in the first line, got {len(cells)}. Put a value "
                    f"with {_DELIMITERS[delimiter]} in quotes{', or name the column' if columns else ''}."
                )
            label = cells[label_at].strip() if label_at is not None else None
            split = cells[split_at].strip() if split_at is not None else None
            yield _row(cells[path_at].strip(), label, split, line, where)
    except csv.Error as error:
        raise UserError(f"{where}, near line {line + 1}: {error}.") from None


_COLUMNS = (PATH_COLUMNS, LABEL_COLUMNS, SPLIT_COLUMNS)


def _find_columns(columns: list[str], where: str) -> tuple[int, int | None, int | None]:
    """Return the indices of the path, label and split columns."""
    path, label, split = (next((columns.index(n) for n in names if n in columns), None) for names in _COLUMNS)
    if path is None:
        raise UserError(
            f"{where} has no column of paths, only {truncate_list(columns, 8) or 'none'}. Name one "
            f"{', '.join(PATH_COLUMNS[:4])}."
        )
    return path, label, split


def _json_rows(text: str, where: str, columns: list[str]) -> Iterator[Row]:
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}, line {line}: not JSON ({error}).") from None
        if not isinstance(record, dict):
            raise UserError(f'{where}, line {line}: expected an object, as {{"path": …, "label": …}}.')
        keys = {str(key).lower(): value for key, value in record.items()}
        path, label, split = (next((keys[n] for n in names if n in keys), None) for names in _COLUMNS)
        if not isinstance(path, str):
            raise UserError(f"{where}, line {line}: no path. Name one key {', '.join(PATH_COLUMNS[:4])}.")
        columns += [key for key in keys if key not in columns]
        yield _row(path, _label_text(label, where, line), None if split is None else str(split), line, where)


def _label_text(label: Any, where: str, line: int) -> str | None:
    if label is None or isinstance(label, str):
        return label
    if isinstance(label, bool | int):
        return str(label)
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    raise UserError(f"{where}, line {line}: expected one label, a text or an integer, got {label!r:.60}.")


def _list_rows(text: str) -> Iterator[Row]:
    """Read lines as ``some path.jpg 17``. The last word is a label unless it ends the path."""
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
        if split.lower() not in SPLIT_NAMES:
            raise UserError(f"{where}, line {line}: unknown split '{split}'. Write train, val or test.")
        split = SPLIT_NAMES[split.lower()]
    return Row(path, label, split or None, line)


def _build_splits(where: str, rows: list[Row], name: str, options: OpenOptions, kind: str = "table") -> DatasetSplits:
    notes: list[str] = []
    rows = _drop_repeated(rows, where, notes)
    labelled = options.labels != "ignore" and any(row.label for row in rows)
    if labelled:
        unlabelled = [row for row in rows if not row.label]
        if unlabelled:
            lines = f"line{'s' * (len(unlabelled) > 1)} {truncate_list([str(row.line) for row in unlabelled])}"
            raise UserError(
                f"{where}, {lines}: no label ({len(unlabelled):,} of {len(rows):,} rows). Label or delete them. To "
                "pre-train without labels, pass --labels ignore."
            )
        _note_missing_labels(rows, where, notes)
    folder = Path(where).parent
    by_split: dict[str, list[Row]] = {}
    for row in rows:
        by_split.setdefault(row.split or "train", []).append(row)
    classes = class_list(row.label for split in options.class_splits for row in by_split.get(split, []))
    classes = classes or class_list(row.label for row in rows)
    index = {label: i for i, label in enumerate(classes)}
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "val", "test"):
        members = by_split.get(split, [])
        if labelled:
            unknown = class_list(row.label for row in members if row.label not in index)
            if unknown:
                raise unknown_classes(f"{split} in {where}", "train", unknown, split)
        if members:
            numbers = np.array([index[row.label] for row in members if row.label]) if labelled else None
            splits[split] = FileExamples([_file_path(folder, row.path) for row in members], numbers, str(folder))
    _note_missing_files(splits, where, notes)
    return DatasetSplits(name, where, kind, tuple(classes) if labelled else None, splits, notes)


_MISSING_VALUES = ("nan", "null", "none", "n/a", "na", "<na>")


def _note_missing_labels(rows: list[Row], where: str, notes: list[str]) -> None:
    """Note labels such as NaN: they become a class, which may be an error in the table."""
    counts = Counter(row.label for row in rows if row.label)
    for label in sorted(label for label in counts if label.strip().lower() in _MISSING_VALUES):
        rows_text = pluralize(counts[label], "row")
        notes.append(f"{where}: '{label}' ({rows_text}) counts as a class. If it means no label, delete these rows.")


def _file_path(folder: Path, path: str) -> str:
    """Return the full path of a table's entry; a table from Windows has backslashes."""
    full = str(folder / path)
    if "\\" not in path or os.sep == "\\" or is_file(full):
        return full
    slashed = str(folder / PureWindowsPath(path).as_posix())
    return slashed if is_file(slashed) else full


def class_list(labels: Iterable[str | None]) -> list[str]:
    """Return the sorted distinct labels. Integers are sorted by value: 2 comes before 10."""
    distinct = {label for label in labels if label}
    if distinct and all(label.lstrip("-").isascii() and label.lstrip("-").isdigit() for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def _drop_repeated(rows: list[Row], where: str, notes: list[str]) -> list[Row]:
    """Drop repeated images within a split. An image with two labels is an error."""
    first: dict[tuple[str, str], Row] = {}
    labelled: dict[str, Row] = {}
    for row, image in zip(rows, _image_ids(rows, Path(where).parent), strict=True):
        first.setdefault((image, row.split or "train"), row)
        before = labelled.setdefault(image, row)
        if before.label != row.label:
            raise UserError(
                f"{where}: {row.path} has two labels, '{before.label}' (line {before.line}) and '{row.label}' "
                f"(line {row.line}). Delete one of these lines."
            )
    if len(first) < len(rows):
        notes.append(f"{where}: {pluralize(len(rows) - len(first), 'repeated row')} left out.")
    times = Counter(image for image, _ in first)
    if shared := [labelled[image].path for image, count in times.items() if count > 1]:
        notes.append(
            f"{where}: {pluralize(len(shared), 'image')} in several splits, so scores are too high: "
            f"{truncate_list(shared)}."
        )
    return list(first.values())


def _image_ids(rows: list[Row], folder: Path) -> list[str]:
    """Return one text per image: the same for ``a.png``, ``./a.png``, its full path, and a path through a link."""
    keys = FileExamples([_file_path(folder, row.path) for row in rows], None, str(folder)).keys
    root = folder.resolve()
    return [os.path.normpath(os.path.join(root, key)) for key in keys]  # noqa: PTH118  (a fifth of pathlib's time)


def _note_missing_files(splits: dict[str, ImageDataset], where: str, notes: list[str]) -> None:
    missing = [name for examples in splits.values() for name in examples.names if not is_file(name)]
    total = sum(len(examples) for examples in splits.values())
    if missing and len(missing) == total:
        raise UserError(f"{where}: none of its {total:,} files exists. Paths must be relative to the table's folder.")
    if missing:
        notes.append(f"{where}: {len(missing):,} of its {total:,} files are missing: {truncate_list(missing)}.")


def is_file(name: str) -> bool:
    """True if the file exists; False for a name that the system does not accept."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
