"""Batch norms, schedules and best weights of detection and segmentation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit import create_backbone
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.detection import commands
from frugalvit.tasks.detection.task import DetectionTask
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.tasks.segmentation.task import SegmentationTask
from helpers.dense_runs import detect_config, segment_config
from helpers.dense_samples import make_coco, make_scenes
from helpers.tiny_runs import resolve


@pytest.mark.parametrize("verb", ["detect", "segment"])
@pytest.mark.parametrize("start", [{}, {"init": "somewhere"}])
def test_batch_norms_of_pretrained_backbones_are_frozen(verb: str, start: dict[str, str]) -> None:
    """Batches are small. Random weights have no statistics yet, so theirs are trained."""
    backbone = create_backbone("resnet10t", img_size=64)
    task: Any
    if verb == "detect":
        task = commands.make_task(resolve(detect_config(Path("x"), Path("y"), **start)), 2, (), backbone)
    else:
        task = segment_commands.make_task(resolve(segment_config(Path("x"), Path("y"), **start)), 2, backbone)
    norms = [part for part in backbone.modules() if isinstance(part, _BatchNorm)]
    assert norms and {norm.training for norm in norms} == {True}
    task.train()
    assert {norm.training for norm in norms} == {not start} and task.net.training
    task.eval()
    assert not any(part.training for part in task.modules())


@pytest.mark.parametrize(("warmup", "steps"), [(10, 10), (1500, 20)])
def test_warm_up_takes_at_most_a_fifth_of_the_run(warmup: int, steps: int) -> None:
    for make, module in ((detect_config, commands), (segment_config, segment_commands)):
        config: Any = resolve(make(Path("x"), Path("y"), lr=1.0, optimizer={"warmup": warmup}))
        rates = [module.make_schedule(config, 100).at(step) for step in range(100)]
        assert rates[0] == pytest.approx(1e-3) and rates[steps - 1] < 1.0 and rates[steps] == pytest.approx(1.0)


@pytest.mark.parametrize("length", [{"steps": 100}, {"steps": None, "epochs": 50}])
def test_the_rate_falls_at_shares_of_the_run(length: dict[str, int | None]) -> None:
    config: Any = detect_config(
        Path("x"), Path("y"), lr=1.0, optimizer={"warmup": 0, "milestones": (0.6, 0.9)}, **length
    )
    rates = [commands.make_schedule(resolve(config), 100).at(step) for step in (59, 60, 89, 90, 99)]
    assert rates == pytest.approx([1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("verb", ["detect", "segment"])
def test_the_best_weights_are_scored_and_saved(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if verb == "detect":
        data, make, module, kind = make_coco(tmp_path / "data", train=4, val=2), detect_config, commands, DetectionTask
    else:
        data, make, module, kind = make_scenes(tmp_path / "data"), segment_config, segment_commands, SegmentationTask
    scores = {2: 1.0, 4: 0.0}
    monkeypatch.setattr(kind, "evaluate", lambda self, step: {self.best_metric: scores[step]})
    summary = module.train(make(data, tmp_path / "run", report=False)).data
    assert summary["best_step"] == 2
    best, last = (
        torch.load(tmp_path / "run" / "checkpoints" / f"{name}.pt", weights_only=True)["task"]
        for name in ("best", "last")
    )
    saved = load_model(str(tmp_path / "run")).backbone.state_dict()
    keys = {name: next(key for key in best if key.endswith(f"backbone.{name}")) for name in saved}
    assert all(torch.equal(saved[name], best[key]) for name, key in keys.items())
    assert not all(torch.equal(saved[name], last[key]) for name, key in keys.items())
