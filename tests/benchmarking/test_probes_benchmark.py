"""The benchmark runs and compares like with like."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "probes.py"


def test_both_sides_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--images", "240", "--tests", "60", "--width", "8", "--classes", "4"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *sizes])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(capsys.readouterr().out)
    assert result["knn"]["top1"] == pytest.approx(result["knn"]["sklearn_top1"])
    assert result["logistic"]["validation"] == pytest.approx(result["logistic"]["sklearn_validation"], abs=7)
    assert min(result["logistic"]["sklearn_objective_excess"]) > -1e-3
    assert result["logistic"]["ratio"] > 0 and result["knn"]["ratio"] > 0
