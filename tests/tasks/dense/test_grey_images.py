"""Networks with one channel train, score and predict on grey images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import frugalvit as fv
from frugalvit import create_backbone
from frugalvit.cli.main import main
from frugalvit.data.augment.transforms import Normalize
from frugalvit.errors import UserError
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection import commands
from frugalvit.tasks.detection.dataset import stack_images
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.tasks.segmentation.task import SegmentationTask
from frugalvit.tasks.segmentation.upernet import Segmenter, SegmenterSpec
from helpers.dense_runs import TINY, detect_config, segment_config


def task_of(channels: int) -> SegmentationTask:
    backbone = create_backbone("swin_nano", img_size=32, in_chans=channels, **TINY)
    return SegmentationTask(Segmenter(Pyramid(backbone), SegmenterSpec(3, 16)), 32)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalized_as_in_classification(channels: int) -> None:
    task, pictures = task_of(channels), torch.randint(0, 256, (2, 3, 20, 28), dtype=torch.uint8)
    images = F.interpolate(pictures / 255, size=(40, 56), mode="bilinear", antialias=True)
    wanted = Normalize(task.backbone.mean, task.backbone.std)(images)
    assert wanted.shape[1] == channels
    torch.testing.assert_close(task.normalize(images), wanted)
    laid = stack_images(list(pictures), [(40, 56)] * 2, [False, True], task.mean, task.std)
    torch.testing.assert_close(laid[0, :, :40, :56], wanted[0])
    torch.testing.assert_close(laid[1, :, :40, :56], wanted[1].flip(2))
    assert laid.shape == (2, channels, 64, 64) and not laid[:, :, 40:].any() and not laid[:, :, :, 56:].any()


@pytest.mark.parametrize("kind", ["detect", "segment"])
def test_one_channel_from_training_to_prediction(kind: str, shapes: Path, scenes: Path, tmp_path: Path) -> None:
    command: Any = commands if kind == "detect" else segment_commands
    make, data = (detect_config, shapes) if kind == "detect" else (segment_config, scenes)
    run, score = tmp_path / "run", "box_ap" if kind == "detect" else "miou"
    trained = command.train(
        make(data, run, steps=1, report=False, split="given", backbone_args={**TINY, "in_chans": 1})
    )
    config = command.DetectEvalConfig if kind == "detect" else command.SegmentEvalConfig
    scored = command.evaluate(config(model=str(run), data=str(data), device="cpu"))
    assert scored.data[score] == trained.data[score]
    pixels = np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    words = ["--out", str(tmp_path / "found"), "--device", "cpu", "--quiet"]
    assert main([kind, "predict", str(run), str(tmp_path / "x.png"), *words]) == 0
    ready = fv.load_detector(run, "cpu") if kind == "detect" else fv.load_segmenter(run, "cpu")
    assert len(ready.predict([pixels, pixels[..., :1]])) == 2


def test_other_channels_are_refused() -> None:
    with pytest.raises(UserError, match="4 channels"):
        task_of(4)
