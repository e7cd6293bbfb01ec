"""frugalvit replay repeats exactly the step that failed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.cli import main as cli
from frugalvit.cli.replay import _rebuild, replay
from frugalvit.config.train import ReplayConfig, TrainConfig
from frugalvit.data.loader import Batch, BatchShard
from frugalvit.errors import UserError
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.classification.train import train
from helpers.tiny_runs import TRAIN, write_images
from helpers.toy_task import ToyTask, run_toy


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("replay") / "images")


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.main([*words])
    output = capsys.readouterr()
    return status, output.out + output.err


@pytest.mark.parametrize("part", [0, 1, None])
def test_replay_computes_the_losses_of_the_run(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, part: int | None
) -> None:
    """With a seed other than 0 and a step in two parts: a NaN in one of them, or a fault that cannot be repeated.

    Drloc's pairs and stochastic depth are the same, so every loss is that of the run.
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
        assert result.notes[0].startswith("all tensors are finite") and "2 parts" in result.notes[0]
        assert losses["localization"] != pytest.approx(seen[8]["localization"], rel=1e-3), "the parts differ"
    else:
        assert result.notes == [f"first non-finite tensor: input batch.images (part {part + 1} of 2)"]
        assert result.data["part"] == part
    task, _ = _rebuild(run, evidence | {"process": 1, "world": 2})
    assert task.share == BatchShard(5, 1, 2)


def test_other_runs_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither does the error suggest replay, nor does replay take them for another kind."""
    with pytest.raises(UserError, match="5 steps in a row") as fault:
        run_toy(tmp_path / "run", ToyTask(dict.fromkeys(range(20), "input")), log_every=1)
    assert "The batch and the state are in" in str(fault.value) and "replay" not in str(fault.value)
    status, output = command(capsys, "replay", str(tmp_path / "run"))
    assert status == 2 and "pretrain' only" in output and "Traceback" not in output, output
