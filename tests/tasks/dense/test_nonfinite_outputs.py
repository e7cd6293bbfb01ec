"""Detectors and segmenters with non-finite outputs."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from helpers.dense_runs import Kind


@pytest.mark.parametrize(
    ("kind", "options"),
    [("detect", {"head": "mask-rcnn"}), ("detect", {"head": "cascade"}), ("segment", {})],
    indirect=["kind"],
)
def test_a_run_with_nonfinite_weights_fails(kind: Kind, options: dict[str, str], data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 of 3 steps"):
        kind.train(data, tmp_path / "run", steps=3, lr=1e30, evaluate_every=1, report=False, **options)
    assert not (tmp_path / "run" / "checkpoints" / "best.pt").exists()
    assert not (tmp_path / "run" / "summary.json").exists() and (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("use", ["predict", "eval"])
def test_nonfinite_outputs_are_a_user_error(
    kind: Kind, use: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "model"
    damaged.mkdir()
    (damaged / "transfer.json").write_bytes((model / "transfer.json").read_bytes())
    tensors = load_file(model / "transfer.safetensors")
    first = next(name for name, value in tensors.items() if name.endswith("norm.weight"))
    tensors[first] = torch.full_like(tensors[first], math.nan)
    save_file(tensors, damaged / "transfer.safetensors")
    image = kind.image(data, "val", 0)
    options = [str(image), "--out", str(tmp_path / "out")] if use == "predict" else [str(data)]
    assert cli.main([kind.verb, use, str(damaged), *options, "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert str(damaged) in message and "finite" in message
