"""fv.load_detector and fv.load_segmenter agree with the commands."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval.core import mask as run_length
from PIL import Image

import frugalvit as fv
from frugalvit.cli.main import main
from helpers.dense_runs import Kind


def test_a_detector_equals_its_command(detector: Path, shapes: Path, tmp_path: Path) -> None:
    picture = sorted((shapes / "images").glob("val_*.png"))[0]
    words = ["--threshold", "0", "--out", str(tmp_path / "found"), "--device", "cpu", "--quiet"]
    assert main(["detect", "predict", str(detector), str(picture), *words]) == 0
    written = json.loads((tmp_path / "found" / "detections.json").read_text())
    names = {entry["id"]: entry["name"] for entry in written["categories"]}
    ready = fv.load_detector(detector, device="cpu")
    assert set(ready.classes) == set(names.values())
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    for image in (str(picture), Image.open(picture), pixels):
        (found,) = ready.predict(image, threshold=0)
        assert found and [entry.score for entry in found] == sorted((entry.score for entry in found), reverse=True)
        expected = sorted(written["annotations"], key=lambda entry: -entry["score"])
        assert [entry.name for entry in found] == [names[entry["category_id"]] for entry in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.score == pytest.approx(theirs["score"], abs=1e-4)
            assert mine.box == pytest.approx(theirs["bbox"], abs=0.1)
            assert mine.mask is not None and mine.mask.shape == pixels.shape[:2]
            assert np.array_equal(mine.mask, run_length.decode(theirs["segmentation"]).astype(bool))
    assert ready.predict([pixels, pixels], threshold=1.0) == [[], []]


def test_a_segmenter_equals_its_command(segmenter: Path, scenes: Path, tmp_path: Path) -> None:
    picture = sorted((scenes / "images" / "val").iterdir())[0]
    words = ["--out", str(tmp_path / "found"), "--device", "cpu", "--quiet"]
    assert main(["segment", "predict", str(segmenter), str(picture), *words]) == 0
    ready = fv.load_segmenter(segmenter, device="cpu")
    (classes,) = ready.predict(picture)
    assert np.array_equal(classes, np.asarray(Image.open(tmp_path / "found" / f"{picture.stem}.png")))
    assert len(ready.classes) == 3


def test_loading_keeps_random_state_and_onednn(kind: Kind, model: Path) -> None:
    load = fv.load_detector if kind.verb == "detect" else fv.load_segmenter
    torch.manual_seed(5)
    expected, onednn = torch.rand(3), torch.backends.mkldnn.enabled
    try:
        torch.backends.mkldnn.enabled = True
        torch.manual_seed(5)
        ready: Any = load(model, device="cpu")
        assert torch.equal(torch.rand(3), expected) and torch.backends.mkldnn.enabled
        ready.predict(np.zeros((40, 52, 3), np.uint8))
        assert torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = onednn
