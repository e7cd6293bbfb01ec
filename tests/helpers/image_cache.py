"""Small image folders and their cache."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.dataset import FileExamples


def write_images(
    folder: Path, count: int = 6, size: tuple[int, int] = (40, 30), bad: tuple[int, ...] = ()
) -> FileExamples:
    """PNG files (height, width), some of them not images."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    paths = []
    for i in range(count):
        path = folder / f"{i:03d}.png"
        Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
        if i in bad:
            path.write_bytes(b"this is not an image")
        paths.append(str(path))
    return FileExamples(paths, np.arange(count) % 3, str(folder))


def store_of(examples: Any, size: int | tuple[int, int] = 32, **keywords: Any) -> CachedStore:
    store = build_store(examples, size, workers=2, **keywords)
    assert isinstance(store, CachedStore)
    return store


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("images/*/images.bin")
    return path


def no_decoding(*_: object, **__: object) -> None:
    raise AssertionError("decoded again")
