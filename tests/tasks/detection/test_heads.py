"""The registry of detector heads: ``--head`` takes its choices from it, and docs/extending.md adds one."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from frugalvit.config.dense import DETECTOR_HEADS, DetectConfig
from frugalvit.tasks.detection.heads import DetectorHead
from frugalvit.tasks.detection.layers import Target
from helpers.dense_models import SIZES, detector, targets

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def test_the_option_has_the_heads_of_the_registry() -> None:
    assert list(get_args(DetectConfig.model_fields["head"].annotation)) == list(DETECTOR_HEADS)


@pytest.mark.parametrize("name", list(DETECTOR_HEADS))
def test_every_head_trains_and_names_its_outputs(name: str) -> None:
    net = detector(name)
    assert isinstance(net.heads, DetectorHead) and net.heads.output_modules()
    assert set(net.heads.output_modules()) < set(net.modules())
    losses = net(torch.rand(2, 3, 64, 64), SIZES, targets())
    assert {"loss_mask", "loss_objectness"} < losses.keys()


def test_the_head_of_the_documentation() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## A detector head")[2]
    block = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"__name__": "extending_example"}
    try:
        exec(block[1], names)
        net: nn.Module = names["detector"]
        losses: dict[str, torch.Tensor] = net(torch.rand(2, 3, 64, 64), SIZES, targets(masks=False))
        sum(losses.values()).backward()  # type: ignore[union-attr]
        found: list[Target] = net.eval()(torch.rand(2, 3, 64, 64), SIZES)
        assert len(found) == 2 and all(len(o["boxes"]) == len(o["labels"]) == len(o["scores"]) for o in found)
    finally:
        DETECTOR_HEADS.pop("mean", None)
