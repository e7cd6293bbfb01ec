"""Configurations of detection and segmentation runs that take seconds."""

from pathlib import Path
from typing import Any

from frugalvit.config.dense import DetectConfig, DetectEvalConfig, SegmentConfig, SegmentEvalConfig
from frugalvit.tasks.detection import commands as detect_commands
from frugalvit.tasks.detection.task import DetectionTask
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.tasks.segmentation.task import SegmentationTask
from helpers.dense_samples import make_coco, make_scenes

# With the patches and windows that frugalvit chooses for 32 pixels: each choice builds several networks.
TINY = {"embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4], "patch_size": 2, "window_size": 8}
COMMON: dict[str, Any] = {
    "backbone": "swin_nano", "backbone_args": TINY, "img_size": 32, "steps": 4, "batch": 2, "device": "cpu", "lr": 1e-3,
    "evaluate_every": 2, "log_every": 1, "workers": 1,
}  # fmt: skip
HEADS = {"channels": 16, "hidden": 32, "proposals": 30, "samples": 32}


def detect_config(data: Path, out: Path, **more: Any) -> DetectConfig:
    return DetectConfig.parse({**COMMON, "detector": HEADS, "data": str(data), "out": str(out), **more})


def segment_config(data: Path, out: Path, **more: Any) -> SegmentConfig:
    return SegmentConfig.parse({**COMMON, "decoder": {"channels": 16}, "data": str(data), "out": str(out), **more})


class Kind:
    """Everything that differs between tests of detection and of segmentation."""

    def __init__(self, verb: str) -> None:
        detects = verb == "detect"
        self.verb = verb
        self.commands: Any = detect_commands if detects else segment_commands
        self.task: Any = DetectionTask if detects else SegmentationTask
        self.make_config: Any = detect_config if detects else segment_config
        self.make_data: Any = make_coco if detects else make_scenes
        self.metric = "box_ap" if detects else "miou"
        self.model_fixture, self.data_fixture = ("detector", "shapes") if detects else ("segmenter", "scenes")

    def train(self, data: Path, out: Path, **more: Any) -> dict[str, Any]:
        return self.commands.train(self.make_config(data, out, **more)).data

    def evaluate(self, run: Path, data: Path, **more: Any) -> dict[str, Any]:
        config: Any = DetectEvalConfig if self.verb == "detect" else SegmentEvalConfig
        return self.commands.evaluate(config(model=str(run), data=str(data), device="cpu", **more)).data

    def image(self, data: Path, split: str, number: int) -> Path:
        """The path of an image in the data that ``make_data`` makes."""
        return data / "images" / (f"{split}_{number}.png" if self.verb == "detect" else f"{split}/{number}.png")
