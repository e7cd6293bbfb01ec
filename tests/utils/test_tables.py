"""Tables in Markdown, CSV and LaTeX: names are shown literally."""

import csv
import io
import re

import pytest

from frugalvit.utils.tables import as_csv, as_latex, as_markdown

COLUMNS = ["a|b", "x^y~z"]
ROWS: list[list[object]] = [["c|d", r"50 % \ ±"], ["e_f", 0.123456], ["two\nlines", None]]


def test_markdown() -> None:
    head, ruler, *body = as_markdown(COLUMNS, ROWS).splitlines()
    for line in (head, ruler, *body):
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
    assert body == [r"| c\|d | 50 % \\ ± |", r"| e\_f | 0.1235 |", "| two lines | - |"]


@pytest.mark.parametrize("sign", "\\|*_`[]#<>&")
def test_markdown_shows_every_sign(sign: str) -> None:
    """Python-Markdown, which TensorBoard uses, renders the same text."""
    markdown = pytest.importorskip("markdown")
    text = f"{sign}a{sign} {sign}{sign}b{sign}{sign} {sign}(c)"
    shown = markdown.markdown(as_markdown(["name"], [[text]]), extensions=["tables"])
    (cell,) = re.findall(r"<td>(.*?)</td>", shown)
    assert cell.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == text


def test_csv_round_trip() -> None:
    text = as_csv(COLUMNS, ROWS)
    assert "\r" not in text
    assert list(csv.reader(io.StringIO(text))) == [COLUMNS, *([str(cell or "") for cell in row] for row in ROWS)]


def test_latex() -> None:
    assert as_latex(COLUMNS, ROWS[:2]).splitlines() == [
        r"\begin{tabular}{lr}",
        r"\hline",
        r"a|b & x\textasciicircum{}y\textasciitilde{}z \\",
        r"\hline",
        r"c|d & 50 \% \textbackslash{} $\pm$ \\",
        r"e\_f & 0.1235 \\",
        r"\hline",
        r"\end{tabular}",
    ]
