"""A dataset with an unreadable image gives the same weights with every cache location."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frugalvit.data.cache import build
from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.dataset import ArrayExamples
from frugalvit.runs.data_record import record_data_usage
from frugalvit.runs.run_folder import RunFolder
from helpers.tiny_runs import differences, interrupted_at, run_tiny, write_images

FLOOR = ("summary.json: floor", "summary.json: alarms")


def write_damaged(folder: Path) -> Path:
    """Write images of which two in train and one in val are unreadable."""
    images = write_images(folder, train=12, val=5, classes=("cat", "cow", "dog"))
    for broken in ("train/cat/11.png", "train/dog/0.png", "val/cow/2.png"):
        (images / broken).write_bytes(b"this is not an image")
    return images


def run(verb: str, where: str, folder: Path, **values: Any) -> Path:
    """Train with this cache location; return the run folder."""
    cache = {"location": where, "folder": str(folder / "cache"), "max_bad": 0.1}
    run_tiny(verb, **{"out": folder / where, "workers": 0, "steps": 8, "cache": cache} | values)
    return folder / where


@pytest.mark.parametrize(
    ("kind", "more"),
    [("train", {}), ("train", {"labels": 0.5, "seed": 1}), ("train", {"balance": True}), ("pretrain", {})],
    ids=["train", "labels", "balance", "pretrain"],
)
def test_same_weights_with_every_cache_location(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    images = write_damaged(tmp_path / "photos")
    runs = {where: run(kind, where, tmp_path, data=images, **more) for where in ("ram", "disk", "off")}
    # Without a cache there is no floor: it would decode all images again.
    found = [[name for name in differences(runs["ram"], run) if name not in FLOOR] for run in runs.values()]
    assert found == [[]] * 3
    if kind == "train":
        summaries = [json.loads((run / "summary.json").read_text()) for run in runs.values()]
        assert {summary["scored_images"] for summary in summaries} == {14}, "one of 15 in val is unreadable"
    records = [json.loads((run / "data.json").read_text()) for run in runs.values()]
    assert all("train" in {file["split"] for file in record["left_out"]["files"]} for record in records)
    if not more:
        assert all(record["used"]["train"] == 34 for record in records)


def test_resume_with_less_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started in RAM, resumed with images that are decoded while training: the result is the same."""
    images = write_damaged(tmp_path / "photos")
    complete = run("train", "auto", tmp_path, data=images)
    with interrupted_at(6):
        run("train", "auto", tmp_path, data=images, out=tmp_path / "cut")
    monkeypatch.setattr(build, "available_memory", lambda: 0)
    monkeypatch.setattr(build, "_has_space", lambda *_: False)
    run_tiny("train", resume=tmp_path / "cut")
    assert "not cached" in capsys.readouterr().err
    assert [name for name in differences(complete, tmp_path / "cut") if name not in FLOOR] == []
    one, other = (json.loads((run / "data.json").read_text()) for run in (complete, tmp_path / "cut"))
    assert one["used"] == other["used"] == {"train": 34, "val": 14}
    assert sorted(map(str, one["left_out"]["files"])) == sorted(map(str, other["left_out"]["files"]))


def test_skipped_files_survive_a_resume(tmp_path: Path) -> None:
    """Images that are decoded while training may have been skipped before the run was interrupted."""
    examples = ArrayExamples(np.zeros((9, 8, 8, 3), np.uint8), None, "images")
    lazy = OnDemandStore(examples, (8, 8), torch.device("cpu"), workers=0, limit=9)
    cached = CachedStore.from_arrays(np.zeros((5, 3, 8, 8), np.uint8))
    run = RunFolder(tmp_path)
    entries = [{"name": name, "split": split, "reason": "cut"} for name, split in (("a", "train"), ("b", "val"))]
    run.save_json("data.json", {"images": 9, "left_out": {"count": 2, "files": entries}})
    lazy.unreadable.append(("c", "cut"))
    for _ in range(2):
        record_data_usage(run, [], {"train": lazy, "val": cached})
        facts = run.read_json("data.json")
        assert facts["used"] == {"train": 7, "val": 5} and facts["left_out"]["count"] == 2
        assert [file["name"] for file in facts["left_out"]["files"]] == ["c", "a"], "b can be read now"
    run.close()
