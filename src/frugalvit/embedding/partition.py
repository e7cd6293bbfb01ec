"""Divide a dataset of any size into parts, which the workers of ``embed --engine ray`` read.

A part is a WebDataset shard, a Parquet file of encoded images, or 4,096 images of any other dataset. Shards and Parquet
files are not listed image by image, so that memory does not grow with their number.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.formats.csv import LABEL_COLUMNS
from frugalvit.data.formats.huggingface import HubExamples
from frugalvit.data.formats.image_folder import SPLIT_NAMES
from frugalvit.data.webdataset.index import PackedIndex
from frugalvit.data.webdataset.remote import is_remote
from frugalvit.data.webdataset.shards import index_entry, is_shards, list_shards
from frugalvit.data.webdataset.stream import read_samples
from frugalvit.embedding.feature_table import Labels, label_names
from frugalvit.embedding.image_table import are_files
from frugalvit.errors import UserError
from frugalvit.probing.extractor import CHUNK
from frugalvit.utils.text import short_message, truncate_list

PART = 4 * CHUNK  # images of a part of a folder
_GROUP = 2 * CHUNK  # encoded images of a shard or a Parquet file in memory
OpenImages = Callable[[], tuple[DatasetSplits, Mapping[str, ImageDataset]]]
Images = Iterator[tuple[ImageDataset, Labels]]


@dataclass(frozen=True)
class Part:
    """Images that become one file of features; ``identity`` changes if an image does, ``read`` yields them in order."""

    split: str
    identity: Sequence[object]
    read: Callable[[], Images]


@dataclass
class Partition:
    """The parts of a dataset, and what the command prints about it."""

    name: str
    parts: list[Part]
    has_files: bool = False  # every image is a file
    notes: list[str] = field(default_factory=list)


def divide(where: str, split: str, open_images: OpenImages) -> Partition:
    """Divide the shards, the Parquet files or other images at ``where``; ``open_images`` opens other images."""
    path = Path(where)
    tables = sorted(path.parent.glob(path.name) if path.suffix.lower() == ".parquet" else path.glob("*.parquet"))
    index: PackedIndex | None = None
    if is_shards(where):
        by_split, index = list_shards(where)
        files = [(name, shard) for name, shards in by_split.items() for shard in shards]
        read: Callable[[str], Images] = partial(_read_shard, classes=None if index is None else index.classes)
    elif tables:
        splits = [SPLIT_NAMES.get(table.stem.partition("-")[0].lower()) or "train" for table in tables]
        files, read = list(zip(splits, map(str, tables), strict=True)), _read_table
    else:
        source, by_name = open_images()
        # A part must not carry all parts of a joined dataset to its worker.
        leaves = [(name, leaf) for name, examples in by_name.items() for leaf in examples.leaves()]
        pieces = [
            (name, leaf.subset(np.arange(start, min(start + PART, len(leaf)))))
            for name, leaf in leaves
            for start in range(0, len(leaf), PART)
        ]
        parts = [Part(name, [i.fingerprint()], partial(_read_images, i, source.classes)) for name, i in pieces]
        return Partition(source.name, parts, all(are_files(leaf) for _, leaf in leaves), list(source.notes))
    chosen = [(name, file) for name, file in files if split in ("all", name)]
    if not chosen:
        raise UserError(f"{where} has no {split} split, only {', '.join(dict(files)) or 'none'}.")
    parts = [Part(name, [file, _content(file, index)], partial(read, file)) for name, file in chosen]
    return Partition(where if is_shards(where) else path.stem, parts)


def _content(file: str, index: PackedIndex | None) -> str | None:
    """Return a file's checksum in the index, or its size and time; None for a remote file without an index."""
    entry = index_entry(file, index)
    if entry is not None or is_remote(file):
        return entry and entry.sha256
    status = Path(file).stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _read_images(examples: ImageDataset, classes: Sequence[str] | None) -> Images:
    yield examples, label_names(examples.labels, examples.targets, classes)


def _read_shard(shard: str, classes: Sequence[str] | None) -> Images:
    """Read a local or remote shard forwards; the classes are those of its index, which numbers them."""
    numbered = {str(number): name for number, name in enumerate(classes or ())}
    stream = read_samples(shard)
    while samples := list(itertools.islice(stream, _GROUP)):
        names = [f"{shard}/{sample.key}" for sample in samples]
        labels = [numbered.get(sample.label or "", sample.label) for sample in samples]
        yield _encoded([sample.content for sample in samples], names), labels


def _read_table(path: str) -> Images:
    """Read the column of encoded images, or of structs that hold them, and the labels beside it."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            image = next((column.name for column in schema if "binary" in str(column.type)), None)
            if image is None:
                raise UserError(f"{path} has no column of encoded images, only {truncate_list(schema.names, 8)}.")
            label = next((name for name in ("fine_label", *LABEL_COLUMNS, "labels") if name in schema.names), None)
            stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
            classes = stored.get(label, {}).get("names")
            row = 0
            for batch in file.iter_batches(_GROUP, columns=[image, *([label] if label else [])]):
                names = [f"{path}[{number}]" for number in range(row, row + batch.num_rows)]
                row += batch.num_rows
                values = batch.column(label).to_pylist() if label else [None] * batch.num_rows
                hidden = (None, -1) if classes else (None,)  # -1 marks a hidden test set
                labels = [None if v in hidden else classes[v] if classes else str(v) for v in values]
                yield _encoded(batch.column(image).to_pylist(), names), labels
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"Cannot read {path} as Parquet ({short_message(error)}).") from None


def _encoded(cells: list[object], names: list[str]) -> ImageDataset:
    examples = HubExamples([{"image": cell} for cell in cells], "image", None, "")
    examples.names = examples.keys = names
    return examples
