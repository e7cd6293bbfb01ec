"""Features in Parquet: the columns path, split, label and vector."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frugalvit.utils.files import utf8_safe

UNLABELLED = -1  # the label of an unlabelled image among labelled ones
ROWS = 4096  # of a row group, which is in memory at a time
Labels = Sequence[Any] | None  # of an image: a name, None, or a list of names


def label_names(labels: np.ndarray | None, targets: np.ndarray | None, classes: Sequence[str] | None) -> Labels:
    """Return the names of labels (N,), None for an unlabelled image, or of several labels per image (N, C)."""
    if classes is None:
        return None
    if labels is not None:
        return [None if number == UNLABELLED else classes[number] for number in labels.tolist()]
    if targets is None:
        return None
    return [[name for name, mark in zip(classes, row, strict=True) if mark == 1] for row in targets.tolist()]


def make_table(names: Sequence[str], splits: Sequence[str], labels: Labels, vectors: np.ndarray) -> Any:
    """Return paths, splits, labels if there are any, and vectors (N, D) as an Arrow table."""
    import pyarrow

    columns: dict[str, object] = {"path": [utf8_safe(name) for name in names], "split": splits}
    if labels is not None:
        several = any(isinstance(label, list) for label in labels)
        columns["label"] = pyarrow.array(labels, pyarrow.list_(pyarrow.string()) if several else pyarrow.string())
    flat = pyarrow.array(vectors.reshape(-1))
    columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    return pyarrow.table(columns)


class FeatureParts:
    """The features in several Parquet files. A row is numbered over all files, in their order."""

    def __init__(self, paths: Sequence[Path]) -> None:
        import pyarrow
        from pyarrow import dataset, parquet

        self.paths = list(paths)
        schema = pyarrow.unify_schemas([parquet.read_schema(path) for path in paths])  # some may have no labels
        self.dataset = dataset.dataset([str(path) for path in paths], schema=schema)
        self.count = self.dataset.count_rows()

    def __len__(self) -> int:
        return self.count

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the first row of each batch, and the batch of these columns."""
        start = 0
        one_at_a_time = {"batch_size": ROWS, "batch_readahead": 0, "fragment_readahead": 0, "use_threads": False}
        for batch in self.dataset.to_batches(columns=list(columns), **one_at_a_time):
            yield start, batch
            start += batch.num_rows

    def vectors(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the vectors (n, D) of each batch."""
        for start, batch in self.batches(["vector"]):
            yield start, as_vectors(batch)

    def names(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        return self.dataset.take(np.asarray(rows), columns=["path"])["path"].to_pylist()


def as_vectors(batch: Any) -> Tensor:
    """Return the vectors (n, D) of a batch as float32."""
    values = batch.column("vector").flatten().to_numpy(zero_copy_only=False)
    return torch.tensor(values).view(batch.num_rows, -1)
