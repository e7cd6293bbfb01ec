"""The table of speeds: tiny networks on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed_table.py"


@pytest.mark.slow
def test_rows_are_printed_and_written(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--smoke", "--cache", str(tmp_path), "--out", str(tmp_path / "rows.jsonl")]
    done = subprocess.run([*words, "--cold"], capture_output=True, text=True, check=True)
    assert (tmp_path / "rows.jsonl").read_text() == done.stdout
    cold, warm, *table = map(json.loads, done.stdout.splitlines())
    assert (cold["cache"], warm["cache"]) == ("cold", "warm") and 0 < cold["first_step_s"] < cold["ready_s"]
    rows = {row["row"]: row for row in table}
    assert set(rows) == {"train", "pretrain"}
    assert all(row["images_per_second"] > 0 and not row["fell_back"] for row in rows.values())
    low, high = rows["train"]["drloc_interval"]
    assert low < rows["train"]["drloc_percent"] < high


@pytest.mark.slow
def test_kernels_of_a_row(tmp_path: Path) -> None:
    out = tmp_path / "kernels.txt"
    words = [sys.executable, str(SCRIPT), "--smoke", "--profile", "train", "--out", str(out), "--cache", str(tmp_path)]
    subprocess.run(words, capture_output=True, check=True)
    assert "ms a step" in out.read_text() and len(out.read_text().splitlines()) > 20
