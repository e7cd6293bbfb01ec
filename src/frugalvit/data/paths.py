"""Paths on this machine: the cache, and the folder of named datasets."""

import os
from pathlib import Path

from frugalvit.utils.files import expand_home as local

# Unlike pathlib's methods they are False for a name that the system does not accept.
is_file, is_folder = os.path.isfile, os.path.isdir


def is_inside(path: Path, data: str | Path) -> bool:
    """True if ``path`` is in the folder ``data``. The dataset would contain it the next time it is opened."""
    if not is_folder(local(data)):
        return False
    folder = local(data).resolve()
    # A link inside the folder counts, whatever its target.
    link = [path.parent.resolve() / path.name] if path.is_symlink() else []
    return any(folder == real or folder in real.parents for real in (path.resolve(), *link))


def cache_root() -> Path:
    """Return $FRUGALVIT_CACHE or ~/.cache/frugalvit. Its files can be deleted at any time."""
    return local(os.environ.get("FRUGALVIT_CACHE") or "~/.cache/frugalvit")


def datasets_root(root: str | Path | None = None) -> Path:
    """Return the folder of named datasets. Without ``root``: $FRUGALVIT_DATASETS, else ``datasets`` in the cache."""
    folder = root or os.environ.get("FRUGALVIT_DATASETS")
    return local(folder) if folder else cache_root() / "datasets"
