"""Open datasets, decode and cache images, make batches. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "open_data": "frugalvit.data.open",
    "DatasetSplits": "frugalvit.data.dataset",
    "ImageDataset": "frugalvit.data.dataset",
    "join": "frugalvit.data.dataset",
    "UnreadableImage": "frugalvit.data.bad_images",
    "check_trainable": "frugalvit.data.splits",
    "dataset_status": "frugalvit.data.formats.named_catalog",
    "list_datasets": "frugalvit.data.formats.named_catalog",
}

if TYPE_CHECKING:
    from frugalvit.data.bad_images import UnreadableImage as UnreadableImage
    from frugalvit.data.dataset import DatasetSplits as DatasetSplits
    from frugalvit.data.dataset import ImageDataset as ImageDataset
    from frugalvit.data.dataset import join as join
    from frugalvit.data.formats.named_catalog import dataset_status as dataset_status
    from frugalvit.data.formats.named_catalog import list_datasets as list_datasets
    from frugalvit.data.open import open_data as open_data
    from frugalvit.data.splits import check_trainable as check_trainable


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'frugalvit.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
