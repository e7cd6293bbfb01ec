"""A command that does not fit a run names the right one."""

import html
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli import main as cli
from frugalvit.config.dense import DetectConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.experiment.resume import check_command
from frugalvit.report import sections
from frugalvit.runs.run_folder import RunFolder, new_run_folder
from frugalvit.tasks.classification import train
from frugalvit.tasks.detection import commands as detect_commands
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.utils import console
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
    assert f"'frugalvit train LABELLED_IMAGES/ --init {tmp_path / 'run'}' adds one" in capsys.readouterr().err


def test_commands_in_messages_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("my run")
    RunFolder(run).close()
    (run / "config.yaml").write_text("images: train\n")
    scored = {"run": str(run), "scored_on": "val", "scored_images": 1}
    detected, segmented = scored | {"box_ap": 1.0}, scored | {"miou": 1.0, "mean_accuracy": 1.0}
    results = [
        train.ClassificationExperiment(TrainConfig()).result(scored),
        pretrain.PretrainExperiment(PretrainConfig()).result({"run": str(run)}),
        detect_commands.DetectExperiment(DetectConfig()).result(detected),
        segment_commands.SegmentExperiment(SegmentConfig()).result(segmented),
    ]
    lines = [result.notes[-1] for result in results]
    record: Any = SimpleNamespace(finished=False, folder=run, name="my run")
    lines.append(html.unescape(sections.unfinished([record])))
    for refused in (
        lambda: new_run_folder(str(run)),
        lambda: load_model(str(run)),
        lambda: check_command(run, ["images"], TrainConfig, "use 'frugalvit {command} --resume {folder}'"),
    ):
        with pytest.raises(UserError) as error:
            refused()
        lines.append(str(error.value))
    for line in lines:
        assert " 'my run'" in line, line
    assert console.shell_quote("runs/plain") == "runs/plain"
