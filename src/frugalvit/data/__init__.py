"""Open datasets, decode and cache images, make batches. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "open_data": "frugalvit.data.open",
    "DatasetSplits": "frugalvit.data.dataset",
    "ImageDataset": "frugalvit.data.dataset",
    "join": "frugalvit.data.dataset",
}

if TYPE_CHECKING:
    from frugalvit.data.dataset import DatasetSplits as DatasetSplits
    from frugalvit.data.dataset import ImageDataset as ImageDataset
    from frugalvit.data.dataset import join as join
    from frugalvit.data.open import open_data as open_data


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'frugalvit.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
