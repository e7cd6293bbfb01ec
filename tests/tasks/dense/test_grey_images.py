"""Networks with one channel train, score and predict on grey images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import frugalvit as fv
from frugalvit import create_backbone
from frugalvit.data.augment.transforms import Normalize
from frugalvit.tasks.dense.pyramid import Pyramid
from frugalvit.tasks.detection.dataset import stack_images
from frugalvit.tasks.segmentation.task import SegmentationTask
from frugalvit.tasks.segmentation.upernet import Segmenter, SegmenterSpec
from helpers.dense_runs import TINY, Kind


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalized_as_in_classification(channels: int) -> None:
    backbone = create_backbone("swin_nano", img_size=32, in_chans=channels, **TINY)
    task = SegmentationTask(Segmenter(Pyramid(backbone), SegmenterSpec(3, 16)), 32)
    pictures = torch.randint(0, 256, (2, 3, 20, 28), dtype=torch.uint8)
    images = F.interpolate(pictures / 255, size=(40, 56), mode="bilinear", antialias=True)
    wanted = Normalize(task.backbone.mean, task.backbone.std)(images)
    assert wanted.shape[1] == channels
    torch.testing.assert_close(task.normalize(images), wanted)
    stacked = stack_images(list(pictures), [(40, 56)] * 2, [False, True], task.mean, task.std)
    torch.testing.assert_close(stacked[0, :, :40, :56], wanted[0])
    torch.testing.assert_close(stacked[1, :, :40, :56], wanted[1].flip(2))
    assert stacked.shape == (2, channels, 64, 64) and not stacked[:, :, 40:].any() and not stacked[:, :, :, 56:].any()


def test_one_channel_from_training_to_prediction(kind: Kind, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = kind.train(data, run, steps=1, report=False, split="given", backbone_args={**TINY, "in_chans": 1})
    assert kind.evaluate(run, data)[kind.metric] == trained[kind.metric]
    pixels = np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
    model = fv.load_detector(run, "cpu") if kind.verb == "detect" else fv.load_segmenter(run, "cpu")
    assert len(model.predict([pixels, pixels[..., :1]])) == 2
