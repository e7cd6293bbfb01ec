"""The tables in docs/RESULTS.md say what the kept metrics say."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "RESULTS.md").read_text(encoding="utf-8")


def last(path: Path, metric: str) -> float:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return next(line[metric] for line in reversed(lines) if metric in line)


@pytest.mark.parametrize(("row", "setting"), [("with Drloc", "with"), ("without", "without")])
def test_drloc_on_flowers(row: str, setting: str) -> None:
    folder = DOCS / "results" / "drloc-flowers" / "swin_tiny_w7" / setting
    scores = [last(path, "top1") for path in sorted(folder.glob("seed_*.jsonl"))]
    printed = re.search(rf"^\| {row}[^|]*\| ([\d.]+)[^|]*\| (\d+) \|", TEXT, re.MULTILINE)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(sum(scores) / len(scores), abs=0.005)
    assert int(printed[2]) == len(scores)


@pytest.mark.parametrize("setting", ["with", "without"])
def test_the_demonstration(setting: str) -> None:
    scores = [last(path, "top1") for path in sorted((DOCS / "results" / "demo" / setting).glob("seed_*.jsonl"))]
    printed = re.search(rf"^\| few digits, {setting}[^|]*\| ([\d.]+) ± ([\d.]+) \| (\d+) \|", TEXT, re.MULTILINE)
    assert printed is not None and int(printed[3]) == len(scores)
    assert float(printed[1]) == pytest.approx(statistics.fmean(scores), abs=0.005)
    assert float(printed[2]) == pytest.approx(statistics.stdev(scores), abs=0.005)


def test_the_localization_error_is_as_told() -> None:
    path = DOCS / "results" / "drloc-flowers" / "swin_tiny_w7" / "with" / "seed_0.jsonl"
    assert "1.21 grid cells" in TEXT and last(path, "localization_error") == pytest.approx(1.21, abs=0.005)
