"""Which objects have an anchor, on any backbone and input; and that detectors of before stay what they were."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign, box_iou

from frugalvit import create_backbone
from frugalvit.comparison.compare import asked_otherwise
from frugalvit.config.dense import DetectConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.experiment.auto_values import AutoValues
from frugalvit.runs.layout import REQUEST_FILE
from frugalvit.tasks.dense.auto_values import decide_detector
from frugalvit.tasks.dense.pyramid import Pyramid, pyramid_strides, with_top
from frugalvit.tasks.detection import commands
from frugalvit.tasks.detection.layers import DetectorSpec, FloatAnchors, roi_align
from frugalvit.tasks.detection.model import Detector
from helpers.dense_models import SIZES, targets
from helpers.dense_runs import HEADS, TINY, detect_config

OF_BEFORE = {
    "classes": 2, "head": "mask-rcnn", "masks": False, "channels": 16, "hidden": 32, "anchors": 2.0, "proposals": 50,
    "samples": 32, "detections": 100,
}  # fmt: skip
"""A detector as it was written down before levels could have several sizes of anchors."""

NETWORKS: dict[str, dict[str, Any]] = {
    "swin_nano": {},
    "cvt_13": {},
    "swin_tiny_w7": {"embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 2, 4, 8]},
    "vit_tiny_patch16_224": {"embed_dim": 32, "depth": 1, "num_heads": 2},
}


def decided(strides: list[float], side: int, **given: float) -> DetectorSpec:
    config = DetectConfig.parse({"data": "x", "img_size": side, "detector": given})
    decisions = AutoValues()
    decide_detector(config, 96, strides, False, decisions)
    assert all(decision.reason for decision in decisions)
    return DetectorSpec(1, anchors=float(config.detector.anchors), octaves=int(config.detector.octaves))


def met(spec: DetectorSpec, strides: list[float], side: int, object_side: float) -> float:
    """The share of places at which a square object inside the picture overlaps an anchor by more than half."""
    levels = with_top(strides)
    maps = [torch.zeros(1, 1, math.ceil(side / stride), math.ceil(side / stride)) for stride in levels]
    made = FloatAnchors(tuple(spec.anchor_sizes(stride) for stride in levels), levels)
    anchors = made(ImageList(torch.zeros(1, 3, side, side), [(side, side)]), maps)[0]
    places = torch.linspace(0, side - object_side, 9)
    corners = torch.cartesian_prod(places, places)
    objects = torch.cat([corners, corners + object_side], 1)
    return (box_iou(objects, anchors).amax(1) > 0.5).float().mean().item()


def of_before(strides: list[float], side: int) -> DetectorSpec:
    """The rule of before: one size on every level, so many strides."""
    return DetectorSpec(1, anchors=round(min(8.0, max(2.0, 8 * side / 800)), 1))


@pytest.mark.parametrize(
    ("name", "side", "sizes", "before", "now"),
    [
        # Four stages: nothing changes. 4 % of the short side to 64 %.
        ("swin_tiny_w7", 800, (32.0, 512.0), (32.0, 512.0), 1),
        ("vit_tiny_patch16_224", 224, (8.8, 140.8), (8.8, 140.8), 1),
        # Three stages from 4 px: before, no anchor was larger than a third of the picture.
        ("cvt_13", 224, (8.8, 140.8), (8.8, 70.4), 2),
        ("cvt_13", 320, (12.8, 204.8), (12.8, 102.4), 2),
        # Three stages from 8 px: before, no anchor was smaller than an eighth of the picture.
        ("swin_nano", 128, (8.0, 128.0), (16.0, 128.0), 2),
    ],
)
def test_anchors_reach_from_small_objects_to_large_ones(
    name: str, side: int, sizes: tuple[float, float], before: tuple[float, float], now: int
) -> None:
    strides = pyramid_strides(create_backbone(name, img_size=min(side, 224), **NETWORKS[name]))
    spec, old = decided(strides, side), of_before(strides, side)
    ends = [(s.anchor_sizes(strides[0])[0], s.anchor_sizes(2 * strides[-1])[-1]) for s in (spec, old)]
    assert ends[0] == pytest.approx(sizes) and ends[1] == pytest.approx(before) and spec.octaves == now
    if now == 1:
        assert spec == old
    if name == "cvt_13":
        assert met(old, strides, side, 0.6 * side) == 0 and met(spec, strides, side, 0.6 * side) > 0.9
    if name == "swin_nano":  # cells of 8 px: some of the small objects lie where four of them meet
        assert met(old, strides, side, 10) == 0 and met(spec, strides, side, 10) > 0.1


@pytest.mark.parametrize("side", [64, 96, 128, 224, 320, 800, 1200])
@pytest.mark.parametrize(
    "strides",
    [[2, 4, 8, 16], [3, 6, 12, 24], [4, 8], [4, 8, 16], [4, 8, 16, 32], [8, 16, 32], [8, 16, 32, 64], [16, 32]],
)
def test_no_strides_and_no_input_lose_by_it(strides: list[float], side: int) -> None:
    spec, old = decided(strides, side), of_before(strides, side)
    if strides[0] <= 4:
        assert spec.anchors == old.anchors
    assert spec.anchor_sizes(1)[-1] >= 2, "smaller ones pass by most objects"
    assert spec.anchor_sizes(2 * strides[-1])[-1] >= min(side, 16 * spec.anchors * strides[0])
    if spec != old and side <= 320:
        for share in (0.06, 0.1, 0.2, 0.35, 0.6):
            assert met(spec, strides, side, share * side) >= met(old, strides, side, share * side), share


def test_given_anchors_are_what_they_were() -> None:
    assert decided([8, 16, 32], 128, anchors=3.0) == DetectorSpec(1, anchors=3.0, octaves=1)
    assert decided([8, 16, 32], 128, anchors=3.0, octaves=2) == DetectorSpec(1, anchors=3.0, octaves=2)
    assert decided([8, 16, 32], 128, octaves=1) == DetectorSpec(1, anchors=1.0, octaves=1)


@pytest.mark.parametrize(("strides", "octaves"), [([4, 8, 16, 32], 1), ([4, 8, 16], 2)])
def test_the_published_protocol_has_its_anchors(strides: list[float], octaves: int) -> None:
    config = DetectConfig.parse({"data": "x", "recipe": "detect-coco"})
    decide_detector(config, 768, strides, True, AutoValues())
    assert (config.detector.anchors, config.detector.octaves) == (8.0, octaves)


@pytest.mark.parametrize("name", NETWORKS)
def test_strides_are_known_before_there_is_a_pyramid(name: str) -> None:
    backbone = create_backbone(name, img_size=128, **NETWORKS[name])
    state = torch.random.get_rng_state()
    strides = pyramid_strides(backbone)
    assert torch.equal(state, torch.random.get_rng_state()), "the weights to come are drawn from it"
    assert strides == Pyramid(backbone).strides


def tiny(spec: DetectorSpec) -> Detector:
    torch.manual_seed(0)
    return Detector(Pyramid(create_backbone("swin_nano", img_size=64, **TINY)), spec)


def test_a_spec_comes_back_from_its_file() -> None:
    spec = DetectorSpec(7, "cascade", anchors=1.2, octaves=3)
    assert DetectorSpec(**json.loads(json.dumps(asdict(spec)))) == spec
    assert DetectorSpec(**OF_BEFORE) == replace(DetectorSpec(**OF_BEFORE), octaves=1)


@pytest.mark.parametrize("anchors", [0.5, 1.0, 2.0, 3.8, 8.0])
def test_detectors_of_before_have_the_anchors_and_crops_of_before(anchors: float) -> None:
    """One size on every level, whatever size it is, and regions cut from where it said, to the bit."""
    spec = DetectorSpec(**OF_BEFORE | {"anchors": anchors})
    net = tiny(spec).eval()
    images, shapes = torch.rand(2, 3, 64, 96), [(64, 96), (50, 70)]
    with torch.no_grad():
        maps = net.features(images)
    strides = net.features.strides
    theirs = AnchorGenerator(tuple((anchors * stride,) for stride in strides), ((0.5, 1.0, 2.0),) * 4)  # pyright: ignore[reportArgumentType]
    for ours, other in zip(
        net.rpn.anchor_generator(ImageList(images, shapes), list(maps.values())),
        theirs(ImageList(images, shapes), list(maps.values())),
        strict=True,
    ):
        assert torch.equal(ours, other)
    corners = torch.rand(2, 40, 2) * 40
    boxes = list(torch.cat([corners, corners + torch.rand(2, 40, 2) ** 3 * 60 + 2], 2))
    crops = MultiScaleRoIAlign(net.features.names, 7, sampling_ratio=2, canonical_scale=round(28 * anchors))
    assert torch.equal(roi_align(spec, net.features, 7)(maps, boxes, shapes), crops(maps, boxes, shapes))


@pytest.mark.parametrize(("anchors", "cells"), [(0.5, 7), (1.0, 7), (2.0, 7), (4.0, 14)])
def test_small_anchors_do_not_send_regions_to_coarse_maps(anchors: float, cells: int) -> None:
    """The finest level is for regions of seven cells at least, where its smallest anchor has one or two."""
    spec = DetectorSpec(**OF_BEFORE | {"anchors": anchors, "octaves": 2})
    net = tiny(spec)
    map_levels: Any = roi_align(spec, net.features, 7).map_levels
    finest = net.features.strides[0]
    sides = [finest * cells * factor for factor in (0.2, 0.99, 1.01, 1.99, 2.01, 9)]
    assert map_levels([torch.tensor([[0.0, 0.0, side, side] for side in sides])]).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("head", ["mask-rcnn", "cascade"])
def test_detectors_learn_with_several_sizes_on_a_level(head: str) -> None:
    net = tiny(DetectorSpec(**OF_BEFORE | {"classes": 3, "head": head, "anchors": 1.0, "octaves": 2}))
    assert net.rpn.anchor_generator.num_anchors_per_location() == [6] * 4
    losses = net(torch.rand(2, 3, 64, 64), SIZES, targets(masks=False))
    assert all(torch.isfinite(value) for value in losses.values())
    sum(losses.values()).backward()
    assert [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None] == []
    net.eval().set_score_threshold(0.0)
    assert all(len(found["boxes"]) for found in net.detect(torch.rand(2, 3, 64, 64), SIZES, SIZES))


# -- runs of before

COARSE: dict[str, Any] = {"backbone_args": TINY | {"patch_size": 8}, "img_size": 64, "masks": False, "report": False}
"""Strides of 8 to 64 px, for which "auto" has two sizes now."""


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["task"]


def forget(path: Path) -> None:
    """A file as it was before there were octaves, and classes without masks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        facts = json.loads(text)
        del facts["spec"]["octaves"], facts["spec"]["maskless"]
        kept = json.dumps(facts)
    else:
        kept = "".join(line for line in text.splitlines(keepends=True) if line.strip() != "octaves: 1")
    path.write_text(kept, encoding="utf-8")
    assert kept != text


