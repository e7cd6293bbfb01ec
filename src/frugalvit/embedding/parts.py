"""Cut a dataset of any size into parts; each part becomes one Parquet file of features.

A part is read, embedded and written by one worker, so a finished file is a finished part. ``cluster_index.py`` reads
the files again.
"""

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.dataset import DatasetSplits, ImageDataset, JoinedExamples
from frugalvit.data.formats.csv import LABEL_COLUMNS
from frugalvit.data.formats.huggingface import HubExamples
from frugalvit.data.formats.image_folder import SPLIT_NAMES
from frugalvit.data.webdataset.remote import is_remote
from frugalvit.data.webdataset.shards import index_entry, is_shards, list_shards
from frugalvit.data.webdataset.stream import read_samples
from frugalvit.errors import UserError
from frugalvit.probing.extractor import CHUNK, FeatureExtractor
from frugalvit.utils import console
from frugalvit.utils.files import utf8_safe, write_atomically
from frugalvit.utils.text import short_message, truncate_list

PART = 4 * CHUNK  # images of a part of a folder, and rows of a Parquet file's group
_GROUP = 2 * CHUNK  # encoded images of a shard or a table in memory
_MARKS = b"frugalvit"
UNLABELLED = -1  # the label of an unlabelled image among labelled ones
Labels = Sequence[str | None] | Sequence[list[str]] | None


OpenFiles = Callable[[], tuple[DatasetSplits, Mapping[str, ImageDataset]]]


@dataclass(frozen=True)
class Part(ABC):
    """Images that become one Parquet file."""

    split: str

    @abstractmethod
    def identity(self) -> object:
        """Return facts that change if an image of the part changes."""

    @abstractmethod
    def read(self) -> Iterator[tuple[ImageDataset, Labels]]:
        """Yield the images in order, a bounded number at a time, with their labels."""


@dataclass(frozen=True)
class FilePart(Part):
    """Images of a dataset that ``open_data`` lists."""

    examples: ImageDataset
    classes: tuple[str, ...] | None

    def identity(self) -> object:
        return self.examples.fingerprint()

    def read(self) -> Iterator[tuple[ImageDataset, Labels]]:
        yield self.examples, label_names(self.examples.labels, self.examples.targets, self.classes)


@dataclass(frozen=True)
class ShardPart(Part):
    """A WebDataset shard, local or remote, read forwards."""

    shard: str
    content: str  # its checksum, or size and time
    classes: tuple[str, ...] | None  # names of the numbered labels in the index

    def identity(self) -> object:
        return [self.shard, self.content]

    def read(self) -> Iterator[tuple[ImageDataset, Labels]]:
        numbered = {str(number): name for number, name in enumerate(self.classes or ())}
        samples = read_samples(self.shard)
        while group := list(itertools.islice(samples, _GROUP)):
            names = [f"{self.shard}/{sample.key}" for sample in group]
            labels = [numbered.get(sample.label or "", sample.label) for sample in group]
            yield _in_memory([{"image": sample.content} for sample in group], "image", names), labels


@dataclass(frozen=True)
class TablePart(Part):
    """Row groups of a Parquet file with encoded images."""

    path: str
    groups: list[int]
    first: int  # row of the file
    image: str
    label: str | None
    classes: list[str] | None  # names of the numbered labels

    def identity(self) -> object:
        status = Path(self.path).stat()
        return [self.path, status.st_size, status.st_mtime_ns, self.groups]

    def read(self) -> Iterator[tuple[ImageDataset, Labels]]:
        import pyarrow.parquet

        columns, row = [self.image, *([self.label] if self.label else [])], self.first
        with pyarrow.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(_GROUP, self.groups, columns):
                rows = batch.to_pylist()
                names = [f"{self.path}[{number}]" for number in range(row, row + len(rows))]
                row += len(rows)
                labels = None if self.label is None else [self._label(cells[self.label]) for cells in rows]
                yield _in_memory(rows, self.image, names), labels

    def _label(self, value: Any) -> str | None:
        if value is None or (self.classes and value == -1):
            return None
        return self.classes[value] if self.classes else str(value)


def _in_memory(rows: list[dict[str, Any]], column: str, names: list[str]) -> ImageDataset:
    examples = HubExamples(rows, column, None, "")
    examples.names = examples.keys = names
    return examples


@dataclass
class Plan:
    """The parts of a dataset, and what the command prints about it."""

    name: str
    parts: Sequence[Part]
    images: int | None = None  # None if only reading the shards tells
    files: bool = False  # every image is a file
    notes: list[str] = field(default_factory=list)


