"""Configurations of detection and segmentation runs that take seconds."""

from pathlib import Path
from typing import Any

from frugalvit.config.dense import DetectConfig, SegmentConfig

TINY = {"embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4]}
COMMON: dict[str, Any] = {
    "backbone": "swin_nano", "backbone_args": TINY, "img_size": 32, "steps": 4, "batch": 2, "device": "cpu", "lr": 1e-3,
    "evaluate_every": 2, "log_every": 1, "workers": 1,
}  # fmt: skip
HEADS = {"channels": 16, "hidden": 32, "proposals": 30, "samples": 32}


def detect_config(data: Path, out: Path, **more: Any) -> DetectConfig:
    return DetectConfig.parse({**COMMON, "detector": HEADS, "data": str(data), "out": str(out), **more})


def segment_config(data: Path, out: Path, **more: Any) -> SegmentConfig:
    return SegmentConfig.parse({**COMMON, "decoder": {"channels": 16}, "data": str(data), "out": str(out), **more})
