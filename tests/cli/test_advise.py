"""What advise measures is the step that a run takes."""

from __future__ import annotations

import pytest
from lightning_fabric import Fabric

from frugalvit.cli.advise import _time_step
from frugalvit.engine.step import TrainStep
from helpers.toy_task import ToyTask, toy_plan


def test_the_step_that_is_timed_is_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping and what comes before the optimiser (the centres of pre-training move there) take their time too."""
    done: list[str] = []
    task, clip = ToyTask(), TrainStep._clip
    monkeypatch.setattr(task, "before_optimizer", lambda step: done.append(f"before {step}"))
    monkeypatch.setattr(TrainStep, "_clip", lambda self: done.append("clip") or clip(self))
    monkeypatch.setattr(task, "after_step", lambda step, skipped: done.append(f"after {step}"))
    before = task.linear.weight.detach().clone()
    assert _time_step(task, toy_plan(clip=1.0), Fabric(accelerator="cpu", devices=1), 2, "a toy") > 0
    assert done == [word for step in range(3) for word in (f"before {step}", "clip", f"after {step}")]
    assert not before.equal(task.linear.weight)
