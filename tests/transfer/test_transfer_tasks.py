"""What both transfer tasks decide by themselves: norms that rest, how often a picture is looked at, warm-ups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from frugalvit import create_backbone
from frugalvit.config.transfer import TestConfig
from frugalvit.transfer import segment_task
from frugalvit.transfer.detect_commands import DetectJob
from frugalvit.transfer.pyramid import Pyramid
from frugalvit.transfer.segment_commands import SegmentJob
from frugalvit.transfer.segment_task import SegmentTask
from frugalvit.transfer.segmentation import Segmenter, SegmenterSpec

from .tiny import detect_config, segment_config


@pytest.mark.parametrize("verb", ["detect", "segment"])
@pytest.mark.parametrize("given", [{}, {"init": "somewhere"}])
def test_norms_of_a_network_that_has_learned_rest(verb: str, given: dict[str, str]) -> None:
    """Batches are small; statistics of random weights would be of nothing, and are learned."""
    make, job = (detect_config, DetectJob()) if verb == "detect" else (segment_config, SegmentJob())
    config: Any = make(Path("x"), Path("y"), **given, **({"masks": False} if verb == "detect" else {}))
    if verb == "detect":
        config.detector.anchors = 2.0
    backbone = create_backbone("resnet10t", img_size=64)
    task: Any = job.task(config, SimpleNamespace(classes=("a", "b")), backbone)  # type: ignore[arg-type]
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
    task = SegmentTask(Segmenter(Pyramid(backbone), SegmenterSpec(2, 16)), 32)
    picture = torch.zeros(3, 48, 60, dtype=torch.uint8)
    assert task.predict([picture, picture], TestConfig(**test)).shape == (2, 48, 60)
    assert seen == looks and windows == {window}


@pytest.mark.parametrize(("asked", "taken"), [(10, 10), (1500, 20)])
def test_a_short_run_does_not_warm_up_for_all_of_it(asked: int, taken: int) -> None:
    """A fifth of it at most; before that the rate is lower, then it is what was asked for."""
    for make, job in ((detect_config, DetectJob()), (segment_config, SegmentJob())):
        config: Any = make(Path("x"), Path("y"), lr=1.0, optimizer={"warmup": asked})
        rates = [job.schedule(config, 100).at(step) for step in range(100)]
        assert rates[0] == pytest.approx(1e-3) and rates[taken - 1] < 1.0 and rates[taken] == pytest.approx(1.0)
