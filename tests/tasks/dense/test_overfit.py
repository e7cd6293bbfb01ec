"""Detectors and segmenters can overfit eight images."""

from pathlib import Path

import pytest

from frugalvit.config.dense import DetectConfig, SegmentConfig
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands
from helpers.dense_samples import edit, make_coco, make_scenes

SMALL = {"embed_dim": 24, "depths": [2, 2, 2], "num_heads": [2, 4, 8]}


@pytest.mark.slow
@pytest.mark.parametrize(("head", "stripped"), [("mask-rcnn", 0), ("cascade", 0), ("mask-rcnn", 8)])
def test_a_detector_overfits_eight_images(tmp_path: Path, head: str, stripped: int) -> None:
    """Also if half of the training objects have no mask; all are scored with one."""
    data = make_coco(tmp_path / "data", train=8, val=1)
    original = (data / "instances_train.json").read_text()
    edit(data, "train", lambda content: [entry.pop("segmentation") for entry in content["annotations"][:stripped]])
    config = DetectConfig.parse(
        {
            "data": str(data), "head": head, "backbone": "swin_nano", "backbone_args": SMALL, "img_size": 64,
            "steps": 180, "batch": 4, "lr": 2e-3, "device": "cpu", "out": str(tmp_path / "run"), "report": False,
            "drop_path": 0.0, "scales": [1.0, 1.0], "evaluate_every": 1000, "optimizer": {"warmup": 30, "clip": 5.0},
            "detector": {"channels": 48, "hidden": 128, "proposals": 100, "samples": 64},
        }
    )  # fmt: skip
    commands.train(config)
    (data / "instances_train.json").write_text(original)
    scores = commands.evaluate(
        commands.DetectEvalConfig(model=str(tmp_path / "run"), data=str(data), split="train", device="cpu")
    ).data
    assert scores["box_ap50"] > 0.9
    assert scores["mask_ap50"] > 0.9


@pytest.mark.slow
def test_a_segmenter_overfits_eight_images(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "data", train=8, val=1)
    config = SegmentConfig.parse(
        {
            "data": str(data), "backbone": "swin_nano", "backbone_args": SMALL, "img_size": 48, "steps": 110,
            "batch": 4, "lr": 1e-3, "device": "cpu", "out": str(tmp_path / "run"), "report": False, "drop_path": 0.0,
            "scales": [1.0, 1.0], "evaluate_every": 1000, "photometric": False, "decoder": {"channels": 48},
            "optimizer": {"warmup": 10, "clip": 5.0},
        }
    )  # fmt: skip
    segment_commands.train(config)
    scores = segment_commands.evaluate(
        segment_commands.SegmentEvalConfig(model=str(tmp_path / "run"), data=str(data), split="train", device="cpu")
    ).data
    assert scores["miou"] > 0.9
