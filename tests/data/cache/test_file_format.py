"""A cache that several processes and people share: other people's entries, locks out of reach, what kills leave."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.data import open_data
from frugalvit.data.cache import build, file_format
from frugalvit.data.dataset import FileExamples, join
from frugalvit.data.webdataset.pack import pack
from frugalvit.errors import UserError
from frugalvit.utils.files import CannotLock, FolderLock
from helpers.image_cache import no_decoding, only_file, store_of, write_images


class Refused:
    """A lock on a file system that has none."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None:
        raise UserError("locks are not supported here")


def out_of_reach(place: Path) -> None:
    """Let the lock be one that this process may not open: permissions do not bind a superuser, a folder does."""
    (place / ".lock").unlink(missing_ok=True)
    (place / ".lock").mkdir()


def test_a_lock_out_of_reach_is_one_line(tmp_path: Path) -> None:
    out_of_reach(tmp_path)
    with pytest.raises(CannotLock, match=r"\.lock .*Choose another --out"), FolderLock(tmp_path):
        pass


def test_another_persons_finished_entry_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = write_images(tmp_path / "photos")
    first = store_of(examples, where="disk", cache_dir=tmp_path / "cache").images.clone()
    out_of_reach(only_file(tmp_path / "cache").parent)
    monkeypatch.setattr(build, "decode_all", no_decoding)
    monkeypatch.setattr(build, "_alone_in", no_decoding)
    assert torch.equal(store_of(examples, where="disk", cache_dir=tmp_path / "cache").images, first)


def test_an_entry_whose_lock_is_out_of_reach_is_decoded_at_once(tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos")
    store_of(examples, where="disk", cache_dir=tmp_path / "cache")
    path = only_file(tmp_path / "cache")
    path.unlink()
    out_of_reach(path.parent)
    began = time.monotonic()
    assert len(store_of(examples, where="disk", cache_dir=tmp_path / "cache")) == 6
    assert time.monotonic() - began < build._PATIENCE / 2


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_what_cannot_be_kept_is_decoded_for_this_run_alone(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = write_images(tmp_path / "photos")
    monkeypatch.setattr(build, "_WORTH_WRITING", -1.0)

    def full(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(file_format, "_reserve", full)
    if where == "disk":  # asked for: then it is a mistake
        with pytest.raises(UserError, match="Permission denied"):
            store_of(examples, where=where, cache_dir=tmp_path / "cache")
        return
    assert len(store_of(examples, where=where, cache_dir=tmp_path / "cache")) == 6
    assert "Decoding for this run alone" in capsys.readouterr().err


def test_what_a_killed_decode_left_is_removed(tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos")
    store_of(examples, where="disk", cache_dir=tmp_path / "cache")
    path = only_file(tmp_path / "cache")
    path.unlink()
    (path.parent / ".images.bin.4194305.part").write_bytes(b"half an image")
    store_of(examples, where="disk", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.part"))


def within(seconds: float, work: Any) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@pytest.mark.parametrize("alive", [False, True])
def test_only_a_part_that_is_worked_on_is_waited_for(
    alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_PATIENCE", 0.4)
    monkeypatch.setattr(build, "FolderLock", Refused)
    part = tmp_path / ".images.bin.4194305.part"
    part.write_bytes(b"half an image")
    done = threading.Event()

    def enter() -> None:
        with build._alone_in(tmp_path):
            pass

    def work() -> None:
        while not done.wait(0.05):
            os.utime(part)

    if alive:
        worker = threading.Thread(target=work)
        worker.start()
    try:
        assert within(2.0, enter) is not alive
    finally:
        done.set()


def test_a_file_that_is_being_filled_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "_BEAT", 0.02)
    seen = set()

    def fill(images: torch.Tensor) -> Any:
        (part,) = tmp_path.glob(".*.part")
        ends = time.monotonic() + 5
        while len(seen) < 3 and time.monotonic() < ends:
            seen.add(part.stat().st_mtime_ns)
            time.sleep(0.02)
        return torch.tensor([[2, 2]]), torch.tensor([0]), []

    file_format.write_file(tmp_path / "images.bin", "mark", (1, 3, 2, 2), fill)
    assert len(seen) == 3 and file_format.open_file(tmp_path / "images.bin", "mark") is not None


# -- which images an entry is of


def bitmaps(folder: Path, seed: int) -> Path:
    """Files of one size and one time, whatever they show: as some archives leave them."""
    generator = np.random.default_rng(seed)
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for number in range(3):
            path = folder / name / f"{number}.bmp"
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
            os.utime(path, (0, 0))
    return folder


def test_datasets_with_the_same_names_sizes_and_times_are_told_apart(tmp_path: Path) -> None:
    def train(folder: Path) -> Any:
        return open_data(str(folder), split="given").splits["train"]

    one, other = (train(bitmaps(tmp_path / name, seed)) for seed, name in enumerate(("one", "other")))
    assert one.fingerprint() != other.fingerprint()
    assert join(one, one.subset([0])).fingerprint() != join(other, other.subset([0])).fingerprint()
    kept = [store_of(part, 8, where="disk", cache_dir=tmp_path / "cache").images for part in (one, other)]
    assert not torch.equal(kept[0], kept[1])


def test_a_moved_dataset_keeps_its_fingerprint(tmp_path: Path) -> None:
    before = open_data(str(bitmaps(tmp_path / "here", 0)), split="given").splits["train"].fingerprint()
    (tmp_path / "here").rename(tmp_path / "there")
    assert open_data(str(tmp_path / "there"), split="given").splits["train"].fingerprint() == before


@pytest.mark.parametrize("packed", [False, True])
def test_a_copied_dataset_can_be_told_by_its_content(packed: bool, tmp_path: Path) -> None:
    folder = bitmaps(tmp_path / "images", 0)
    if packed:
        pack(open_data(str(folder), split="given"), tmp_path / "shards")
        folder = tmp_path / "shards"
        for index in folder.glob("*.json"):
            index.unlink()  # as with shards that others have written

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
def test_odd_files_have_a_fingerprint_too(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")  # reading it would wait for ever
    names = [str(tmp_path / name) for name in ("missing", "folder", "fifo")]
    prints: list[str] = []
    assert within(5.0, lambda: prints.append(FileExamples(names, None).fingerprint()))
    assert prints and FileExamples([], None).fingerprint() != prints[0]
