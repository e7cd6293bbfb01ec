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


def lies_among(place: Path, data: str | Path) -> bool:
    """Whether what is written to ``place`` would lie in the folder ``data``, to be taken for a part of it next time."""
    folder = local(data)
    if not is_folder(folder):
        return False
    inside = folder.resolve()
    # A link that lies there is found there, wherever it leads.
    spelled = [place.parent.resolve() / place.name] if place.is_symlink() else []
    return any(inside == one or inside in one.parents for one in (place.resolve(), *spelled))


def cache_root() -> Path:
    """$FRUGALVIT_CACHE, or ~/.cache/frugalvit. Everything in it can be deleted at any time."""
    return local(os.environ.get("FRUGALVIT_CACHE") or "~/.cache/frugalvit")


def datasets_root(root: str | Path | None = None) -> Path:
    """The folder of named datasets: as given, or $FRUGALVIT_DATASETS, or ``datasets`` in the cache."""
    given = root or os.environ.get("FRUGALVIT_DATASETS")
    return local(given) if given else cache_root() / "datasets"
