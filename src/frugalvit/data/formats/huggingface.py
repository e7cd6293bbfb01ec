"""Hugging Face datasets: ``hf:name[:config]``, folders of ``save_to_disk``, Parquet and Arrow files.

Only this module imports the optional package ``datasets``, which never runs code of a dataset.
"""

import contextlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.formats.base import OpenOptions
from frugalvit.data.formats.csv import LABEL_COLUMNS, class_list
from frugalvit.data.formats.image_folder import SPLIT_NAMES, unknown_classes
from frugalvit.data.paths import is_file
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import read_bytes
from frugalvit.utils.text import short_message, truncate_list

_CLASS_TYPES = ("int", "uint", "bool", "string", "large_string")  # lists and floats are not classes
_LABEL_COLUMNS = ("fine_label", *LABEL_COLUMNS, "labels", "coarse_label")  # the first that exists is used
_FILE_SUFFIXES = (".parquet", ".arrow")


class HubExamples(ImageDataset):
    """Images in the rows of an Arrow table: encoded bytes, or paths of files."""

    per_image = ("indices",)

    def __init__(self, rows: Any, column: str, labels: np.ndarray | None, name: str) -> None:
        width = len(str(max(len(rows) - 1, 0)))
        super().__init__([f"{name}[{i:0{width}d}]" for i in range(len(rows))], labels)
        self.rows, self.column = rows, column
        self.indices = np.arange(len(rows))

    def raw(self, index: int) -> bytes:
        name = self.names[index]
        try:
            cell = self.rows[int(self.indices[index])][self.column]
            if isinstance(cell, dict):
                cell = cell.get("bytes") or (read_bytes(cell["path"]) if cell.get("path") else None)
        except Exception as error:  # Arrow raises many exception types for a damaged table
            raise UnreadableImage(name, f"cannot read its row: {short_message(error)}") from None
        if not isinstance(cell, bytes):
            raise UnreadableImage(name, "its row has no image")
        return cell

    def stored_size(self, index: int) -> int:
        try:
            return len(self.raw(index))
        except UnreadableImage:
            return -1

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        fingerprint = getattr(self.rows, "_fingerprint", "")
        return ((fingerprint, index) for index in self.indices.tolist())


def is_saved(where: str) -> bool:
    """True for a folder of ``save_to_disk``, or a Parquet or Arrow file."""
    if any(is_file(f"{where}/{name}") for name in ("dataset_dict.json", "state.json")):
        return True
    return Path(where).suffix.lower() in _FILE_SUFFIXES and is_file(where)


def open_saved(where: str, options: OpenOptions) -> DatasetSplits:
    path, datasets = Path(where), _import_datasets()
    try:
        with _quiet():
            if path.is_dir():
                loaded = datasets.load_from_disk(str(path))
            else:
                reader = datasets.Dataset.from_parquet if path.suffix == ".parquet" else datasets.Dataset.from_file
                loaded = reader(str(path))
    except Exception as error:  # pyarrow and datasets raise dozens of types
        raise UserError(f"Cannot read {path} as a dataset: {short_message(error)}") from None
    return _build_splits(loaded, str(path), path.stem)


def open_hub(where: str, options: OpenOptions) -> DatasetSplits:
    """Open ``hf:name`` or ``hf:name:config``; a dataset in the local cache needs no network."""
    name, _, config = where.removeprefix("hf:").partition(":")
    datasets = _import_datasets()
    console.info(f"loading {name} from the Hugging Face hub")
    try:
        with _quiet():
            loaded = datasets.load_dataset(name, config or None)
    except Exception as error:  # network, authentication, unknown name, damaged cache: each has its own type
        raise UserError(
            f"Cannot load '{where}' ({short_message(error)}). Check the name (hf:NAME or hf:NAME:CONFIG) and the "
            "network, or give the path of a folder that save_to_disk wrote, or of a Parquet file."
        ) from None
    return _build_splits(loaded, where, name.rpartition("/")[2])


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("Hugging Face data needs the package 'datasets': pip install 'frugalvit[streams]'.") from None
    return datasets


