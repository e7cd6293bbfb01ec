"""The cache file: read again, rebuilt if damaged, shared by processes, nothing left by a killed writer."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from frugalvit.data.cache import build, store
from frugalvit.data.cache.store import CachedStore
from frugalvit.errors import UserError
from helpers.image_cache import no_decoding, only_file, store_of, write_images


def cached(folder: Path, examples: Any, **keywords: Any) -> CachedStore:
    return store_of(examples, where="disk", cache_dir=folder / "cache", **keywords)


def test_the_file_is_read_instead_of_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = write_images(tmp_path / "photos", count=8, bad=(3,))
    first = cached(tmp_path, examples, max_bad=0.2)
    monkeypatch.setattr(build, "decode_all", no_decoding)
    monkeypatch.setattr(build, "_WORTH_WRITING", -1.0)  # as if decoding took long: RAM is filled from the file too
    for where in ("disk", "ram"):
        again = store_of(examples, where=where, cache_dir=tmp_path / "cache", max_bad=0.2)
        assert torch.equal(again.images, first.images) and again.unreadable == first.unreadable
        assert torch.equal(again.sizes, first.sizes) and torch.equal(again.index, first.index)
    assert not list((tmp_path / "cache").rglob("*.part"))
    assert store.open_file(only_file(tmp_path / "cache"), "another fingerprint") is None


def test_a_changed_source_is_decoded_again(tmp_path: Path) -> None:
    examples = write_images(tmp_path / "photos")
    cached(tmp_path, examples)
    Image.new("RGB", (30, 40), (9, 9, 9)).save(examples.names[2])
    os.utime(examples.names[2], (1, 1))
    assert (cached(tmp_path, examples).images[2] == 9).all()


@pytest.mark.parametrize("damage", ["tables", "header", "end", "short facts", "short", "long", "empty"])
def test_a_damaged_file_is_rebuilt(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = write_images(tmp_path / "photos")
    good = cached(tmp_path, examples).images.clone()
    path = only_file(tmp_path / "cache")
    if damage in ("short", "long", "empty"):
        content = path.read_bytes()
        path.write_bytes({"short": content[:-7], "long": content + b"x", "empty": b""}[damage])
    else:
        facts = path.with_suffix(".pt")
        content = bytearray(facts.read_bytes())
        sizes = torch.tensor([[40, 30]] * 6).numpy().tobytes()
        position = {"tables": content.index(sizes) + 3, "header": content.index(b"shape"), "end": -2}.get(damage)
        if position is not None:
            content[position] ^= 0xFF
        facts.write_bytes(content[:-7] if damage == "short facts" else content)
    assert torch.equal(cached(tmp_path, examples).images, good)
    assert "damaged" in capsys.readouterr().err


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    """The next process gets the lock, removes the part, and decodes."""
    examples = write_images(tmp_path / "photos")
    code = (
        "import os, sys; from frugalvit.data.cache import build; from frugalvit.data.dataset import FileExamples\n"
        "build.decode_all = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "build.build_store(FileExamples(sys.argv[2:], None), 32, where='disk', cache_dir=sys.argv[1])"
    )
    plain = type(examples)(examples.names, None)
    arguments = [str(tmp_path / "cache"), *examples.names]
    assert subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode == -9
    assert list((tmp_path / "cache").rglob("*.part"))
    assert len(cached(tmp_path, plain)) == 6 and not list((tmp_path / "cache").rglob("*.part"))


def test_concurrent_writers_decode_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock is per open file, so threads exclude each other as processes do."""
    examples = write_images(tmp_path / "photos")
    calls = []
    real = build.decode_all

    def slow(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        threading.Event().wait(0.3)
        return real(*arguments, **keywords)

    monkeypatch.setattr(build, "decode_all", slow)
    stores: list[CachedStore] = []
    threads = [threading.Thread(target=lambda: stores.append(cached(tmp_path, examples))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(stores) == 3 and len(calls) == 1
    assert all(torch.equal(store.images, stores[0].images) for store in stores)


def test_a_folder_that_cannot_be_locked_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, or another user's entry."""

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", no_locks)
    assert len(cached(tmp_path, write_images(tmp_path / "photos"))) == 6


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_an_unwritable_cache_is_an_error_only_on_request(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = write_images(tmp_path / "photos")
    monkeypatch.setattr(build, "_WORTH_WRITING", -1.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_reserve", full)
    if where == "disk":
        with pytest.raises(UserError, match=r"No space left.*--cache\.folder"):
            cached(tmp_path, examples)
    else:
        assert len(store_of(examples, where=where, cache_dir=tmp_path / "cache")) == 6
        assert "No space left" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.part"))
