"""Where things lie on this machine: the cache, and datasets that have a name."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """$FRUGALVIT_CACHE, or ~/.cache/frugalvit. Everything in it can be deleted at any time."""
    return Path(os.environ.get("FRUGALVIT_CACHE") or "~/.cache/frugalvit").expanduser()


def datasets_root(root: str | Path | None = None) -> Path:
    """The folder of named datasets: as given, or $FRUGALVIT_DATASETS, or ``datasets`` in the cache."""
    given = root or os.environ.get("FRUGALVIT_DATASETS")
    return Path(given).expanduser() if given else cache_root() / "datasets"
