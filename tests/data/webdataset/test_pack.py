"""``frugalvit data pack``: the same data as shards."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frugalvit.cli import main as cli
from frugalvit.data import open_data
from frugalvit.data.webdataset.pack import pack
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
