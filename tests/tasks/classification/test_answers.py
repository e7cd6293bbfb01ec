"""``predict`` and ``eval`` of calibrated models, and the calibration of a training run."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import frugalvit as fv
from frugalvit.cli import main as cli
from frugalvit.errors import UserError
from frugalvit.report.html import write_report
from helpers.tiny_runs import TRAIN, write_images


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with splits train, val and test."""
    folder = tmp_path_factory.mktemp("answers")
    data = write_images(folder / "photos", train=16, val=15)
    write_images(folder / "more", train=0, val=12)
    (folder / "more" / "val").rename(data / "test")
    fv.train(str(data), **TRAIN, out=str(folder / "run"), device="cpu", quiet=True)
    return folder / "run"


def test_a_run_is_calibrated_on_val(run: Path, tmp_path: Path) -> None:
    model, summary = fv.load(run), json.loads((run / "summary.json").read_text())
    assert model.calibration is not None and model.calibration.gallery is not None
    assert (model.calibration.held_out, model.calibration.images, len(model.calibration.gallery)) == ("val", 30, 32)
    names = json.loads((run / "training_images.json").read_text())
    assert len(names) == 32 and all(Path(entry["file"]).parent.name == entry["label"] for entry in names)
    assert (
        summary["calibration"]["how"].startswith("calibrated on 30 images") and summary["calibration"]["before"]["bins"]
    )
    text = write_report([run], tmp_path / "page.html").read_text()
    assert "temperature" in text and "before" in text
    checkpoint = fv.load(run / "checkpoints" / "last.pt")
    assert checkpoint.calibration is None, "it belongs to the weights of the model folder"


def test_eval_measures_what_predict_promises(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run.parent / "photos"
    scored = fv.evaluate(str(run), str(data), device="cpu", coverage=0.8)
    files = sorted((data / "test").rglob("*.png"))
    answers = fv.predict(str(run), [*map(str, files)], device="cpu", coverage=0.8)["predictions"]
    inside = [Path(answer["image"]).parent.name in answer["set"] for answer in answers]
    assert scored["sets"]["inside"] == pytest.approx(100 * sum(inside) / len(files))
    assert scored["sets"]["classes"] == pytest.approx(sum(len(answer["set"]) for answer in answers) / len(files))
    assert scored["unlike_training"] == pytest.approx(100 * sum(a["unlike_training"] for a in answers) / len(files))
    summary = json.loads((run / "summary.json").read_text())
    assert scored["ece"] == pytest.approx(summary["calibration"]["error"], abs=1e-3)
    assert scored["ece_before"] == pytest.approx(summary["calibration"]["before"]["error"], abs=1e-3)
    assert cli.main(["eval", str(run), str(data), "--device", "cpu", "--coverage", "0.8"]) == 0
    assert "reliability" in (printed := capsys.readouterr().out) and "sets for 80 %" in printed


def test_predict_prints_sets(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(run), str(run.parent / "photos" / "test"), "--device", "cpu", "--coverage", "0.9"]
    assert cli.main(words) == 0
    assert "90% set" in capsys.readouterr().out
    assert cli.main([*words, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 48 and {row["in_set"] for row in rows} <= {"0", "1"}


@pytest.mark.parametrize("options", [{"coverage": 0.9, "mirror": True}, {"coverage": 0}, {"coverage": 1}])
def test_coverages_that_cannot_be_kept_are_errors(options: dict[str, Any], run: Path) -> None:
    with pytest.raises(UserError, match="coverage"):
        fv.predict(str(run), str(run.parent / "photos" / "test"), device="cpu", **options)


def test_without_val_there_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_images(tmp_path / "photos", train=8, val=5)
    (data / "val").rename(data / "test")
    fv.train(str(data), **TRAIN | {"steps": 2}, split="given", out=str(tmp_path / "run"), device="cpu")
    assert "not calibrated: there is no val split" in capsys.readouterr().err
    with pytest.raises(UserError, match="not calibrated"):
        fv.predict(str(tmp_path / "run"), str(data / "test"), device="cpu", coverage=0.9)
