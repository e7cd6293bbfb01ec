"""The kept results (docs/results/), and the page that tells of them."""

from __future__ import annotations

import json
from pathlib import Path

from frugalvit.reproduce.command import folder_name

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("RESULTS.md", "SPEED.md"))
PROSE = " ".join(TEXT.split())


def last(path: Path, metric: str) -> float:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return next(line[metric] for line in reversed(lines) if metric in line)


def scores(table: str, setting: str, metric: str) -> list[float]:
    """The final values of a setting's seeds: what the run said of itself, or its last line where it was cut off.

    table: with /BACKBONE where it is not the table's only one, or Swin-T
    """
    found, (table, _, backbone) = [], table.partition("/")
    backbones = sorted(folder.name for folder in (DOCS / "results" / table).iterdir())
    backbone = backbone or (backbones[0] if len(backbones) == 1 else "swin_tiny_w7")
    for log in sorted((DOCS / "results" / table / backbone / folder_name(setting)).glob("seed_*.jsonl")):
        said = log.with_suffix(".json")
        numbers = json.loads(said.read_text(encoding="utf-8")) if said.exists() else {}
        found.append(numbers[metric] if metric in numbers else last(log, metric))
    return found


def signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
