"""The catalogue of named datasets: the 18 of EsViT's Table 9 and others. ``named.py`` opens them.

This module does not import torch, so that ``frugalvit list datasets`` is fast.
"""

import importlib.util
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from frugalvit.data.paths import datasets_root
from frugalvit.utils.files import read_text


@dataclass(frozen=True)
class Known:
    """A named dataset. If ``suite`` is true, sizes (train with val) and metric are those of EsViT's Table 9."""

    title: str
    classes: int
    train: int
    test: int
    files: list[str]  # the dataset is present if these exist below the root
    metric: str = "accuracy"
    suite: bool = False
    torchvision: str = ""  # the class that downloads and reads it
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)  # arguments of that class, by split
    needs: list[str] = field(default_factory=list)
    by_hand: str = ""  # instruction for the user, if it cannot be downloaded


_FOLDER = Path(__file__).parent
IMAGENET_100 = read_text(_FOLDER / "imagenet100.txt").split()
"""The 100 classes of ImageNet-100 (Tian et al. 2020, CMC), by WordNet number; Drloc's released list is the same."""


def _read_catalog() -> dict[str, Known]:
    text = read_text(_FOLDER / "named_catalog.yaml")
    entries = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
    return {name: Known(**entry) for name, entry in entries.items()}


DATASETS = _read_catalog()
"""All named datasets, by name."""


class DatasetStatus(NamedTuple):
    """The state of a dataset, "present", "downloadable" or "by hand", and an instruction."""

    state: str
    instruction: str


@dataclass(frozen=True)
class DatasetInfo:
    """One line of ``frugalvit list datasets``. ``train`` counts train and val together."""

    name: str
    title: str
    classes: int
    train: int
    test: int
    metric: str
    suite: bool
    status: str
    instruction: str


def dataset_status(name: str, root: str | Path | None = None) -> DatasetStatus:
    """Return whether a dataset is present, can be downloaded, or must be copied by hand, and how."""
    known, home = DATASETS[name], datasets_root(root)
    missing = [package for package in known.needs if importlib.util.find_spec(package) is None]
    if all((home / path).exists() for path in known.files):
        if "h5py" in missing:
            return DatasetStatus("by hand", "to read it: pip install h5py")
        return DatasetStatus("present", str(home / known.files[0].split("/")[0]))
    if known.by_hand:
        return DatasetStatus("by hand", known.by_hand.format(root=home))
    if missing:
        return DatasetStatus("by hand", f"to download and read it: pip install {' '.join(missing)}")
    return DatasetStatus("downloadable", f"'frugalvit data {name}' downloads it to {home}")


def list_datasets(pattern: str = "", root: str | Path | None = None) -> list[DatasetInfo]:
    """List the datasets whose name or title contains ``pattern`` (with ``*`` and ``?``), with their state."""
    rows = []
    for name, known in DATASETS.items():
        if any(fnmatch(text.lower(), f"*{pattern.lower()}*") for text in (name, known.title)):
            status = dataset_status(name, root)
            sizes = (known.classes, known.train, known.test)
            rows.append(DatasetInfo(name, known.title, *sizes, known.metric, known.suite, *status))
    return rows
