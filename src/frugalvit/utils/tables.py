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


def as_markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = ([markdown_text(as_text(value)) for value in line] for line in (columns, *rows))
    head, *body = [f"| {' | '.join(line)} |" for line in cells]
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


def as_latex(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a LaTeX tabular without packages."""

    def line(cells: Sequence[object]) -> str:
        return " & ".join(" ".join(as_text(cell).split()).translate(_LATEX) for cell in cells) + r" \\"

    begin = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    lines = [begin, r"\hline", line(columns), r"\hline", *map(line, rows), r"\hline", r"\end{tabular}", ""]
    return "\n".join(lines)
