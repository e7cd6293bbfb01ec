"""Losses of a segmenter's two heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from frugalvit import create_backbone
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.segmentation.upernet import Segmenter, SegmenterSpec

SIDE = 64


def segmenter(auxiliary: float) -> Any:
    torch.manual_seed(0)
    backbone = create_backbone("swin_nano", img_size=SIDE, embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4])
    return Segmenter(Pyramid(backbone), SegmenterSpec(2, 16, dropout=0.0, auxiliary=auxiliary)).train()


def halves(grid: Tensor) -> Tensor:
    """Confident logits: class 0 in the left half of the map, class 1 in the right half."""
    side = torch.arange(grid.shape[3]) >= grid.shape[3] // 2
    return 40.0 * torch.stack([~side, side]).float()[None, :, None].expand(len(grid), 2, grid.shape[2], -1)


@pytest.mark.parametrize("auxiliary", [0.4, 0.1])
def test_the_auxiliary_logits_are_aligned_with_the_image(auxiliary: float) -> None:
    """On the second coarsest map; confident wrong logits cost 40 per pixel."""
    net, widths = segmenter(auxiliary), []
    net.helper.forward = lambda grid: widths.append(grid.shape[3]) or halves(grid)
    labels = (torch.arange(SIDE) >= SIDE // 2).long().expand(1, SIDE, SIDE)
    right = net.losses(torch.rand(1, 3, SIDE, SIDE), labels)["loss_auxiliary"]
    wrong = net.losses(torch.rand(1, 3, SIDE, SIDE), 1 - labels)["loss_auxiliary"]
    assert widths == [round(SIDE / net.pyramid.strides[-2])] * 2
    assert right < auxiliary * 1.0 and wrong == pytest.approx(auxiliary * 40.0, rel=0.1)


def test_no_auxiliary_head_without_a_weight() -> None:
    net = segmenter(0.0)
    assert net.helper is None and list(net.losses(torch.rand(1, 3, SIDE, SIDE), torch.zeros(1, SIDE, SIDE).long())) == [
        "loss_main"
    ]
