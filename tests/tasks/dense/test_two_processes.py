"""Two processes with half the batch each equal one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers.dense_runs import COMMON
from helpers.dense_samples import make_coco, make_scenes


def losses(kind: str, data: Path, out: Path, processes: int, options: list[str]) -> list[float]:
    config = out.parent / "common.yaml"
    config.write_text(yaml.safe_dump({**COMMON, "batch": 4, "drop_path": 0.0, "report": False}))
    words = [kind, "train", str(data), "--config", str(config), "--devices", str(processes), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "frugalvit.cli", *words, *options], check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


@pytest.mark.slow
def test_segmentation_is_equal_to_rounding(tmp_path: Path) -> None:
    data = make_scenes(tmp_path / "shapes", side=40)
    options = ["--decoder.channels", "16", "--decoder.dropout", "0"]
    one, two = (losses("segment", data, tmp_path / f"run_{n}", n, options) for n in (1, 2))
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.slow
def test_detection_has_similar_losses(tmp_path: Path) -> None:
    """The sampled regions depend on the rank, so the losses are similar, not equal."""
    data = make_coco(tmp_path / "shapes", side=48)
    sizes = {"channels": 16, "hidden": 32, "proposals": 30, "samples": 32}
    options = [word for name, value in sizes.items() for word in (f"--detector.{name}", str(value))]
    one, two = (losses("detect", data, tmp_path / f"run_{n}", n, options) for n in (1, 2))
    assert one[0] == pytest.approx(two[0], rel=0.2) and len(one) == len(two) == 4
