"""Tables as text for other programs: Markdown, CSV, LaTeX.

Names in them are somebody else's: whatever signs a name holds, they are shown and never act as markup.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from frugalvit.results import as_text

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
