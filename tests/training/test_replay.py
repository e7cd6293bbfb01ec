"""A step that went wrong, run again from what it left behind: the very same step, or a plain word that it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TRAIN, write_images
from toys import ToyTask, run_toy

from frugalvit import cli
from frugalvit.config.train import ReplayConfig, TrainConfig
from frugalvit.data.loader import Batch
from frugalvit.errors import UserError
from frugalvit.training.commands import train
from frugalvit.training.localizing import Share
from frugalvit.training.replay import _rebuild, replay
from frugalvit.training.supervised import SupervisedTask


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("replay") / "images")


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.main([*words])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_the_step_replayed_is_the_one_that_went_wrong(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed than 0 and a step in parts: the same pairs are asked about, so every loss is the run's."""
    seen: dict[int, dict[str, float]] = {}
    forward = SupervisedTask.forward

    def spoilt(self: SupervisedTask, batch: Batch, step: int) -> dict[str, torch.Tensor]:
        losses = forward(self, batch, step)
        seen[batch.number] = {name: value.item() for name, value in losses.items()}
        losses["loss"].register_hook(lambda gradient: gradient * torch.nan)
        return losses

    values: dict[str, Any] = {"steps": 5, "log_every": 1, "precision": "32", "seed": 5, "accumulate": 2}
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(SupervisedTask, "forward", spoilt)
        with pytest.raises(UserError, match="frugalvit replay"):
            train(TrainConfig.parse(TRAIN | values | {"data": str(images), "out": str(run), "device": "cpu"}))
    (path,) = (run / "fault").iterdir()
    evidence = torch.load(path, weights_only=True)
    assert (evidence["step"], evidence["number"], evidence["world"]) == (4, 8, 1)
    losses = {str(name): float(str(value)) for name, value in replay(ReplayConfig(evidence=str(run))).tables[0].rows}
    assert losses == pytest.approx(seen[8], rel=1e-5)
    assert losses["localization"] != pytest.approx(seen[9]["localization"], rel=1e-3), "the test could not fail"
    task, _ = _rebuild(run, evidence | {"process": 1, "world": 2})
    assert task.share == Share(5, 1, 2)


def test_runs_that_cannot_be_replayed_are_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither does the line of the fault send anybody there, nor does replay take them for another kind."""
    with pytest.raises(UserError, match="5 steps in a row") as fault:
        run_toy(tmp_path / "run", ToyTask(dict.fromkeys(range(20), "input")), log_every=1)
    assert "The batch and the state are in" in str(fault.value) and "replay" not in str(fault.value)
    status, said = command(capsys, "replay", str(tmp_path / "run"))
    assert status == 2 and "cannot build again" in said and "Traceback" not in said, said
