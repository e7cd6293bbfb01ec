"""What a command hands back: one object for machines, tables for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """Rows of cells under named columns."""

    columns: list[str]
    rows: list[list[object]]
    title: str = ""


@dataclass
class Result:
    """A command's result: ``data`` is what ``--json`` prints, ``tables`` and ``notes`` are what a person reads."""

    data: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def as_text(value: object) -> str:
    """A cell the way a person reads it: four significant decimals for floats, thousands separated for integers."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10 else f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
