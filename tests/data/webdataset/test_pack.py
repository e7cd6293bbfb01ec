"""``frugalvit data pack``: the same data as shards, with decoded images that training uses."""

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
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.cache import build
from frugalvit.data.cache.build import build_store, check_decoded
from frugalvit.data.cache.store import CachedStore, write_file
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.shards import ShardExamples
from frugalvit.errors import UserError
from helpers.shards import photos, png


def test_packed_data_are_the_same_data(tmp_path: Path) -> None:
    source = open_data(photos(tmp_path / "photos"), split="given")
    pack(source, tmp_path / "a", shard_megabytes=0.005)
    pack(source, tmp_path / "b", shard_megabytes=0.005)
    assert len(list((tmp_path / "a").glob("train-*.tar"))) > 1
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    packed = open_data(tmp_path / "a", split="given")
    assert packed.classes == ("cat", "dog") and list(packed.splits) == ["train", "test"]
    for split, examples in source.splits.items():
        again = packed.splits[split]
        before = sorted((int(examples.labels[i]), examples.raw(i)) for i in range(len(examples)))
        after = sorted((int(again.labels[i]), again.raw(i)) for i in range(len(again)))
        assert before == after
    in_order = pack(source, tmp_path / "c", shuffle=False).data
    assert open_data(tmp_path / "c", split="given").splits["train"].labels.tolist() == [0] * 6 + [1] * 6
    assert in_order["splits"]["train"][0]["examples"] == 12


def test_several_labels_per_image_are_refused(tmp_path: Path) -> None:
    source = open_data(photos(tmp_path / "photos"), split="given")
    source.splits["test"].targets = np.ones((12, 2), dtype=np.int8)
    with pytest.raises(UserError, match="--label-source ignore"):
        pack(source, tmp_path / "out")


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    pack(open_data(photos(tmp_path / "photos"), split="given"), tmp_path / "out")
    shards = sorted(str(path) for path in (tmp_path / "out").glob("train-*.tar"))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8"))
    assert len(samples) == 12 and all(sample["png"].shape == (5, 6, 3) for sample in samples)
    assert sorted(sample["cls"] for sample in samples) == [0] * 6 + [1] * 6


def test_pack_leaves_out_bad_files_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = photos(tmp_path / "photos")
    # A name that is not UTF-8 must not damage the index.
    (root / "train" / "cat" / b"bad\xff.png".decode("utf-8", "surrogateescape")).write_bytes(png(1)[:40])
    assert cli.main(["data", "pack", str(root), str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["bad"]) == 1 and data["splits"]["train"][0]["examples"] == 12
    assert cli.main(["data", "pack", str(root), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    (tmp_path / "out" / "test-000000.tar").unlink()
    assert "lacks 1 of the shards" in open_data(tmp_path / "out").notes[0]


def test_shards_are_not_written_into_the_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = photos(tmp_path / "photos")
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    before = sorted(root.rglob("*"))
    for data, out in [("photos", "photos/train/cat/x"), ("link", "photos/shards"), ("photos", "link/shards")]:
        assert cli.main(["data", "pack", data, out]) == 2
        assert f"{out} is inside the dataset {data}" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


def test_the_next_pack_removes_what_a_killed_one_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path / "photos")
    argv = ["data", "pack", str(tmp_path / "photos"), str(tmp_path / "out"), "--quiet"]
    killed = (
        "import os; from frugalvit.cli import main as cli; from frugalvit.data.webdataset import pack\n"
        f"pack._write_index = lambda *_: os.kill(os.getpid(), 9)\ncli.main({argv})"
    )
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert list(tmp_path.rglob(".*.partial/new/train-000000.tar"))
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert not list(tmp_path.rglob(".*")) and len(open_data(tmp_path / "out", split="given")) == 24


def test_a_folder_filled_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_data(str(photos(tmp_path / "photos")), split="given")
    other = tmp_path / "out" / "train-000000.tar"

    def fill(*_: object) -> None:
        other.parent.mkdir(exist_ok=True)
        other.write_text("other")

    monkeypatch.setattr("frugalvit.data.webdataset.pack._write_index", fill)
    with pytest.raises(UserError, match=r"out \(Directory not empty\)"):
        pack(source, tmp_path / "out")
    assert other.read_text() == "other" and [path.name for path in other.parent.iterdir()] == [other.name]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    source = open_data(photos(tmp_path / "photos"), split="given")
    pack(source, tmp_path / "out", shard_megabytes=0.005, decoded=True, img_size=5)
    return tmp_path / "out"


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(build, "decode_all", refuse)


@pytest.mark.parametrize("where", ["auto", "ram", "disk"])
def test_decoded_images_are_not_decoded_again(packed: Path, tmp_path: Path, no_decoding: None, where: str) -> None:
    shutil.copytree(packed, tmp_path / "copy")  # with new times
    for folder in (packed, tmp_path / "copy"):
        examples = open_data(folder, split="given").splits["train"]
        store = build_store(examples, 5, where=where)
        assert len(store) == 12 and store.labels.tolist() == examples.labels.tolist()


def test_other_sizes_and_changed_shards_are_decoded(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = open_data(packed, split="given").splits["train"]
    before = train.fingerprint()
    assert len(build_store(train, 16)) == 12 and "another size" in capsys.readouterr().err
    first = sorted(packed.glob("train-*.tar"))[0]
    first.write_bytes(first.read_bytes() + b"\0" * 10240)
    changed = open_data(packed, split="given").splits["train"]
    assert changed.fingerprint() != before
    build_store(changed, 5)
    assert "other shards" in capsys.readouterr().err
    part = train.subset(range(5))
    assert part.decoded is None and len(build_store(part, 5)) == 5


@pytest.mark.parametrize("doctored", ["channels", "size"])
def test_doctored_decoded_images_are_not_used(packed: Path, capsys: pytest.CaptureFixture[str], doctored: str) -> None:
    """A file with correct checksums that shows other images than its shards is noticed by a run and by ``data``."""
    train = open_data(packed, split="given").splits["train"]
    honest = build_store(train, 5)
    assert isinstance(honest, CachedStore)
    assert "shows the images of its shards" in " ".join(check_decoded(train))
    path = next(packed.glob("train-*.decoded"))

    def fill(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[tuple[str, str]]]:
        images.copy_(honest.images.roll(1, 1) if doctored == "channels" else honest.images)
        return honest.sizes + (doctored == "size"), honest.index, []

    write_file(path, train.fingerprint(), tuple(honest.images.shape), fill)
    store = build_store(train, 5)
    assert isinstance(store, CachedStore) and torch.equal(store.images, honest.images)
    assert "does not show the images of its shards" in capsys.readouterr().err
    assert cli.main(["data", str(packed), "--quiet"]) == 0
    assert "Do not use it" in capsys.readouterr().out


def test_an_unreadable_image_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    store = build_store(train, 5, max_bad=0.2)
    assert isinstance(store, CachedStore) and store.names == train.names and len(store.unreadable) == 1
    assert [i for i, name in enumerate(train.names) if "zoo" not in name] == store.index.tolist()


def test_the_command_writes_decoded_images_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = photos(tmp_path / "photos")
    assert cli.main(["data", "pack", str(root), str(tmp_path / "out"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["decoded"]
    assert [entry["split"] for entry in written] == ["train"], "evaluation decodes its images in full"
    assert all((tmp_path / "out" / entry["file"]).exists() for entry in written)
    assert cli.main(["data", "pack", str(root), str(tmp_path / "without"), "--no-decoded", "--quiet"]) == 0
    assert not list((tmp_path / "without").glob("*.decoded"))
