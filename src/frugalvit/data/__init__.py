"""A path or a name -> images, labels, and batches of them on the device. The names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "open_data": "frugalvit.data.sources",
    "DataSource": "frugalvit.data.examples",
    "Examples": "frugalvit.data.examples",
    "join": "frugalvit.data.examples",
    "BadImage": "frugalvit.data.decode",
    "check_trainable": "frugalvit.data.splits",
    "dataset_status": "frugalvit.data.catalog",
    "list_datasets": "frugalvit.data.catalog",
}

if TYPE_CHECKING:
    from frugalvit.data.catalog import dataset_status as dataset_status
    from frugalvit.data.catalog import list_datasets as list_datasets
    from frugalvit.data.decode import BadImage as BadImage
    from frugalvit.data.examples import DataSource as DataSource
    from frugalvit.data.examples import Examples as Examples
    from frugalvit.data.examples import join as join
    from frugalvit.data.sources import open_data as open_data
    from frugalvit.data.splits import check_trainable as check_trainable

__all__ = [
    "open_data",
    "DataSource",
    "Examples",
    "join",
    "BadImage",
    "check_trainable",
    "dataset_status",
    "list_datasets",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'frugalvit.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
