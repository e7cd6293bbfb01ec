"""Anchors cover small and large objects on any backbone and input size."""

import math
from typing import Any

import pytest
import torch
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from frugalvit import create_backbone
from frugalvit.config.defaults import Facts
from frugalvit.config.dense import DetectConfig
from frugalvit.experiment.resolve import AutoValues
from frugalvit.experiment.resolve_dense import resolve_detection
from frugalvit.tasks.dense.pyramid import Pyramid, pyramid_strides, with_top
from frugalvit.tasks.detection.layers import DetectorSpec, FloatAnchors, roi_align
from frugalvit.tasks.detection.model import Detector
from helpers.dense_runs import TINY

SMALL = {
    "classes": 2, "head": "mask-rcnn", "masks": False, "channels": 16, "hidden": 32, "anchors": 2.0, "proposals": 50,
    "samples": 32, "detections": 100,
}  # fmt: skip

FACTS = Facts(100, 1, 64, "cpu")

NETWORKS: dict[str, dict[str, Any]] = {
    "swin_nano": {},
    "cvt_13": {},
    "swin_tiny_w7": {"embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 2, 4, 8]},
    "vit_tiny_patch16_224": {"embed_dim": 32, "depth": 1, "num_heads": 2},
}


def resolve(strides: list[float], side: int, **options: float) -> DetectorSpec:
    config, auto = DetectConfig.parse({"data": "x", "img_size": side, "detector": options}), AutoValues()
    sizes = resolve_detection(config, FACTS, with_top(strides), (0, 9), auto).detector
    assert all(value.reason for value in auto)
    return DetectorSpec(1, anchors=sizes.anchors, octaves=sizes.octaves)


def share_covered(spec: DetectorSpec, strides: list[float], side: int, object_side: float) -> float:
    """Share of positions at which a square object overlaps an anchor by more than half."""
    levels = with_top(strides)
    maps = [torch.zeros(1, 1, math.ceil(side / stride), math.ceil(side / stride)) for stride in levels]
    made = FloatAnchors(tuple(spec.anchor_sizes(stride) for stride in levels), levels)
    anchors = made(ImageList(torch.zeros(1, 3, side, side), [(side, side)]), maps)[0]
    positions = torch.linspace(0, side - object_side, 9)
    corners = torch.cartesian_prod(positions, positions)
    objects = torch.cat([corners, corners + object_side], 1)
    return (box_iou(objects, anchors).amax(1) > 0.5).float().mean().item()


@pytest.mark.parametrize(
    ("name", "side", "smallest", "largest", "octaves"),
    [
        ("swin_tiny_w7", 800, 32.0, 512.0, 1),  # four stages from 4 px: the papers'
        ("vit_tiny_patch16_224", 224, 8.8, 140.8, 1),
        ("cvt_13", 224, 8.8, 140.8, 2),  # three stages from 4 px
        ("cvt_13", 320, 12.8, 204.8, 2),
        ("swin_nano", 128, 8.0, 128.0, 2),  # three stages from 8 px
    ],
)
def test_anchors_cover_small_and_large_objects(
    name: str, side: int, smallest: float, largest: float, octaves: int
) -> None:
    strides = pyramid_strides(create_backbone(name, img_size=min(side, 224), **NETWORKS[name]))
    spec = resolve(strides, side)
    ends = (spec.anchor_sizes(strides[0])[0], spec.anchor_sizes(2 * strides[-1])[-1])
    assert ends == pytest.approx((smallest, largest)) and spec.octaves == octaves
    if name == "cvt_13":
        assert share_covered(spec, strides, side, 0.6 * side) > 0.9
    if name == "swin_nano":  # cells of 8 px: objects of 10 px between four of them are missed
        assert share_covered(spec, strides, side, 10) > 0.1


@pytest.mark.parametrize("side", [64, 128, 320, 1200])
@pytest.mark.parametrize("strides", [[2, 4, 8, 16], [3, 6, 12, 24], [4, 8], [4, 8, 16], [8, 16, 32, 64], [16, 32]])
def test_anchors_fit_any_strides(strides: list[float], side: int) -> None:
    spec = resolve(strides, side)
    assert spec.anchor_sizes(1)[-1] >= 2, "smaller anchors miss most objects"
    assert spec.anchor_sizes(2 * strides[-1])[-1] >= min(side, 16 * spec.anchors * strides[0])


def test_set_anchors_are_used() -> None:
    assert resolve([8, 16, 32], 128, anchors=3.0) == DetectorSpec(1, anchors=3.0, octaves=1)
    assert resolve([8, 16, 32], 128, anchors=3.0, octaves=2) == DetectorSpec(1, anchors=3.0, octaves=2)
    assert resolve([8, 16, 32], 128, octaves=1) == DetectorSpec(1, anchors=1.0, octaves=1)


@pytest.mark.parametrize(("strides", "octaves"), [([4, 8, 16, 32], 1), ([4, 8, 16], 2)])
@pytest.mark.parametrize(("recipe", "epochs"), [("detect-coco", 12), ("detect-coco-3x", 36)])
def test_detect_coco_is_as_published(strides: list[float], octaves: int, recipe: str, epochs: int) -> None:
    config = DetectConfig.parse({"data": "x", "recipe": recipe})
    drops = [share * epochs for share in config.optimizer.milestones]
    assert config.epochs == epochs and drops == pytest.approx([8, 11] if epochs == 12 else [27, 33], abs=1e-4)
    sizes = resolve_detection(config, FACTS, with_top(strides), (9, 9), AutoValues()).detector
    assert (sizes.anchors, sizes.octaves) == (8.0, octaves)


@pytest.mark.parametrize("name", NETWORKS)
def test_strides_without_a_pyramid_and_random_numbers(name: str) -> None:
    backbone = create_backbone(name, img_size=128, **NETWORKS[name])
    state = torch.random.get_rng_state()
    strides = pyramid_strides(backbone)
    assert torch.equal(state, torch.random.get_rng_state()), "later weights are drawn from it"
    assert strides == Pyramid(backbone).strides


def tiny(spec: DetectorSpec) -> Detector:
    torch.manual_seed(0)
    return Detector(Pyramid(create_backbone("swin_nano", img_size=64, **TINY | {"patch_size": 4})), spec)


@pytest.mark.parametrize(("anchors", "cells"), [(0.5, 7), (1.0, 7), (2.0, 7), (4.0, 14)])
def test_small_anchors_keep_regions_on_fine_maps(anchors: float, cells: int) -> None:
    """The finest level takes regions of at least seven cells, even if its smallest anchor has one or two."""
    spec = DetectorSpec(**SMALL | {"anchors": anchors, "octaves": 2})
    net = tiny(spec)
    map_levels: Any = roi_align(spec, net.features, 7).map_levels
    finest = net.features.strides[0]
    sides = [finest * cells * factor for factor in (0.2, 0.99, 1.01, 1.99, 2.01, 9)]
    assert map_levels([torch.tensor([[0.0, 0.0, side, side] for side in sides])]).tolist() == [0, 0, 1, 1, 2, 2]
