"""A step that went wrong, run again from what it left behind: the very same step, or a plain word that it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.cli import main as cli
from frugalvit.cli.replay import _rebuild, replay
from frugalvit.config.train import ReplayConfig, TrainConfig
from frugalvit.data.loader import Batch
from frugalvit.errors import UserError
from frugalvit.experiment.drloc_pairs import BatchShard
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.classification.train import train
from helpers.tiny_runs import TRAIN, write_images
from helpers.toy_task import ToyTask, run_toy


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("replay") / "images")


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.main([*words])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.mark.parametrize("part", [0, 1, None])
def test_the_step_replayed_is_the_one_that_went_wrong(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, part: int | None
) -> None:
    """Another seed than 0 and a step in parts, of which one has a bad image, or none has a fault that can be repeated.

    The same pairs are asked about and the same branches dropped, so every loss is the run's.
    """
    seen: dict[int, dict[str, float]] = {}
    forward, batch_at = ClassificationTask.forward, ClassificationTask.batch_at

    def watched(self: ClassificationTask, batch: Batch, step: int) -> dict[str, torch.Tensor]:
        losses = forward(self, batch, step)
        seen[batch.number] = {name: value.item() for name, value in losses.items()}
        if part is None:
            losses["loss"].register_hook(lambda gradient: gradient * torch.nan)
        return losses

    def spoilt(self: ClassificationTask, number: int) -> Batch:
        batch = batch_at(self, number)
        if number % 2 == part:
            batch.images[1, 0, 2, 3] = torch.nan
        return batch

    values: dict[str, Any] = {"steps": 5, "log_every": 1, "precision": "32", "seed": 5, "accumulate": 2}
    values |= {"drop_path": 0.5, "data": str(images), "out": str(tmp_path / "run"), "device": "cpu"}
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(ClassificationTask, "forward", watched)
        patch.setattr(ClassificationTask, "batch_at", spoilt)
        with pytest.raises(UserError, match="frugalvit replay"):
            train(TrainConfig.parse(TRAIN | values))
    (path,) = (run / "fault").iterdir()
    evidence = torch.load(path, weights_only=True)
    assert (evidence["step"], evidence["number"], evidence["world"], len(evidence["parts"])) == (4, 8, 1, 2)
    result = replay(ReplayConfig(evidence=str(run)))
    losses = {str(name): float(str(value)) for name, value in result.tables[0].rows}
    replayed = 8 + (1 if part is None else part)
    assert losses == pytest.approx(seen[replayed], rel=1e-5, nan_ok=True)
    if part is None:
        assert result.notes == ["everything is finite here: the fault needs the other device (all 2 parts of the step)"]
        assert losses["localization"] != pytest.approx(seen[8]["localization"], rel=1e-3), "the test could not fail"
    else:
        assert result.notes == [f"first bad tensor: input batch.images (part {part + 1} of 2)"]
        assert result.data["part"] == part
    task, _ = _rebuild(run, evidence | {"process": 1, "world": 2})
    assert task.share == BatchShard(5, 1, 2)


def test_evidence_of_an_earlier_version_is_one_part(tmp_path: Path, images: Path) -> None:
    run = tmp_path / "run"
    train(TrainConfig.parse(TRAIN | {"data": str(images), "out": str(run), "device": "cpu", "steps": 1}))
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["task"]
    batch = {"batch.images": torch.randn(4, 3, 16, 16), "batch.targets": torch.rand(4, 2).softmax(1)}
    evidence = {"task": state, "batch": batch, "step": 3, "kind": "ClassificationTask", "steps": 5, "classes": 2}
    evidence |= {"steps_per_epoch": 3, "log_every": 1, "seed": 0, "process": 0}
    (run / "fault").mkdir()
    torch.save(evidence, run / "fault" / "step_3_process_0.pt")
    assert replay(ReplayConfig(evidence=str(run))).notes == [
        "everything is finite here: the fault needs the other device"
    ]


def test_runs_that_cannot_be_replayed_are_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither does the line of the fault send anybody there, nor does replay take them for another kind."""
    with pytest.raises(UserError, match="5 steps in a row") as fault:
        run_toy(tmp_path / "run", ToyTask(dict.fromkeys(range(20), "input")), log_every=1)
    assert "The batch and the state are in" in str(fault.value) and "replay" not in str(fault.value)
    status, said = command(capsys, "replay", str(tmp_path / "run"))
    assert status == 2 and "cannot build again" in said and "Traceback" not in said, said
