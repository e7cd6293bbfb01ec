"""The fingerprint of a dataset: it tells datasets apart, and does not change when they are moved."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.data import open_data
from frugalvit.data.dataset import FileExamples, join
from frugalvit.data.webdataset.pack import pack
from helpers.image_cache import store_of


def bitmaps(folder: Path, seed: int) -> Path:
    """Files of equal sizes and times, as some archives extract them."""
    generator = np.random.default_rng(seed)
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for number in range(3):
            path = folder / name / f"{number}.bmp"
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
            os.utime(path, (0, 0))
    return folder


def test_equal_names_sizes_and_times_are_told_apart(tmp_path: Path) -> None:
    def train(folder: Path) -> Any:
        return open_data(str(folder), split="given").splits["train"]

    one, other = (train(bitmaps(tmp_path / name, seed)) for seed, name in enumerate(("one", "other")))
    assert one.fingerprint() != other.fingerprint()
    assert join(one, one.subset([0])).fingerprint() != join(other, other.subset([0])).fingerprint()
    cached = [store_of(part, 8, where="disk", cache_dir=tmp_path / "cache").images for part in (one, other)]
    assert not torch.equal(cached[0], cached[1])


@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_has_the_fingerprint_without_times(packed: bool, tmp_path: Path) -> None:
    folder = bitmaps(tmp_path / "images", 0)
    if packed:
        pack(open_data(str(folder), split="given"), tmp_path / "shards")
        folder = tmp_path / "shards"
        for index in folder.glob("*.json"):
            index.unlink()  # as with shards of other tools

    def prints() -> list[str]:
        train = open_data(str(folder), split="given").splits["train"]
        return [join(train, train.subset([0])).fingerprint(times=times) for times in (True, False)]

    timed, content = prints()
    for file in folder.rglob("*.*"):
        os.utime(file, (1, 1))
    assert prints()[0] != timed and prints()[1] == content
    if not packed:
        next(folder.rglob("*.bmp")).write_bytes(b"other")
        assert prints()[1] != content


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files here")
def test_missing_files_and_pipes_have_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")  # reading it would block
    names = [str(tmp_path / name) for name in ("missing", "folder", "fifo")]
    prints: list[str] = []
    thread = threading.Thread(target=lambda: prints.append(FileExamples(names, None).fingerprint()), daemon=True)
    thread.start()
    thread.join(5.0)
    assert prints and FileExamples([], None).fingerprint() != prints[0]
