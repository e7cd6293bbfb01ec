"""The scripts in ``benchmarks/`` run."""

import json
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from frugalvit.errors import UserError
from frugalvit.utils import checkout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_script(
    name: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    small = "--device cpu --batch 1 --prototypes 64 --dim 24 --repeats 1 --json"
    rows = run_script("losses.py", small, monkeypatch, capsys)["rows"]
    assert [row["way"] for row in rows] == 2 * ["as written", "plain", "chunked"] + [
        "as written",
        "64 pairs",
        "all pairs",
    ]
    assert all(row["milliseconds"] > 0 for row in rows)


def test_probes_agree_with_scikit_learn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--images 240 --tests 60 --width 8 --classes 4"
    result = run_script("probes.py", small, monkeypatch, capsys)
    assert result["knn"]["top1"] == pytest.approx(result["knn"]["sklearn_top1"])
    assert result["logistic"]["validation"] == pytest.approx(result["logistic"]["sklearn_validation"], abs=7)
    assert min(result["logistic"]["sklearn_objective_excess"]) > -1e-3
    assert result["logistic"]["ratio"] > 0 and result["knn"]["ratio"] > 0


def test_input_pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--size 16 --batch 4 --images 8 --device cpu --workers 0 --steps 1 --reference-steps 1 --rounds 1"
    result = run_script("input_pipeline.py", small, monkeypatch, capsys)
    assert result["frugalvit"] > 0 and result["dataloader"] > 0


def test_selecting(squares: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"swin_nano {squares} --labels 2 --seeds 2 --img-size 32"
    result = run_script("selecting.py", arguments, monkeypatch, capsys)
    assert result["images"] == 36 and all(len(values) == 2 for values in result["scores"]["2"].values())
    assert {"random", "embed --select", "TypiClust", "ProbCover"} < set(result["scores"]["2"])
    assert min(result["scores"]["2"]["embed --select"]) == 100, "three colours"


def test_a_wheel_has_no_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "BENCHMARKS", tmp_path)
    with pytest.raises(UserError, match="benchmarks/"):
        checkout.import_benchmark("reproduce")
