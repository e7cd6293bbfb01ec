"""A command that does not fit a run names the right one."""

from pathlib import Path

import pytest

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli import main as cli
from helpers.tiny_runs import TRAIN


@pytest.mark.parametrize("verb", ["compare", "detect compare", "segment compare"])
def test_a_comparison_is_not_resumed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb.split(), "images", "--with", "lr=1", "--without", "lr=2", "--resume", "runs/x"]) == 2
    assert "with the same --out" in capsys.readouterr().err
    assert cli.main([*verb.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "--init" in text and "--resume" not in text


@pytest.mark.parametrize("task", ["detect", "pretrain", None])
def test_predict_without_classifier(task: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backbone = create_backbone("swin_nano", 32, **TRAIN["backbone_args"])  # type: ignore[arg-type]
    save_model_folder(backbone, tmp_path / "run" / "model", meta={"task": task})
    assert cli.main(["predict", str(tmp_path / "run"), "image.png", "--device", "cpu"]) == 2
    assert f"'frugalvit train LABELLED_IMAGES/ --init {tmp_path / 'run'}' trains one" in capsys.readouterr().err