def plan_parts(where: str, split: str, open_files: OpenFiles) -> Plan:
    """Cut the shards, Parquet files or other data at ``where`` into parts; ``open_files`` opens the other data.

    Shards and Parquet files are not listed image by image, so that memory does not grow with their number.
    """
    if is_shards(where):
        by_split, index = list_shards(where)
        names = [(name, shard) for name, shards in by_split.items() for shard in shards if split in ("all", name)]
        entries = [index_entry(shard, index) for _, shard in names]
        known = [entry.examples for entry in entries if entry is not None]
        classes = None if index is None else index.classes
        parts: list[Part] = [
            ShardPart(name, shard, entry.sha256 if entry else _size_and_time(shard), classes)
            for (name, shard), entry in zip(names, entries, strict=True)
        ]
        return Plan(where, _checked(parts, where, split, by_split), sum(known) if len(known) == len(names) else None)
    tables = _list_tables(where)
    if tables:
        planned = [(SPLIT_NAMES.get(path.stem.partition("-")[0].lower()) or "train", path) for path in tables]
        chosen = [(part, rows) for name, path in planned if split in ("all", name) for part, rows in _cut(path, name)]
        parts = _checked([part for part, _ in chosen], where, split, {name for name, _ in planned})
        return Plan(Path(where).stem, parts, sum(rows for _, rows in chosen))
    from frugalvit.embedding.curate import are_files

    source, by_name = open_files()
    leaves = [(name, leaf) for name, examples in by_name.items() for leaf in _leaves(examples)]
    parts = [
        FilePart(name, leaf.subset(np.arange(start, min(start + PART, len(leaf)))), source.classes)
        for name, leaf in leaves
        for start in range(0, len(leaf), PART)
    ]
    files = all(are_files(leaf) for _, leaf in leaves)
    return Plan(source.name, parts, sum(len(leaf) for _, leaf in leaves), files, list(source.notes))


def _checked(parts: list[Part], where: str, split: str, splits: Iterable[str]) -> list[Part]:
    if not parts:
        raise UserError(f"{where} has no {split} split, only {', '.join(dict.fromkeys(splits)) or 'none'}.")
    return parts


def _leaves(examples: ImageDataset) -> list[ImageDataset]:
    """Return the datasets that a joined one holds: a part must not carry all of them to its worker."""
    if isinstance(examples, JoinedExamples):
        return [leaf for part in examples.parts for leaf in _leaves(part)]
    return [examples]


def _size_and_time(shard: str) -> str:
    if is_remote(shard):
        return ""
    status = Path(shard).stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _list_tables(where: str) -> list[Path]:
    """List a Parquet file, a pattern of them, or a folder that holds nothing else."""
    path = Path(where)
    if path.suffix.lower() == ".parquet":
        return sorted(path.parent.glob(path.name)) if "*" in path.name else [path] if path.is_file() else []
    files = [file for file in path.iterdir() if not file.name.startswith((".", "_"))] if path.is_dir() else []
    return sorted(files) if files and all(file.suffix.lower() == ".parquet" for file in files) else []


