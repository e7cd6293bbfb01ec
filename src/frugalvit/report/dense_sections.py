"""What a report shows of a detection or segmentation run: precision over recall, classes, best and worst pictures.

A run leaves transfer_report.json: {"curves": {"box": {"IoU 0.50": [101 precisions]}}, "per_class": {"columns", "rows"},
"colours": {class: "#rrggbb"} of a segmenter, "best" and "worst": [{"image": a file in the folder, "caption": …}]},
every part optional.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from frugalvit.report import svg_charts
from frugalvit.report.run_record import Curve, RunRecord, embed, finite
from frugalvit.report.sections import table
from frugalvit.runs import layout
from frugalvit.utils.files import read_json

_WIDEST = 960
"""Pixels of a picture in the page."""


def read_material(record: RunRecord, part: str, kind: type) -> Any:
    """A part of what the run left for its page; an empty one where it is absent, or not what it should be."""
    found = (read_json(record.folder / layout.DENSE_REPORT, dict) or {}).get(part)
    if not isinstance(found or kind(), kind):
        _left_out(record, part)
        return kind()
    return found or kind()


def _left_out(record: RunRecord, part: str) -> None:
    record.note(f"'{part}' of transfer_report.json is not all that it should be: something is left out.")


def _curves(record: RunRecord, found: Any) -> dict[str, Curve]:
    """Precisions over their recalls by name; one that is no number leaves a gap."""
    curves: dict[str, Curve] = {}
    for name, values in found.items() if isinstance(found, dict) else [("", None)]:
        numbers = [finite(value) for value in values] if isinstance(values, list) else [None]
        recalls = (place / max(1, len(numbers) - 1) for place in range(len(numbers)))
        curves[name] = [(recall, value) for recall, value in zip(recalls, numbers, strict=True) if value is not None]
        if len(curves[name]) < len(numbers):
            _left_out(record, "curves")
    return curves


def precision_recall(record: RunRecord) -> str:
    """Precision at every recall, mean over classes, one chart for boxes and one for masks."""
    drawn = legend = ""
    for kind, curves in read_material(record, "curves", dict).items():
        found = _curves(record, curves)
        series = [svg_charts.Series(name, style, curve) for style, (name, curve) in enumerate(found.items()) if curve]
        if series:
            drawn += svg_charts.chart(svg_charts.Panel(kind, "precision", "recall", series, by_split=False))
            names = "".join(
                f'<li><svg viewBox="0 0 34 8" aria-hidden="true">{svg_charts.swatch(line.style, 34)}</svg>'
                f"{escape(line.label)}</li>"
                for line in series
            )
            legend = f'<ul class="legend">{names}</ul>'
    return f'{legend}<div class="charts">{drawn}</div>' if drawn else ""


def per_class(record: RunRecord) -> str:
    found = read_material(record, "per_class", dict)
    columns, rows = found.get("columns"), found.get("rows")
    if not rows:
        return ""
    if not (isinstance(columns, list) and isinstance(rows, list) and all(_is_row(row, len(columns)) for row in rows)):
        _left_out(record, "per_class")
        return ""
    colours = read_material(record, "colours", dict)
    marks = [_swatch(record, colours[str(row[0])]) if str(row[0]) in colours else "" for row in rows]
    return table([str(column) for column in columns], rows, marks=marks)


def _swatch(record: RunRecord, colour: Any) -> str:
    """A square of the colour that a class has in the pictures."""
    if not re.fullmatch("#[0-9a-f]{6}", str(colour)):
        _left_out(record, "colours")
        return ""
    square = f'<rect width="12" height="12" fill="{colour}"/>'
    return f'<svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">{square}</svg> '


def _is_row(row: Any, columns: int) -> bool:
    return isinstance(row, list) and len(row) == columns > 0


def best(record: RunRecord) -> str:
    return _pictures(record, "best")


def worst(record: RunRecord) -> str:
    return _pictures(record, "worst")


def _pictures(record: RunRecord, kind: str) -> str:
    items = ""
    segmented = record.summary.get("task") == "segment"
    lead = "The image, the truth, then what the model found." if segmented else "Truth, then what the model found."
    for entry in read_material(record, kind, list):
        if not isinstance(entry, dict):
            _left_out(record, kind)
            continue
        image = embed(str(entry.get("image", "")), record.folder, limit=_WIDEST)
        if image is not None:
            caption = escape(str(entry.get("caption", "")))
            items += f'<figure class="wide"><img src="{image}" alt=""><figcaption>{caption}</figcaption></figure>'
    return f'<p class="lead">{lead}</p>{items}' if items else ""
