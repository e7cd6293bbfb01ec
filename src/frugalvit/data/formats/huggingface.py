"""Hugging Face datasets: ``hf:name``, ``hf:name:config``, a folder of ``save_to_disk``, a Parquet or Arrow file.

The ``datasets`` package is an extra and is imported only here. It never runs code that comes with a dataset.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import UnreadableImage
from frugalvit.data.formats.folder import SPLIT_NAMES, unknown_classes
from frugalvit.data.formats.table import LABEL_COLUMNS, class_list
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import truncate_list

_FINE_FIRST = ("fine_label", *LABEL_COLUMNS, "labels", "coarse_label")


class HubExamples(ImageDataset):
    """Images in the rows of an Arrow table: encoded bytes, or paths of files."""

    def __init__(self, rows: Any, column: str, labels: np.ndarray | None, name: str) -> None:
        width = len(str(max(len(rows) - 1, 0)))
        super().__init__([f"{name}[{i:0{width}d}]" for i in range(len(rows))], labels)
        self.rows, self.column = rows, column
        self.indices = np.arange(len(rows))

    def raw(self, index: int) -> bytes:
        name = self.names[index]
        try:
            cell = self.rows[int(self.indices[index])][self.column]
        except Exception as error:  # a damaged table fails inside Arrow, in its own ways
            raise UnreadableImage(name, f"its row cannot be read: {_short(error)}") from None
        if isinstance(cell, bytes):
            return cell
        if isinstance(cell, dict) and cell.get("bytes"):
            return cell["bytes"]
        if isinstance(cell, dict) and cell.get("path"):
            try:
                return Path(cell["path"]).read_bytes()
            except OSError as error:
                raise UnreadableImage(name, f"{cell['path']} cannot be read: {error.strerror or error}") from None
        raise UnreadableImage(name, "its row holds no image")

    def stored_size(self, index: int) -> int:
        try:
            return len(self.raw(index))
        except UnreadableImage:
            return -1

    def _select(self, whole: ImageDataset, chosen: np.ndarray) -> None:
        assert isinstance(whole, HubExamples)
        self.indices = whole.indices[chosen]

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        mark = getattr(self.rows, "_fingerprint", "")
        return ((mark, index) for index in self.indices.tolist())


def is_saved(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def open_saved(path: Path) -> DatasetSplits:
    """A folder of ``save_to_disk``, or one Parquet or Arrow file."""
    datasets = _package()
    try:
        with _quiet():
            if path.is_dir():
                loaded = datasets.load_from_disk(str(path))
            else:
                reader = datasets.Dataset.from_parquet if path.suffix == ".parquet" else datasets.Dataset.from_file
                loaded = reader(str(path))
    except Exception as error:  # pyarrow and datasets raise dozens of kinds; all mean the same to the reader
        raise UserError(f"{path} cannot be read as a dataset: {_short(error)}") from None
    return _source(loaded, str(path), path.stem)


def open_hub(where: str) -> DatasetSplits:
    """``hf:name`` or ``hf:name:config``; what was downloaded before needs no network."""
    address = where.removeprefix("hf:")
    if not address:
        raise UserError("Give a dataset behind 'hf:', for example hf:uoft-cs/cifar100.")
    if Path(address).exists():
        return open_saved(Path(address))
    name, _, config = address.partition(":")
    datasets = _package()
    console.info(f"loading {name} from the Hugging Face hub")
    try:
        with _quiet():
            loaded = datasets.load_dataset(name, config or None)
    except Exception as error:  # network, authentication, unknown name, damaged cache: each with its own class
        raise UserError(_explain(error, name, config)) from None
    return _source(loaded, where, name.rpartition("/")[2])


def _package() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("This needs the 'datasets' package: pip install 'frugalvit[streams]'.") from None
    return datasets


def _explain(error: Exception, name: str, config: str) -> str:
    kind, text = type(error).__name__, _short(error)
    low = f"{kind} {text}".lower()
    if "config name is missing" in low or "builderconfig" in low:
        return f"'hf:{name}' has several configurations, give one as hf:{name}:CONFIG ({text})"
    if any(
        word in low for word in ("offline", "connect", "resolve", "network", "timed out", "timeout", "couldn't reach")
    ):
        return (
            f"'hf:{name}' cannot be reached and is not in the local cache. Without a network, copy a folder that "
            "save_to_disk wrote, or a Parquet file, and give its path."
        )
    if any(word in low for word in ("gated", "401", "403", "authent")):
        return f"'hf:{name}' asks for permission: accept its terms on its page and run 'hf auth login'."
    if "notfound" in low or "404" in low or "doesn't exist" in low:
        return f"The Hugging Face hub has no dataset '{name}'{f' with configuration {config}' if config else ''}."
    return f"'hf:{name}' cannot be loaded: {text}"


@contextlib.contextmanager
def _quiet() -> Any:
    """Neither progress bars on standard output nor log lines: one message of ours is enough."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub", "fsspec")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _source(loaded: Any, where: str, name: str) -> DatasetSplits:
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
        raise UserError(f"{where} has no split that can be used: {truncate_list([*map(str, parts)]) or 'none at all'}.")
    first = by_split.get("train", next(iter(by_split.values())))
    column = _image_column(first, where)
    label = next((key for key in _FINE_FIRST if key in first.column_names), None)
    if label is None:
        notes.append(f"{where} has no column of labels ({truncate_list(first.column_names, 8)}): read as unlabelled.")
    texts = {split: _labels(rows, label) if label else None for split, rows in by_split.items()}
    judged = [texts["train"]] if "train" in texts else list(texts.values())
    if any(found is not None and None in found for found in judged):
        notes.append(f"{where}: some rows have no label: read as unlabelled.")
        texts = dict.fromkeys(texts)
    texts = _without_hidden(texts)
    classes = _classes(first, label, texts.get("train") or next(iter(texts.values())))
    index = {word: number for number, word in enumerate(classes)}
    splits: dict[str, ImageDataset] = {}
    for split in ("train", "val", "test"):
        if split not in by_split:
            continue
        words = texts[split]
        numbers = None
        if words is not None:
            unknown = class_list(word for word in words if word not in index)
            if unknown:
                raise unknown_classes(f"{split} in {where}", "train", unknown, split)
            numbers = np.array([-1 if word is None else index[word] for word in words])
        examples: ImageDataset = HubExamples(_undecoded(by_split[split], column), column, numbers, f"{name}/{split}")
        hidden = 0 if numbers is None else int((numbers < 0).sum())
        if numbers is not None and hidden:
            notes.append(f"{split} in {where}: {hidden:,} of {len(numbers):,} rows have no label: left out.")
            examples = examples.subset(numbers >= 0)
        if len(examples):
            splits[split] = examples
    labelled = any(found is not None for found in texts.values())
    return DatasetSplits(name, where, "Hugging Face dataset", tuple(classes) if labelled else None, splits, notes)


