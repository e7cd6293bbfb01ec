"""What both transfer tasks decide by themselves: norms that rest, how often a picture is looked at, warm-ups."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit import create_backbone
from frugalvit.config.dense import TestConfig
from frugalvit.experiment.auto_values import AutoValues
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.dense import experiment
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection.commands import DetectJob
from frugalvit.tasks.detection.task import DetectionTask
from frugalvit.tasks.segmentation import task as segment_task
from frugalvit.tasks.segmentation.commands import SegmentJob
from frugalvit.tasks.segmentation.metrics import IGNORED, Confusion
from frugalvit.tasks.segmentation.model import Segmenter, SegmenterSpec, window_starts
from frugalvit.tasks.segmentation.task import SegmentationTask, choose_crop
from helpers.dense_runs import detect_config, segment_config
from helpers.dense_samples import make_coco, make_scenes


@pytest.mark.parametrize("verb", ["detect", "segment"])
@pytest.mark.parametrize("given", [{}, {"init": "somewhere"}])
def test_norms_of_a_network_that_has_learned_rest(verb: str, given: dict[str, str]) -> None:
    """Batches are small; statistics of random weights would be of nothing, and are learned."""
    make, job = (detect_config, DetectJob()) if verb == "detect" else (segment_config, SegmentJob())
    config: Any = make(Path("x"), Path("y"), **given)
    data: Any = SimpleNamespace(classes=("a", "b"), has_masks=lambda: False, about_masks=lambda: "boxes")
    backbone = create_backbone("resnet10t", img_size=64)
    job.decide(config, data, backbone, AutoValues())
    task: Any = job.task(config, data, backbone)
    norms = [part for part in backbone.modules() if isinstance(part, _BatchNorm)]
    assert norms and {norm.training for norm in norms} == {True}
    task.train()
    assert {norm.training for norm in norms} == {not given} and task.net.training
    task.eval()
    assert not any(part.training for part in task.modules())


@pytest.mark.parametrize(
    ("test", "window", "looks"),
    [
        ({}, 0, [(32, False)]),
        ({"window": 20}, 20, [(32, False)]),
        ({"multi_scale": True, "scales": [1.0, 2.0]}, 32, [(32, True), (64, True)]),  # as large as it was trained with
        ({"multi_scale": True, "scales": [2.0], "flip": False}, 32, [(64, False)]),
        ({"multi_scale": True, "scales": [2.0], "window": 0}, 0, [(64, True)]),
    ],
)
def test_how_a_picture_is_looked_at(
    test: dict[str, Any], window: int, looks: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    windows: set[int] = set()

    def record(net: Any, images: torch.Tensor, size: tuple[int, int], *, window: int, flip: bool) -> torch.Tensor:
        seen.append((images.shape[2], flip))
        windows.add(window)
        return torch.zeros(len(images), 2, *size)

    monkeypatch.setattr(segment_task, "probabilities", record)
    backbone = create_backbone("swin_nano", img_size=32, embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4])
    task = SegmentationTask(Segmenter(Pyramid(backbone), SegmenterSpec(2, 16)), 32)
    picture = torch.zeros(3, 48, 60, dtype=torch.uint8)
    assert task.predict([picture, picture], TestConfig(**test)).shape == (2, 48, 60)
    assert seen == looks and windows == {window}


@pytest.mark.parametrize(("length", "window"), [(100, 30), (64, 32), (33, 32), (500, 512), (513, 512), (1000, 7)])
def test_windows_are_two_thirds_of_their_side_apart(length: int, window: int) -> None:
    """At most; they begin with the image and end with it."""
    starts = window_starts(length, window)
    assert starts[0] == 0 and starts[-1] == max(0, length - window)
    gaps = [after - before for before, after in pairwise(starts)]
    assert max(gaps, default=0) <= window * 2 / 3 + 1 and min(gaps, default=1) > 0
    assert len(starts) == math.ceil(max(0, length - window) / (window * 2 // 3)) + 1


def test_pixels_that_count_nowhere_fill_no_crop() -> None:
    """Three classes of equal shares of the few pixels that count: the first place will do."""
    labels = torch.full((20, 40), IGNORED, dtype=torch.uint8)
    labels[:, 8:11], labels[:, 30:33] = torch.arange(3), torch.arange(3)
    numbers = [0.5, 0.0, *[0.25, 0.25], *[0.75, 0.75] * 9]
    assert choose_crop(labels, 10, (1.0, 1.0), 0.75, numbers).left == 5
    labels[:, :25] = IGNORED  # nothing counts at the first, and something at the others
    assert choose_crop(labels, 10, (1.0, 1.0), 0.75, numbers).left == 15


@pytest.mark.parametrize(("asked", "taken"), [(10, 10), (1500, 20)])
def test_a_short_run_does_not_warm_up_for_all_of_it(asked: int, taken: int) -> None:
    """A fifth of it at most; before that the rate is lower, then it is what was asked for."""
    for make, job in ((detect_config, DetectJob()), (segment_config, SegmentJob())):
        config: Any = make(Path("x"), Path("y"), lr=1.0, optimizer={"warmup": asked})
        rates = [job.schedule(config, 100).at(step) for step in range(100)]
        assert rates[0] == pytest.approx(1e-3) and rates[taken - 1] < 1.0 and rates[taken] == pytest.approx(1.0)


@pytest.mark.parametrize("length", [{"steps": 100}, {"steps": None, "epochs": 50}])
def test_rates_fall_at_shares_of_the_run(length: dict[str, int | None]) -> None:
    """However its length was given."""
    config: Any = detect_config(
        Path("x"), Path("y"), lr=1.0, optimizer={"warmup": 0, "milestones": (0.6, 0.9)}, **length
    )
    rates = [DetectJob().schedule(config, 100).at(step) for step in (59, 60, 89, 90, 99)]
    assert rates == pytest.approx([1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("multi_scale", [True, False])
def test_a_look_at_one_scale_is_scored_beside_several(multi_scale: bool) -> None:
    """Right at several scales, half right at one: which number is whose."""
    counts = {True: torch.tensor([[2, 0], [0, 2]]), False: torch.tensor([[1, 1], [1, 1]])}

    def scores(dataset: Any, test: TestConfig) -> tuple[Confusion, list[Any]]:
        confusion = Confusion(2)
        confusion.counts += counts[test.multi_scale]
        return confusion, []

    task: Any = SimpleNamespace(test=TestConfig(multi_scale=multi_scale), scored=scores)
    found = SegmentJob().score(task, None, None)  # type: ignore[arg-type]
    assert found["miou"] == pytest.approx(1.0 if multi_scale else 1 / 3)
    assert found.get("single_scale_miou") == (pytest.approx(1 / 3) if multi_scale else None)


@pytest.mark.parametrize("verb", ["detect", "segment"])
def test_the_best_weights_are_scored_and_kept(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is best half-way: those of that step, and not the last ones."""
    if verb == "detect":
        data, make, job, kind = make_coco(tmp_path / "data", train=4, val=2), detect_config, DetectJob(), DetectionTask
    else:
        data, make, job, kind = make_scenes(tmp_path / "data"), segment_config, SegmentJob(), SegmentationTask
    scores = {2: 1.0, 4: 0.0}
    monkeypatch.setattr(kind, "evaluate", lambda self, step: {self.best_metric: scores[step]})
    summary = experiment.train(make(data, tmp_path / "run", report=False), job).data
    assert summary["best_step"] == 2
    best, last = (
        torch.load(tmp_path / "run" / "checkpoints" / f"{name}.pt", weights_only=True)["task"]
        for name in ("best", "last")
    )
    kept = load_model(str(tmp_path / "run")).backbone.state_dict()
    places = {name: next(place for place in best if place.endswith(f"backbone.{name}")) for name in kept}
    assert all(torch.equal(kept[name], best[place]) for name, place in places.items())
    assert not all(torch.equal(kept[name], last[place]) for name, place in places.items())
