"""What a command hands back: one object for machines, tables for people."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """Rows of cells under named columns."""

    columns: list[str]
    rows: list[list[object]]
    title: str = ""


@dataclass
class CommandResult:
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


_MARKDOWN = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {sign: f"\\{sign}" for sign in ("\\", "|", "*", "_", "`", "[", "]", "#")}
)
_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "±": r"$\pm$"}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
)


class Bold(str):
    """A cell that stands out, where the format can show it."""


def as_markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown with a line for the columns' names."""

    def cell(value: object) -> str:
        shown = markdown_text(as_text(value))
        return f"**{shown}**" if isinstance(value, Bold) else shown

    lines = [columns, *rows]
    head, *body = ["| " + " | ".join(map(cell, line)) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(columns), *body]) + "\n"


def markdown_text(text: str) -> str:
    """Free text on one line, in which nothing acts as Markdown or HTML."""
    return " ".join(text.split()).translate(_MARKDOWN)


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Comma-separated values, unrounded, with a line for the columns' names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def as_latex(columns: Sequence[str], *groups: Iterable[Sequence[object]], words: int = 1) -> str:
    """A tabular that needs no package, a line between groups of rows; the first ``words`` columns are set left."""

    def cell(value: object) -> str:
        shown = " ".join(as_text(value).split()).translate(_LATEX)
        return rf"\textbf{{{shown}}}" if isinstance(value, Bold) else shown

    def line(cells: Sequence[object]) -> str:
        return " & ".join(map(cell, cells)) + r" \\"

    blocks = [[line(columns)], *([line(row) for row in group] for group in groups)]
    body = [text for block in blocks if block for text in (*block, r"\hline")]
    alignment = "l" * words + "r" * (len(columns) - words)
    return "\n".join([rf"\begin{{tabular}}{{{alignment}}}", r"\hline", *body, r"\end{tabular}", ""])