def _image_column(rows: Any, where: str) -> str:
    from datasets import Image

    for column, feature in rows.features.items():
        if isinstance(feature, Image):
            return column
    binary = [c for c, f in rows.features.items() if getattr(f, "dtype", "") in ("binary", "large_binary")]
    nested = [c for c, f in rows.features.items() if isinstance(f, dict) and "bytes" in f]
    if binary or nested:
        return (binary or nested)[0]
    raise UserError(f"{where} has no column of images: {truncate_list(list(rows.features), 8)}.")


def _undecoded(rows: Any, column: str) -> Any:
    """Only the image column, as encoded bytes: we decode ourselves."""
    from datasets import Image

    rows = rows.select_columns([column])
    return rows.cast_column(column, Image(decode=False)) if isinstance(rows.features[column], Image) else rows


def _labels(rows: Any, column: str) -> list[str | None] | None:
    """Labels as words; None for a column of lists or numbers that name no classes."""
    if column not in rows.column_names:  # a split to be judged elsewhere may come without it
        return [None for _ in range(len(rows))]
    feature, values = rows.features[column], rows[column][:]
    names = getattr(feature, "names", None)
    if names:
        return [names[value] if value is not None and 0 <= value < len(names) else None for value in values]
    if any(not isinstance(value, str | int | None) for value in values):
        return None
    return [None if value is None else str(value) for value in values]


def _without_hidden(texts: dict[str, list[str | None] | None]) -> dict[str, list[str | None] | None]:
    """-1 means that a label is kept secret, unless it is a class of train."""
    train = texts.get("train")
    if train is None or "-1" in train:
        return texts
    return {
        split: words if words is None else [None if word == "-1" else word for word in words]
        for split, words in texts.items()
    }


def _classes(rows: Any, column: str | None, words: list[str | None] | None) -> list[str]:
    names = getattr(rows.features[column], "names", None) if column else None
    return sorted(names) if names else class_list(words or [])


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
