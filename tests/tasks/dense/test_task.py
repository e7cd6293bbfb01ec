"""Batch norms, schedules, best weights and evaluations of detection and segmentation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit import create_backbone
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.detection import commands
from helpers.dense_runs import Kind, detect_config
from helpers.tiny_runs import resolve


@pytest.mark.parametrize("start", [{}, {"init": "somewhere"}])
def test_batch_norms_of_pretrained_backbones_are_frozen(kind: Kind, start: dict[str, str]) -> None:
    """Batches are small. Random weights have no statistics yet, so theirs are trained."""
    backbone = create_backbone("resnet10t", img_size=64)
    config, data = resolve(kind.make_config(Path("x"), Path("y"), **start)), SimpleNamespace(classes="ab")
    task = kind.commands.make_task(config, data, backbone)
    norms = [part for part in backbone.modules() if isinstance(part, _BatchNorm)]
    assert norms and {norm.training for norm in norms} == {True}
    task.train()
    assert {norm.training for norm in norms} == {not start} and task.net.training
    task.eval()
    assert not any(part.training for part in task.modules())


@pytest.mark.parametrize(("warmup", "steps"), [(10, 10), (1500, 20)])
def test_warm_up_takes_at_most_a_fifth_of_the_run(kind: Kind, warmup: int, steps: int) -> None:
    config: Any = resolve(kind.make_config(Path("x"), Path("y"), lr=1.0, optimizer={"warmup": warmup}))
    rates = [kind.commands.make_schedule(config, 100).at(step) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3) and rates[steps - 1] < 1.0 and rates[steps] == pytest.approx(1.0)


@pytest.mark.parametrize("length", [{"steps": 100}, {"steps": None, "epochs": 50}])
def test_the_rate_falls_at_shares_of_the_run(length: dict[str, int | None]) -> None:
    config: Any = detect_config(
        Path("x"), Path("y"), lr=1.0, optimizer={"warmup": 0, "milestones": (0.6, 0.9)}, **length
    )
    rates = [commands.make_schedule(resolve(config), 100).at(step) for step in (59, 60, 89, 90, 99)]
    assert rates == pytest.approx([1.0, 0.1, 0.1, 0.01, 0.01])


LAST, EARLIER = (0.0, 0.5), (0.5, 0.0)
"""Scores at steps 1 and 2."""


@pytest.mark.parametrize(
    ("kind", "values", "more", "evaluations"),
    [
        ("detect", LAST, {}, 2),
        ("detect", EARLIER, {}, 3),
        ("segment", LAST, {}, 2),
        ("segment", EARLIER, {}, 3),
        ("segment", LAST, {"test": {"multi_scale": True, "scales": [1.0]}}, 3),  # the single-scale score is reused
    ],
    indirect=["kind"],
)
def test_the_best_weights_are_saved_and_scored_once(
    kind: Kind,
    values: tuple[float, ...],
    more: dict[str, Any],
    evaluations: int,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    name = "find" if kind.verb == "detect" else "scores"
    original, evaluate, fed = getattr(kind.task, name), kind.task.evaluate, iter(values)
    monkeypatch.setattr(kind.task, name, lambda task, *rest: calls.append(rest) or original(task, *rest))
    monkeypatch.setattr(kind.task, "evaluate", lambda task, step: evaluate(task, step) | {kind.metric: next(fed)})
    run = tmp_path / "run"
    summary = kind.train(data, run, steps=2, evaluate_every=1, report=False, weights="best", **more)
    assert len(calls) == evaluations and summary["best_step"] == (2 if values == LAST else 1)
    assert kind.evaluate(run, data, **more)[kind.metric] == pytest.approx(summary[kind.metric], abs=1e-6)
    best, last = (
        torch.load(run / "checkpoints" / f"{name}.pt", weights_only=True)["task"] for name in ("best", "last")
    )
    saved = load_model(str(run)).backbone.state_dict()
    keys = {name: next(key for key in best if key.endswith(f"backbone.{name}")) for name in saved}
    assert all(torch.equal(saved[name], best[key]) for name, key in keys.items())
    assert all(torch.equal(saved[name], last[key]) for name, key in keys.items()) == (values == LAST)
