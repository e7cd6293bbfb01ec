"""Training on a GPU in half precision; scores agree with the CPU."""

from pathlib import Path

import pytest

from frugalvit.config.dense import DetectEvalConfig, SegmentEvalConfig
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands
from helpers.dense_runs import detect_config, segment_config
from helpers.dense_samples import make_coco, make_scenes


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["mask-rcnn", "cascade"])
def test_detectors_train_in_half_precision(tmp_path: Path, head: str) -> None:
    data = make_coco(tmp_path / "shapes", side=48)
    config = detect_config(data, tmp_path / "run", head=head, device="cuda", steps=30, evaluate_every=30)
    found = commands.train(config).data
    assert found["skipped_steps"] == 0
    options = {"model": str(tmp_path / "run"), "data": str(data), "split": "train"}
    there, here = (commands.evaluate(DetectEvalConfig(**options, device=device)).data for device in ("cuda", "cpu"))
    assert there["box_ap"] == pytest.approx(here["box_ap"], abs=0.02)


@pytest.mark.gpu
def test_segmenters_train_in_half_precision(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "shapes")
    found = segment_commands.train(segment_config(data, tmp_path / "run", device="cuda", steps=30)).data
    assert found["skipped_steps"] == 0 and found["miou"] > 0.2
    options = {"model": str(tmp_path / "run"), "data": str(data)}
    there, here = (
        segment_commands.evaluate(SegmentEvalConfig(**options, device=device)).data for device in ("cuda", "cpu")
    )
    assert there["miou"] == pytest.approx(here["miou"], abs=0.01)
