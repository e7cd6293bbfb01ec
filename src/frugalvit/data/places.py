"""Where things lie on this machine: the cache, and datasets that have a name."""

from __future__ import annotations

import os
from pathlib import Path


def local(where: str | Path) -> Path:
    """A path with its ``~`` spelled out, where that means somebody's home."""
    try:
        return Path(where).expanduser()
    except RuntimeError:  # ~nobody: a folder of that name, if anything
        return Path(where)


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; a name too long to be one is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def cache_root() -> Path:
    """$FRUGALVIT_CACHE, or ~/.cache/frugalvit. Everything in it can be deleted at any time."""
    return local(os.environ.get("FRUGALVIT_CACHE") or "~/.cache/frugalvit")


def datasets_root(root: str | Path | None = None) -> Path:
    """The folder of named datasets: as given, or $FRUGALVIT_DATASETS, or ``datasets`` in the cache."""
    given = root or os.environ.get("FRUGALVIT_DATASETS")
    return local(given) if given else cache_root() / "datasets"
