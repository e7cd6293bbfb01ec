"""Weights with non-finite outputs are never the best, never exported, and reported in one line."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import frugalvit as fv
from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification.metrics import ClassificationScores
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.classification.train import _describe_losses
from frugalvit.utils import console
from helpers.tiny_runs import load_state, read_metrics, run_tiny
from helpers.toy_task import ToyTask, run_toy

WILD: dict[str, Any] = {"steps": 3, "lr": 1e30, "optimizer": {"clip": 0.0}, "save_every": 0, "log_every": 1}


def strict_json(text: str) -> Any:
    """Parse JSON and refuse NaN, which only Python's parser accepts."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("verb", "values"), [("train", {"ema": 0.0, "evaluate_every": 1}), ("pretrain", {})])
def test_a_run_with_nonfinite_outputs_fails(tmp_path: Path, photos: Path, verb: str, values: dict[str, Any]) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"non-finite outputs.*of 3 steps were skipped.*--lr"):
        run_tiny(verb, data=photos, out=run, **WILD | values)
    left = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "fault"} <= left and not left & {"model", "summary.json"}
    assert not (run / "checkpoints" / "best.pt").exists()


class Judged(ToyTask):
    """Scores 1 at every evaluation; from step ``since`` on its outputs are non-finite."""

    def __init__(self, since: int, **kind: Any) -> None:
        super().__init__()
        self.since = since
        self.__dict__ |= kind

    def evaluate(self, step: int) -> dict[str, float]:
        self.nonfinite_outputs = step >= self.since
        return {"top1": math.nan if self.nonfinite_outputs else 1.0}


def test_best_weights_are_exported_after_nonfinite_ones(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    outcome = run_toy(tmp_path / "run", Judged(since=15), evaluate_every=5)
    assert outcome["best_step"] == 10 and outcome["best"] == 1.0 and outcome["broken"]
    assert "step 15: non-finite outputs" in capsys.readouterr().err
    assert [line["top1"] for line in read_metrics(tmp_path / "run") if "top1" in line] == [1.0, 1.0, None, None]


@pytest.mark.parametrize("kind", [{"eval_split": "test"}, {"export_last": True}], ids=["no-val", "export-last"])
def test_last_weights_must_be_finite_if_exported(tmp_path: Path, kind: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"non-finite outputs.*the checkpoint before is intact"):
        run_toy(tmp_path / "run", Judged(since=20, **kind), evaluate_every=5)
    assert load_state(tmp_path / "run")["step"] == 18, "the broken weights are not saved over those before"


def test_weights_that_recover_are_scored_again(tmp_path: Path) -> None:
    class Passing(Judged):
        def evaluate(self, step: int) -> dict[str, float]:
            self.nonfinite_outputs = step == 10
            return {"top1": 2.0 if self.nonfinite_outputs else 1.0}

    outcome = run_toy(tmp_path / "run", Passing(0), evaluate_every=5)
    assert outcome["best_step"] == 20 and outcome["best"] == 1.0 and not outcome["broken"]


@pytest.mark.parametrize(("odd", "broken"), [(None, False), (math.nan, True), (math.inf, True)])
def test_nonfinite_outputs_are_detected(odd: float | None, broken: bool) -> None:
    scores = ClassificationScores(3, torch.device("cpu"))
    logits = torch.randn(4, 3)
    scores.add(logits, torch.tensor([0, 1, 2, 0]), torch.arange(4))
    if odd is not None:
        logits[2, 1] = odd
        scores.add(logits, torch.tensor([0, 1, 2, 0]), torch.arange(4))
    assert bool(scores.nonfinite) is broken


def test_nonfinite_localization_error_is_ignored() -> None:
    task: Any = SimpleNamespace(last_error=None, health=None)
    for error in (2.5, math.nan, math.inf):
        ClassificationTask.on_metrics(task, 1, {"localization_error": error})
    ClassificationTask.on_metrics(task, 2, {"top1": 3.0})
    assert task.last_error == 2.5
    assert _describe_losses({"localization_error": math.nan, "constant_answer_error": 1.0}) == []
    assert _describe_losses({"localization_error": 0.9, "constant_answer_error": 1.0})


def test_json_has_null_for_nonfinite_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": math.nan, "b": [1.5, -math.inf, (math.inf,)], "c": {"d": True, "e": None, "f": "NaN", "ü": 2}}
    plain = {"a": None, "b": [1.5, None, [None]], "c": {"d": True, "e": None, "f": "NaN", "ü": 2}}
    console.print_json(value)
    assert strict_json(capsys.readouterr().out) == plain
    run = RunFolder(tmp_path / "run")
    run.save_json("some.json", value)
    run.log(1, split="train", loss=math.nan)
    run.close()
    assert strict_json((tmp_path / "run" / "some.json").read_text(encoding="utf-8")) == plain
    assert strict_json((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8"))["loss"] is None


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder whose weights are finite, but too large for finite outputs."""
    backbone = create_backbone("swin_nano", img_size=16, num_classes=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2])
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.mul_(1e30)
    folder = tmp_path_factory.mktemp("models") / "broken"
    save_model_folder(backbone, folder, classes=("cat", "dog"))
    return folder


@pytest.mark.parametrize("words", [["predict", "{model}", "{image}"], ["export", "{model}", "--out", "{out}"]])
def test_a_nonfinite_model_is_one_line(
    words: list[str], broken: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"model": broken, "image": photos / "val" / "cat" / "0.png", "out": tmp_path / "out"}
    assert cli.main([word.format(**paths) for word in words]) == 2
    captured = capsys.readouterr()
    assert f"{broken.name} are non-finite" in captured.err and "--lr" in captured.err
    assert not captured.out and not (tmp_path / "out").exists()


def test_a_nonfinite_model_raises_in_python(broken: Path, photos: Path) -> None:
    with pytest.raises(UserError, match="outputs of broken are non-finite"):
        fv.load(broken).predict(photos / "val" / "cat" / "0.png")
