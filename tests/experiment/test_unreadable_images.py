"""A dataset with an unreadable image gives the same weights with every cache location."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.cache import build
from frugalvit.data.cache.on_demand import OnDemandStore
from frugalvit.data.cache.store import CachedStore
from frugalvit.data.dataset import ArrayExamples
from frugalvit.errors import UserError
from frugalvit.runs.data_record import record_data_usage
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, write_images


def photos(folder: Path) -> Path:
    """Two images of train and one of val are broken."""
    images = write_images(folder, train=12, val=5, classes=("cat", "cow", "dog"))
    for broken in ("train/cat/11.png", "train/dog/0.png", "val/cow/2.png"):
        (images / broken).write_bytes(b"this is not an image")
    return images


def finished(kind: str, where: str, folder: Path, **more: Any) -> Path:
    out = folder / f"{kind}_{where}"
    values = {"out": str(out), "workers": 0, "device": "cpu", "steps": 8}
    values["cache"] = {"where": where, "folder": str(folder / "cache"), "max_bad": 0.1}
    if kind == "train":
        train(TrainConfig.parse(TRAIN | values | more))
    else:
        pretrain(PretrainConfig.parse(PRETRAIN | values | more))
    return out


@pytest.mark.parametrize(
    ("kind", "more"),
    [("train", {}), ("train", {"labels": 0.5, "seed": 1}), ("train", {"balance": True}), ("pretrain", {})],
    ids=["train", "labels", "balance", "pretrain"],
)
def test_same_weights_with_every_cache_location(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    images = photos(tmp_path / "photos")
    runs = {where: finished(kind, where, tmp_path, data=str(images), **more) for where in ("ram", "disk", "off")}
    assert [differences(runs["ram"], run) for run in runs.values()] == [[]] * 3
    if kind == "train":
        summaries = [json.loads((run / "summary.json").read_text()) for run in runs.values()]
        assert {summary["scored_images"] for summary in summaries} == {14}, "val has 15, of which 14 can be scored"
    records = [json.loads((run / "data.json").read_text()) for run in runs.values()]
    assert all("train" in {file["split"] for file in record["left_out"]["files"]} for record in records)
    if not more:
        assert all(record["used"]["train"] == 34 for record in records)


def test_resume_with_less_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that started with cached images resumes with images decoded on demand."""
    images = photos(tmp_path / "photos")
    whole = finished("train", "auto", tmp_path, data=str(images))
    after_step = ClassificationTask.after_step

    def stop(self: ClassificationTask, step: int, *more: Any) -> None:
        after_step(self, step, *more)
        if step == 5:
            raise UserError("the power is gone")

    with monkeypatch.context() as cut:
        cut.setattr(ClassificationTask, "after_step", stop)
        with pytest.raises(UserError, match="the power is gone"):
            finished("train", "auto", tmp_path, data=str(images), out=str(tmp_path / "cut"))
    monkeypatch.setattr(build, "available_memory", lambda: 0)
    monkeypatch.setattr(build, "_has_space", lambda *_: False)
    train(TrainConfig.parse({"resume": str(tmp_path / "cut")}))
    assert "not cached: workers decode them" in capsys.readouterr().err
    assert differences(whole, tmp_path / "cut") == []
    one, other = (json.loads((run / "data.json").read_text()) for run in (whole, tmp_path / "cut"))
    assert one["used"] == other["used"] == {"train": 34, "val": 14}
    assert sorted(map(str, one["left_out"]["files"])) == sorted(map(str, other["left_out"]["files"]))


def test_skipped_files_survive_a_resume(tmp_path: Path) -> None:
    """With images decoded on demand, the first part of the run may have found some that the second does not read."""
    examples = ArrayExamples(np.zeros((9, 8, 8, 3), np.uint8), None, "images")
    lazy = OnDemandStore(examples, (8, 8), torch.device("cpu"), workers=0, limit=9)
    kept = CachedStore.from_arrays(np.zeros((5, 3, 8, 8), np.uint8))
    run = RunFolder(tmp_path)
    entries = [{"name": name, "split": split, "reason": "cut"} for name, split in (("a", "train"), ("b", "val"))]
    run.save_json("data.json", {"images": 9, "left_out": {"count": 2, "files": entries}})
    lazy.unreadable.append(("c", "cut"))
    for _ in range(2):
        record_data_usage(run, [], {"train": lazy, "val": kept})
        facts = run.read_json("data.json")
        assert facts["used"] == {"train": 7, "val": 5} and facts["left_out"]["count"] == 2
        assert [file["name"] for file in facts["left_out"]["files"]] == ["c", "a"], "b can be read now"
    run.close()
