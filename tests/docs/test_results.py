"""Compute the tables of RESULTS*.md and SPEED*.md again from the logs in docs/results/."""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from frugalvit.comparison.statistics import paired_difference
from reproduce import folder_name

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted(DOCS.glob("RESULTS*.md")), *sorted(DOCS.glob("SPEED*.md"))]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
MARKER = re.compile(r"^<!-- results: ([^:]+): (.+) -->\n\n((?:\|.*\n)+)", re.MULTILINE)


def read_scores(table: str, setting: str, metric: str) -> list[float]:
    """Return the final values of a setting's seeds; ``table`` may end with /BACKBONE."""
    table, _, backbone = table.partition("/")
    backbones = sorted(folder.name for folder in (DOCS / "results" / table).iterdir())
    backbone = backbone or (backbones[0] if len(backbones) == 1 else "swin_tiny_w7")
    scores = []
    for log in sorted((DOCS / "results" / table / backbone / folder_name(setting)).glob("seed_*.jsonl")):
        summary = log.with_suffix(".json")
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        lines.append(json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {})
        scores.append(next(line[metric] for line in reversed(lines) if metric in line))
    return scores


def read_cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]


def marked_cells() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (table, setting, metric, cell, cell with the number of seeds) of every marked table."""
    for tables, metrics, text in MARKER.findall(TEXT):
        header, _, *body = read_cells(text)
        first = header.index("table, setting") if "table, setting" in header else 0
        for cells in body:
            table, setting = cells[first].split(", ", 1) if first else (tables, cells[0])
            assert table in tables.split()
            for column, metric in enumerate(metrics.split(), start=first + 1):
                yield table, setting, metric, cells[column], cells[header.index("seeds")] if "seeds" in header else ""


@pytest.mark.parametrize(("table", "setting", "metric", "cell", "seeds"), list(marked_cells()))
def test_cell_equals_the_logs(table: str, setting: str, metric: str, cell: str, seeds: str) -> None:
    values = read_scores(table, setting, metric)
    numbers = [re.sub(r"[^\d.]", "", part) for part in cell.split("±")]
    expected = [statistics.fmean(values), *([statistics.stdev(values)] if len(values) > 1 else [])]
    assert [f"{value:.{len(n.partition('.')[2])}f}" for value, n in zip(expected, numbers, strict=True)] == numbers
    assert seeds in ("", str(len(values)))


def gain_rows() -> list[list[str]]:
    table = TEXT[TEXT.index("| you train | without, % | with, % | gain |") :].split("\n\n")[0]
    return read_cells(table)[2:]


@pytest.mark.parametrize("row", gain_rows(), ids=lambda row: row[5])
def test_gain_of_drloc_equals_the_logs(row: list[str]) -> None:
    def points(value: float) -> str:
        return f"{value:+.1f}".replace("-", "−") if abs(value) >= 0.05 else "0.0"

    ours, theirs = (read_scores(*cell.split(", ", 1), "top1") for cell in row[5:7])
    seeds = min(len(ours), len(theirs))
    assert row[4] == str(seeds)
    assert row[1:3] == [f"{statistics.fmean(scores[:seeds]):.1f}" for scores in (theirs, ours)]
    expected = f"{points(ours[0] - theirs[0])} (one seed, no interval)"
    if seeds > 1:
        gain = paired_difference(ours[:seeds], theirs[:seeds])
        expected = f"{points(gain.mean)} ({points(gain.low)} to {points(gain.high)})"
    assert row[3].replace("*", "") == expected


def test_steps_on_the_gpu_equal_the_benchmark() -> None:
    """Each row of the table of speeds is a row of ``frugalvit bench step``."""
    results = json.loads((DOCS / "results" / "h200.json").read_text(encoding="utf-8"))
    measured = [row for name, result in results.items() if name.startswith("bench step") for row in result["rows"]]
    rows = read_cells(TEXT[TEXT.index("| step | images a second |") :].split("\n\n")[0])[2:]
    assert len(rows) == len(measured)
    for _, rate, milliseconds, host, memory, share, *_ in ([cell.strip("* ") for cell in row] for row in rows):
        row = next(row for row in measured if row["images_per_second"] == float(rate.replace(",", "")))
        assert float(milliseconds.replace(",", "")) == pytest.approx(row["ms"], abs=0.051)
        assert float(host) == pytest.approx(row["host_ms"], abs=0.051)
        key = "reserved_gib" if "reserved" in memory else "peak_gib"
        assert float(memory.split()[0]) == pytest.approx(row[key], abs=0.051)
        assert float(share.split()[0]) == row["matrix_rate_percent"]
