"""``benchmarks/side_by_side.py`` with a tiny network: every side takes its steps, and a missing peer is named."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import side_by_side
from frugalvit.errors import UserError

TINY = "--backbone swin_nano --img-size 16 --batch 4 --local-crops 1 --hidden 8 --prototypes 16 --workers 0 --repeats 1"
RATES = TINY + " --steps 1 --device cpu --cores 1 --json"


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """The script allows TF32; other tests expect PyTorch's own setting."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images to train on and four to score, in two classes."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 128, (20, 24, 3)) + 100 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{i}.jpg")
    return folder


def run(
    photos: Path, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    """Run the script; return its JSON and the table."""
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", str(photos), *f"{RATES} {arguments}".split()])
    side_by_side.main()
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_supervised_step_beside_timm(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    result, table = run(photos, "--task supervised", monkeypatch, capsys)
    names = [(row["side"], row["input"]) for row in result["rows"]]
    assert names == [(side, source) for source in ("files", "memory") for side in ("timm", "frugalvit")]
    for row in result["rows"]:
        assert row["images_per_second"]["mean"] > 0
        assert ("times_the_peer" in row) == (row["side"] == "frugalvit")
    assert "decoding_s" in result["rows"][1] and "| timm | files |" in table
    assert {"torch", "commit", "device", "timm", "batch", "precision"} <= result.keys()
    assert result["device"].endswith("CPU") and result["precision"] == "32"
    assert torch.get_num_threads() == threads


def test_label_free_step_beside_lightly(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightly", reason="lightly is not a dependency: pip install lightly")
    result, _ = run(photos, "--task label-free --until 0 --epochs 1", monkeypatch, capsys)
    sides = ["lightly", "frugalvit", "frugalvit, region loss"]
    assert [row["side"] for row in result["rows"]] == 3 * sides
    for row in result["rows"][6:]:
        assert row["reached"] == "1 of 1" and row["minutes"]["mean"] > 0
        assert row["runs"][0]["scored_on"] == "val" and len(row["runs"][0]["scores"]) == 1


def test_missing_peer_is_named(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_by_side, "is_missing", lambda name: name == "lightly")
    result, table = run(photos, "--task label-free", monkeypatch, capsys)
    assert "lightly is not installed" in table
    assert {row["side"] for row in result["rows"]} == {"frugalvit", "frugalvit, region loss"}
    assert not any("times_the_peer" in row for row in result["rows"])


def test_peer_network_must_be_as_large(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="resnet18"):
        run(photos, "--task supervised --peer-backbone resnet18", monkeypatch, capsys)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="binding to cores needs Linux")
def test_cores_are_limited_and_restored() -> None:
    before = os.sched_getaffinity(0)
    with side_by_side.limited_to(1) as cores:
        assert cores == len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
    with pytest.raises(UserError, match="--cores"), side_by_side.limited_to(len(before) + 1):
        pass