@contextlib.contextmanager
def _quiet() -> Any:
    """Silence log lines, and move progress bars from standard output to standard error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)


def _build_splits(loaded: Any, where: str, name: str) -> DatasetSplits:
    parts = dict(loaded.items()) if hasattr(loaded, "items") else {"train": loaded}
    notes: list[str] = []
    by_split: dict[str, Any] = {}
    left_out: list[str] = []
    for part, rows in parts.items():
        split = SPLIT_NAMES.get(str(part).lower()) or ("train" if len(parts) == 1 else None)
        if split is None or split in by_split or not len(rows):
            left_out.append(str(part))
        else:
            by_split[split] = rows
    if left_out:
        notes.append(f"{where}: not read: {truncate_list(left_out)} (not train, val or test, or empty).")
    if not by_split:
        raise UserError(f"{where} lacks train, val and test; splits: {truncate_list([*map(str, parts)]) or 'none'}.")
    first = by_split.get("train", next(iter(by_split.values())))
    column = _image_column(first, where)
    kinds = {key: str(getattr(first.features.get(key), "dtype", "")) for key in _LABEL_COLUMNS}
    label = next((key for key, kind in kinds.items() if kind.startswith(_CLASS_TYPES)), None)
    if label is None:
        notes.append(f"{where} has no column of labels ({truncate_list(first.column_names, 8)}): read as unlabelled.")
    texts = {split: _labels(rows, label) if label else [] for split, rows in by_split.items()}
    names = getattr(first.features[label], "names", None) if label else None
    classes = sorted(names) if names else class_list(texts.get("train") or next(iter(texts.values())))
    index = {text: number for number, text in enumerate(classes)}
    splits: dict[str, ImageDataset] = {}
    for split, rows in by_split.items():
        numbers = None
        if label:
            if unknown := class_list(text for text in texts[split] if text != "-1" and text not in index):
                raise unknown_classes(f"{split} in {where}", "train", unknown)
            numbers = np.array([index.get(text or "", -1) for text in texts[split]])  # "-1" marks a hidden test set
        examples: ImageDataset = HubExamples(_encoded(rows, column), column, numbers, f"{name}/{split}")
        if numbers is not None and (numbers < 0).any():
            notes.append(
                f"{split} in {where}: {int((numbers < 0).sum()):,} of {len(numbers):,} rows without a label: left out."
            )
            examples = examples.subset(numbers >= 0)
        splits[split] = examples
    return DatasetSplits(name, where, "Hugging Face dataset", tuple(classes) if label else None, splits, notes)


def _image_column(rows: Any, where: str) -> str:
    from datasets import Image

    for column, feature in rows.features.items():
        if isinstance(feature, Image):
            return column
    binary = [c for c, f in rows.features.items() if getattr(f, "dtype", "") in ("binary", "large_binary")]
    nested = [c for c, f in rows.features.items() if isinstance(f, dict) and "bytes" in f]
    if binary or nested:
        return (binary or nested)[0]
    raise UserError(f"{where} has no column of images, only {truncate_list(list(rows.features), 8)}.")


def _encoded(rows: Any, column: str) -> Any:
    """Select the image column as encoded bytes: frugalvit decodes them."""
    from datasets import Image

    rows = rows.select_columns([column])
    return rows.cast_column(column, Image(decode=False)) if isinstance(rows.features[column], Image) else rows


def _labels(rows: Any, column: str) -> list[str | None]:
    """Read labels as text; None for a missing label and for -1 in a column of named classes."""
    if column not in rows.column_names:  # as in the test split of a challenge
        return [None for _ in range(len(rows))]
    names = getattr(rows.features[column], "names", None)
    values = [None if names and value == -1 else value for value in rows[column][:]]
    return [None if value is None else names[value] if names else str(value) for value in values]
