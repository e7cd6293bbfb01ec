"""``frugalvit data pack`` writes decoded images beside the shards: training on them decodes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from frugalvit.cli import main as cli
from frugalvit.data import open_data
from frugalvit.data.cache import build
from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.decode import UnreadableImage
from frugalvit.data.webdataset.index import parse_index
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.shards import ShardExamples
from frugalvit.errors import UserError
from helpers.shards import photos


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    source = open_data(photos(tmp_path / "photos"), split="given")
    pack(source, tmp_path / "out", shard_megabytes=0.005, decoded=True, img_size=5)
    return tmp_path / "out"


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ShardExamples, "read", refuse)
    monkeypatch.setattr(build, "decode_all", refuse)


@pytest.mark.parametrize("where", ["auto", "ram", "disk"])
def test_nothing_is_decoded_again(packed: Path, no_decoding: None, where: str) -> None:
    for split, examples in open_data(packed, split="given").splits.items():
        store = build_store(examples, 5, where=where)
        assert len(store) == 12 and store.labels.tolist() == examples.labels.tolist(), split


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_part_of_a_split_is_not_decoded_either(
    packed: Path, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    """A val that is made from train takes its rows of train's file."""
    source = open_data(packed, split="remake", val_fraction=0.3)
    plain = {split: build_store(_without(examples), 5) for split, examples in source.splits.items()}
    request.getfixturevalue("no_decoding")
    for split in ("train", "val"):
        store = build_store(source.splits[split], 5, where=where, cache_dir=tmp_path / "cache")
        assert torch.equal(store.images, plain[split].images) and torch.equal(store.sizes, plain[split].sizes)
        assert torch.equal(store.labels, plain[split].labels) and store.names == plain[split].names


def test_a_copy_keeps_its_decoded_images(packed: Path, tmp_path: Path, no_decoding: None) -> None:
    shutil.copytree(packed, tmp_path / "copy")  # with new times
    assert len(build_store(open_data(tmp_path / "copy", split="given").splits["train"], 5)) == 12


def test_other_sizes_and_changed_shards_are_decoded(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = open_data(packed, split="given").splits["train"]
    before = train.fingerprint()
    assert len(build_store(train, 16)) == 12 and "are of other sizes" in capsys.readouterr().err
    first = sorted(packed.glob("train-*.tar"))[0]
    first.write_bytes(first.read_bytes() + b"\0" * 10240)
    changed = open_data(packed, split="given").splits["train"]
    assert changed.fingerprint() != before
    build_store(changed, 5)
    assert "are of other shards" in capsys.readouterr().err


def test_a_damaged_file_is_said_and_decoded_again(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = packed.glob("train-*.decoded")
    content = bytearray(file.read_bytes())
    content[-3] ^= 0xFF
    file.write_bytes(content)
    store = build_store(open_data(packed, split="given").splits["train"], 5)
    assert len(store) == 12 and "is damaged" in capsys.readouterr().err


def test_an_image_that_cannot_be_decoded_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = photos(tmp_path / "photos")
    (root / "train" / "cat" / "Photo 0 (é).png").rename(root / "train" / "cat" / "zoo.png")
    real = ShardExamples.read

    def read(self: ShardExamples, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        if "zoo" in self.names[index]:
            raise UnreadableImage(self.names[index], "its pixels are broken")
        return real(self, index, at_least)

    monkeypatch.setattr(ShardExamples, "read", read)
    pack(open_data(root, split="given"), tmp_path / "out", decoded=True, img_size=5)
    train = open_data(tmp_path / "out", split="given").splits["train"]
    for examples in (train, train.subset(range(1, 12)), train.subset(range(11))):
        has_it = any("zoo" in name for name in examples.names)
        store = build_store(examples, 5, max_bad=0.2)
        assert isinstance(store, ImageStore) and store.names == examples.names
        assert store.readable == len(examples) - has_it and len(store.bad) == has_it
        assert [i for i, name in enumerate(examples.names) if "zoo" not in name] == store.kept.tolist()


def test_the_command_writes_them_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = photos(tmp_path / "photos")
    assert cli.main(["data", "pack", str(root), str(tmp_path / "out"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["decoded"]
    assert [entry["split"] for entry in written] == ["train", "test"]
    index = parse_index((tmp_path / "out" / "index.json").read_bytes())
    assert index is not None and all((tmp_path / "out" / file.file).exists() for file in index.decoded)
    assert cli.main(["data", "pack", str(root), str(tmp_path / "without"), "--no-decoded", "--quiet"]) == 0
    assert not list((tmp_path / "without").glob("*.decoded"))


def _without(examples: ShardExamples) -> ShardExamples:
    plain = examples.subset(range(len(examples)))
    plain.decoded = None
    return plain


def test_the_working_folder_can_be_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no name to put a staging folder beside, and must not be replaced by another of the same name."""
    photos(tmp_path / "photos")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = Path().stat().st_ino
    assert cli.main(["data", "pack", "../photos", ".", "--quiet"]) == 0, capsys.readouterr().err
    assert cli.main(["data", "pack", "../photos", "../there", "--quiet"]) == 0
    names = sorted(path.name for path in Path("../there").iterdir())
    assert sorted(path.name for path in Path().iterdir()) == names and "index.json" in names
    assert Path().stat().st_ino == (tmp_path / "here").stat().st_ino == before
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["here", "photos", "there"]
    assert len(open_data(".", split="given")) == len(open_data("../there", split="given")) == 24
    assert cli.main(["data", "pack", "../photos", "."]) == 2 and "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("out", [".", "../out"])
def test_what_a_killed_packing_left_goes_with_the_next(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos(tmp_path / "photos")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["data", "pack", "../photos", out, "--quiet"]
    killed = (
        "import os; from frugalvit.cli import main as cli; from frugalvit.data import pack\n"
        f"pack._write_index = lambda *_: os.kill(os.getpid(), 9)\ncli.main({words})"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert list(tmp_path.rglob(".*.partial/new/train-000000.tar"))
    assert cli.main(words) == 0, capsys.readouterr().err
    assert not list(tmp_path.rglob(".*")) and len(open_data(out, split="given")) == 24


@pytest.mark.parametrize("out", [".", "out"])
def test_a_folder_that_was_filled_meanwhile_is_left_alone(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_data(str(photos(tmp_path / "photos")), split="given")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    mine = Path(out) / "train-000000.tar"

    def fill(*_: object) -> None:
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")

    monkeypatch.setattr("frugalvit.data.webdataset.pack._write_index", fill)
    with pytest.raises(UserError, match="filled by somebody else meanwhile"):
        pack(source, Path(out))
    assert mine.read_text() == "mine" and [path.name for path in mine.parent.iterdir()] == [mine.name]
