"""The benchmark of the losses runs and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_benchmark_runs() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "losses.py"
    command = [sys.executable, str(script), "--device", "cpu", "--batch", "1", "--prototypes", "64", "--dim", "24"]
    done = subprocess.run([*command, "--repeats", "1", "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [(row["loss"], row["way"]) for row in rows][-3:] == [
        ("localization", "as written"),
        ("localization", "64 pairs"),
        ("localization", "all pairs"),
    ]
    assert len(rows) == 9 and all(row["milliseconds"] > 0 for row in rows)