def _cut(path: Path, split: str) -> Iterator[tuple[TablePart, int]]:
    """Yield the parts of a Parquet file and their rows: groups of rows with about ``PART`` images."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"Cannot read {path} as Parquet ({short_message(error)}).") from None
    schema = metadata.schema.to_arrow_schema()
    image = next((column.name for column in schema if "binary" in str(column.type)), None)  # or a struct with bytes
    if image is None:
        raise UserError(f"{path} has no column of encoded images, only {truncate_list(schema.names, 8)}.")
    label = next((name for name in ("fine_label", *LABEL_COLUMNS, "labels") if name in schema.names), None)
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    classes = stored.get(label, {}).get("names") if label else None
    groups: list[int] = []
    first = rows = 0
    for number in range(metadata.num_row_groups):
        groups.append(number)
        rows += metadata.row_group(number).num_rows
        if rows >= PART or number + 1 == metadata.num_row_groups:
            yield TablePart(split, str(path), groups, first, image, label, classes), rows
            first, groups, rows = first + rows, [], 0


# -- the files


def label_names(labels: np.ndarray | None, targets: np.ndarray | None, classes: Sequence[str] | None) -> Labels:
    """Return the names of labels (N,), None for an unlabelled image, or of several labels per image (N, C)."""
    if classes is None:
        return None
    if labels is not None:
        return [None if number == UNLABELLED else classes[int(number)] for number in labels.tolist()]
    if targets is None:
        return None
    return [[name for name, mark in zip(classes, marks, strict=True) if mark == 1] for marks in targets.tolist()]


def as_table(names: Sequence[str], splits: Sequence[str], labels: Labels, vectors: np.ndarray) -> Any:
    """Return paths, splits, labels if there are any, and vectors (N, D) as an Arrow table."""
    import pyarrow

    columns: dict[str, object] = {"path": [utf8_safe(name) for name in names], "split": splits}
    if labels is not None:
        several = any(isinstance(label, list) for label in labels)
        columns["label"] = pyarrow.array(labels, pyarrow.list_(pyarrow.string()) if several else pyarrow.string())
    flat = pyarrow.array(vectors.reshape(-1))
    columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    return pyarrow.table(columns)


class PartResult(NamedTuple):
    """What a worker did with a part."""

    rows: int
    bad: list[tuple[str, str]]
    is_new: bool


def part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


def embed_part(extractor: FeatureExtractor, part: Part, path: Path) -> PartResult:
    """Write the features of a part, unless its file holds them; an unreadable part raises and leaves no file."""
    import pyarrow
    import pyarrow.parquet

    marks = {"settings": _digest(extractor.settings()), "images": _digest(part.identity())}
    before = read_marks(path)
    if before and before["settings"] != marks["settings"]:
        raise UserError(f"{path.parent} holds features of another model or with other options: choose another --out.")
    if before and before["images"] == marks["images"]:
        return PartResult(pyarrow.parquet.read_metadata(path).num_rows, before["bad"], False)
    tables, bad = [], []
    for examples, labels in part.read():
        for chunk in extractor.chunks(examples):
            bad += chunk.bad
            names = [examples.names[row] for row in chunk.positions]
            chosen: Any = None if labels is None else [labels[row] for row in chunk.positions]
            tables.append(as_table(names, [part.split] * len(names), chosen, chunk.features))
    filled = [table for table in tables if table.num_rows]  # chunks without a readable image have no width
    table = pyarrow.concat_tables(filled) if filled else pyarrow.table({"path": pyarrow.array([], pyarrow.string())})
    table = table.replace_schema_metadata({_MARKS: json.dumps(marks | {"bad": bad})})
    write_atomically(path, lambda handle: pyarrow.parquet.write_table(table, handle, row_group_size=PART))
    return PartResult(table.num_rows, bad, True)


def read_marks(path: Path) -> dict[str, Any] | None:
    """Return what a finished part says about itself; None if it is missing or damaged."""
    import pyarrow
    import pyarrow.parquet

    if not path.exists():
        return None
    try:
        marks = json.loads((pyarrow.parquet.read_metadata(path).metadata or {})[_MARKS])
        bad = [(name, reason) for name, reason in marks["bad"]]
        return {"settings": str(marks["settings"]), "images": str(marks["images"]), "bad": bad}
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        console.warning(f"{path} is damaged ({short_message(error)}); computing it again")
        return None


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


class FeatureParts:
    """The features of finished parts. A row is numbered over all parts, in order."""

    def __init__(self, paths: Sequence[Path]) -> None:
        import pyarrow.parquet

        files = [(path, pyarrow.parquet.read_metadata(path)) for path in paths]
        self.paths = [path for path, metadata in files if metadata.num_rows]
        self.starts = np.cumsum([0, *(metadata.num_rows for _, metadata in files if metadata.num_rows)])
        self.fingerprint = _digest(
            [[path.name, str((metadata.metadata or {}).get(_MARKS))] for path, metadata in files]
        )

        self.has_labels = any("label" in metadata.schema.names for _, metadata in files[:1])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def batches(self, columns: Sequence[str], parts: Iterable[int] | None = None) -> Iterator[tuple[int, Any]]:
        """Yield the first row of each batch, and the batch of these columns."""
        import pyarrow.parquet

        for number in range(len(self.paths)) if parts is None else parts:
            start = int(self.starts[number])
            with pyarrow.parquet.ParquetFile(self.paths[number]) as file:
                for batch in file.iter_batches(PART, columns=list(columns)):
                    yield start, batch
                    start += batch.num_rows

    def vectors(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the vectors (n, D) of each batch."""
        for start, batch in self.batches(["vector"]):
            values = batch.column(0).flatten().to_numpy(zero_copy_only=False)
            yield start, torch.tensor(values).view(batch.num_rows, -1)

    def look_up(self, rows: Iterable[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Return the cells of some rows."""
        wanted = np.unique(np.fromiter(rows, int))
        found: dict[int, dict[str, Any]] = {}
        for start, batch in self.batches(columns, np.unique(np.searchsorted(self.starts, wanted, "right") - 1)):
            inside = wanted[(wanted >= start) & (wanted < start + batch.num_rows)]
            found |= dict(zip(inside.tolist(), batch.take((inside - start).tolist()).to_pylist(), strict=True))
        return found
