"""Detectors and segmenters with non-finite outputs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.tasks.detection import commands as detect_commands
from frugalvit.tasks.segmentation import commands as segment_commands
from helpers.dense_runs import detect_config, segment_config

WILD = {"steps": 3, "lr": 1e30, "evaluate_every": 1, "report": False}
KINDS = {
    "mask-rcnn": (detect_commands, detect_config, {"head": "mask-rcnn"}),
    "cascade": (detect_commands, detect_config, {"head": "cascade"}),
    "segment": (segment_commands, segment_config, {}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_with_nonfinite_weights_fails(kind: str, shapes: Path, scenes: Path, tmp_path: Path) -> None:
    commands, make, more = KINDS[kind]
    config: Any = make(scenes if kind == "segment" else shapes, tmp_path / "run", **WILD, **more)
    with pytest.raises(UserError, match="2 of 3 steps"):
        commands.train(config)
    assert not (tmp_path / "run" / "checkpoints" / "best.pt").exists()
    assert not (tmp_path / "run" / "summary.json").exists() and (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("verb", ["detect", "segment"])
@pytest.mark.parametrize("use", ["predict", "eval"])
def test_nonfinite_outputs_are_a_user_error(
    verb: str, use: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"detect": ("detector", "shapes"), "segment": ("segmenter", "scenes")}[verb]
    trained, data = (request.getfixturevalue(name) for name in names)
    model = tmp_path / "model"
    model.mkdir()
    (model / "transfer.json").write_bytes((trained / "transfer.json").read_bytes())
    tensors = load_file(trained / "transfer.safetensors")
    first = next(name for name, value in tensors.items() if name.endswith("norm.weight"))
    tensors[first] = torch.full_like(tensors[first], math.nan)
    save_file(tensors, model / "transfer.safetensors")
    image = next((data / "images").rglob("*.png"))
    options = [str(image), "--out", str(tmp_path / "out")] if use == "predict" else [str(data)]
    assert cli.main([verb, use, str(model), *options, "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert str(model) in message and "finite" in message
