"""What a command hands back: one object for machines, tables for people."""

from __future__ import annotations

import json
import math
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
    asked_to_stop: bool = False  # by a signal, too late for it: whoever wanted several results wants no more


def to_json(value: object, *, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON that every reader takes: numbers that are infinite or undefined, for which it has no word, become null."""
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=ensure_ascii, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def as_text(value: object) -> str:
    """A cell the way a person reads it: four significant decimals for floats, thousands separated for integers."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10 else f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
