"""A recorded step against the step it is a recording of. On a CPU something that does the step again stands for the
graph; the graph itself is tested where there is a GPU (``test_compiling``, ``test_resume_on_gpu``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.config.probe import BenchStepConfig
from frugalvit.errors import UserError
from frugalvit.training import recording, stepbench
from frugalvit.training.recording import WARM_UP, Recording
from frugalvit.training.schedules import Cosine
from frugalvit.training.stepping import Stepper

Values = dict[str, Tensor]

OWNERS: list[Any] = []
"""The optimiser whose steps are recorded now."""


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a graph does, done anew: the very tensors, and rates, that were there when it was recorded."""
    replays: list[Any] = []

    def record(action: Callable[[], Values], stream: Any) -> tuple[Callable[[], None], Values]:
        (owner,) = OWNERS
        rates, values = [group["lr"] for group in owner.param_groups], {}
        assert all(isinstance(rate, Tensor) for rate in rates)
        assert all(group["capturable"] for group in owner.param_groups)

        def replay() -> None:
            replays.append(action)
            before = [group["lr"] for group in owner.param_groups]
            for group, rate in zip(owner.param_groups, rates, strict=True):
                group["lr"] = rate
            values.update(action())
            for group, rate in zip(owner.param_groups, before, strict=True):
                group["lr"] = rate

        return replay, values

    monkeypatch.setattr(recording, "record", record)
    monkeypatch.setattr(recording, "aside", lambda action, stream: action())
    return replays


def stepper_of(recorded: bool, localization: float) -> Stepper:
    config = BenchStepConfig.parse(
        {"kind": "train", "backbone": "swin_nano", "img_size": 32, "batch": 4, "localization": localization}
        | {"device": "cpu", "precision": "32"}
    )
    fabric = Fabric(accelerator="cpu", devices=1)
    store, classes, _ = stepbench._store(config, fabric.device)
    stepper = stepbench._stepper(config, stepbench._batches(config, store, classes), classes, fabric, False)
    stepper.plan.lr = Cosine(1e-3, 1e-4, 12)
    stepper.task.recorded = recorded
    OWNERS[:] = [stepper.inner]
    return stepper


@pytest.mark.parametrize("localization", [0.5, 0.0])
def test_a_recorded_step_is_the_step(localization: float, without_a_gpu: list[Any]) -> None:
    """Other images, targets, pairs, stochastic depth and learning rates at every step, and the same weights."""
    ends = []
    for recorded in (False, True):
        stepper = stepper_of(recorded, localization)
        losses = []
        for step in range(WARM_UP + 4):
            stepper.step, stepper.window = step, {}
            stepper.one_step()
            losses.append({name: row[names.index(name)] for names, row in stepper.window.items() for name in names})
        ends.append((losses, dict(stepper.task.state_dict()), [group["lr"] for group in stepper.inner.param_groups]))
    assert len(without_a_gpu) == 4
    torch.testing.assert_close(ends[1], ends[0])
    assert isinstance(ends[1][2][0], float)  # a checkpoint holds numbers


def toy_recording() -> tuple[Recording, nn.Parameter]:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.param_groups[0]["capturable"] = False

    def advance(images: Tensor, more: Tensor | None) -> Values:
        optimizer.zero_grad()
        loss = (weight * images.sum(0)).sum() + (0 if more is None else more.sum() * weight.sum())
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach().clone()}

    OWNERS[:] = [optimizer]
    return Recording(advance, optimizer, torch.device("cpu")), weight


def test_every_shape_has_its_own(without_a_gpu: list[Any]) -> None:
    """A smaller last batch, and a step that lacks a tensor."""
    made, weight = toy_recording()
    plain = torch.zeros(2)
    for step in range(40):
        images = torch.full((3 if step % 4 else 2, 2), float(step))
        more = torch.ones(1) if step % 2 else None
        made.take([images, more])
        plain -= images.sum(0) + (0 if more is None else 1)
        torch.testing.assert_close(weight.detach(), plain)
    assert len(made.recorded) == 3
    assert len(without_a_gpu) == 40 - 3 * WARM_UP


def test_what_cannot_be_recorded(without_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = toy_recording()

    def refuse(action: Any, stream: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(recording, "record", refuse)
    for _ in range(WARM_UP):
        made.take([torch.ones(2, 2), None])
    with pytest.raises(UserError, match=r"operation not permitted when stream is capturing.*Use --compile true"):
        made.take([torch.ones(2, 2), None])
    assert made.optimizer.param_groups[0]["lr"] == 1.0 and not made.optimizer.param_groups[0]["capturable"]

    def full(action: Any, stream: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(recording, "record", full)
    with pytest.raises(torch.OutOfMemoryError):
        made.take([torch.ones(2, 2), None])
