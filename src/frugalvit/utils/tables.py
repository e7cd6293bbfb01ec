"""The result of a command: JSON data, tables, and their Markdown, CSV and LaTeX."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """A table with named columns."""

    columns: list[str]
    rows: list[list[object]]
    title: str = ""


@dataclass
class CommandResult:
    """The result of a command: ``--json`` prints ``data``, otherwise ``tables`` and ``notes`` are printed."""

    data: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stop_requested: bool = False  # a signal came too late to stop this run; a comparison must stop after it


def to_json(value: object, *, ensure_ascii: bool = False, **options: Any) -> str:
    """Return valid JSON: infinite and undefined numbers become null."""
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=ensure_ascii, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def as_text(value: object) -> str:
    """Format a cell: four significant digits for small floats, thousands separators for integers."""
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
    """A cell in bold, if the format has bold text."""


def as_markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:

    def cell(value: object) -> str:
        text = markdown_text(as_text(value))
        return f"**{text}**" if isinstance(value, Bold) else text

    lines = [columns, *rows]
    head, *body = ["| " + " | ".join(map(cell, line)) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(columns), *body]) + "\n"


def markdown_text(text: str) -> str:
    """Escape text for Markdown and HTML, on one line."""
    return " ".join(text.split()).translate(_MARKDOWN)


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format comma-separated values, unrounded, with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def as_latex(columns: Sequence[str], *groups: Iterable[Sequence[object]]) -> str:
    """Format a LaTeX tabular without packages, with a rule between groups of rows."""

    def cell(value: object) -> str:
        text = " ".join(as_text(value).split()).translate(_LATEX)
        return rf"\textbf{{{text}}}" if isinstance(value, Bold) else text

    def line(cells: Sequence[object]) -> str:
        return " & ".join(map(cell, cells)) + r" \\"

    blocks = [[line(columns)], *([line(row) for row in group] for group in groups)]
    body = [text for block in blocks if block for text in (*block, r"\hline")]
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\hline", *body, r"\end{tabular}", ""])