def test_a_run_of_before_is_resumed_and_used_as_it_was(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str) -> DetectConfig:
        sizes = {"detector": HEADS | {"anchors": 2.0}, "steps": 2, "save_every": 1}
        return detect_config(shapes, tmp_path / name, **COARSE | sizes)

    commands.train(config("whole"))
    original = commands.DetectionTask.after_step

    def stop(self: Any, step: int, skipped: Tensor) -> None:
        if step == 1:
            raise KeyboardInterrupt
        original(self, step, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(commands.DetectionTask, "after_step", stop)
        with pytest.raises(KeyboardInterrupt):
            commands.train(config("stopped"))
    forget(tmp_path / "stopped" / "config.yaml")
    commands.train(DetectConfig.parse({"resume": str(tmp_path / "stopped"), "device": "cpu"}))
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    pictures = [torch.randint(0, 256, (3, 60, 48), dtype=torch.uint8)]
    found = []
    for name in ("whole", "stopped"):
        if name == "stopped":
            forget(tmp_path / name / "transfer.json")
        facts = commands.read_facts(str(tmp_path / name), "detect")
        assert ("octaves" in facts["spec"]) == (name == "whole")
        task = commands.load_task(str(tmp_path / name), facts, "cpu", 1)
        task.net.set_score_threshold(0.0)
        found.append(task.detect(pictures))
    assert found[0] == found[1] and found[0][0]


def test_a_new_run_writes_down_its_octaves(shapes: Path, tmp_path: Path) -> None:
    commands.train(detect_config(shapes, tmp_path / "run", **COARSE | {"steps": 1}))
    stored = read_yaml(tmp_path / "run" / "config.yaml")["detector"]
    spec = json.loads((tmp_path / "run" / "transfer.json").read_text())["spec"]
    assert (stored["anchors"], stored["octaves"]) == (spec["anchors"], spec["octaves"]) == (1.0, 2)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [({}, {}, False), ({"anchors": 2.0}, {"anchors": 2.0}, True), ({}, {"octaves": 1}, True)],
    ids=["auto means more now", "given anchors", "one size, as then"],
)
def test_a_comparison_begun_before_is_not_gone_on_with_other_anchors(
    before: dict[str, Any], now: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    asked = DetectConfig.parse({"data": "x", "detector": before}).model_dump(mode="json")
    del asked["detector"]["octaves"]
    (tmp_path / REQUEST_FILE).write_text(json.dumps(asked))
    assert (asked_otherwise(tmp_path, DetectConfig.parse({"data": "x", "detector": now})) == "") is same
