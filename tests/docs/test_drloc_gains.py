"""'Does Drloc help?', the first table of docs/RESULTS.md, says what the kept metrics say."""

from __future__ import annotations

import pytest

from frugalvit.utils.statistics import paired_difference
from helpers.kept_results import TEXT, scores


def _rows() -> list[list[str]]:
    table = TEXT[TEXT.index("| you train | table, setting | against | gain |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [row for row in rows if row[1]]


def _points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−") if abs(value) >= 0.05 else "0.0"


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[1])
def test_a_gain_is_what_the_logs_say(row: list[str]) -> None:
    ours, theirs = (scores(*cell.split(", ", 1), "top1") for cell in row[1:3])
    shared = min(len(ours), len(theirs))  # the first seeds of both
    assert row[4] == str(shared)
    if shared > 1:
        found = paired_difference(ours[:shared], theirs[:shared])
        told = f"{_points(found.mean)} ({_points(found.low)} to {_points(found.high)})"
    else:
        told = _points(ours[0] - theirs[0])
    assert row[3].replace("*", "") == told
