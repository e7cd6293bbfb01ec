"""Sections of detection and segmentation runs: precision and recall, classes, best and worst pictures.

They read transfer_report.json: {"curves": {"box": {"IoU 0.50": [101 precisions]}}, "per_class": {"columns", "rows"},
"colours": {class: "#rrggbb"} of a segmenter, "best" and "worst": [{"image": a file in the folder, "caption": …}]}.
Every part is optional.
"""

from html import escape
from typing import Any

from frugalvit.report import svg_charts
from frugalvit.report.run_record import RunRecord, to_data_uri
from frugalvit.report.sections import legend_of, table
from frugalvit.runs import layout
from frugalvit.utils.files import read_json

_OPEN = 15  # classes; the others are folded
_SQUARE = '<svg viewBox="0 0 1 1" width="12" height="12" aria-hidden="true"><path d="M0 0h1v1H0z" fill="{}"/></svg> '
_MAX_PIXELS = 960  # of the longer side of a picture


def read_results(record: RunRecord) -> dict[str, Any]:
    return read_json(record.folder / layout.DENSE_REPORT, dict) or {}


def precision_recall(record: RunRecord) -> str:
    """Draw precision over recall, the mean over classes: one chart for boxes and one for masks."""
    charts = legend = ""
    for kind, curves in read_results(record).get("curves", {}).items():
        series = [
            svg_charts.Series(name, style, [(index / 100, value) for index, value in enumerate(values)])
            for style, (name, values) in enumerate(curves.items())
        ]
        if series:
            charts += svg_charts.chart(svg_charts.Panel(kind, "precision", "recall", series, by_split=False))
            legend = legend_of((line.style, line.label) for line in series)
    return f'{legend}<div class="charts">{charts}</div>' if charts else ""


def per_class(record: RunRecord) -> str:
    results = read_results(record)
    scores, colours = results.get("per_class") or {}, results.get("colours") or {}
    if not scores.get("rows"):
        return ""
    names = [str(row[0]) for row in scores["rows"]]
    marks = [_SQUARE.format(escape(colours[name])) if name in colours else "" for name in names]
    rows = [[f"{100 * cell:.1f} %" if isinstance(cell, float) else cell for cell in row] for row in scores["rows"]]
    first, rest = (
        table(scores["columns"], rows[part], marks=marks[part]) for part in (slice(_OPEN), slice(_OPEN, None))
    )
    more = f"<details><summary>{len(rows) - _OPEN} more classes</summary>{rest}</details>"
    return first + (more if len(rows) > _OPEN else "")


def pictures(record: RunRecord, kind: str) -> str:
    """Show the "best" or the "worst" pictures; of few images, those that are both only as the worst."""
    results = read_results(record)
    entries = results.get(kind, [])
    if kind == "best":
        shown = {entry.get("caption") for entry in results.get("worst", [])}
        entries = [entry for entry in entries if entry.get("caption") not in shown]
    items = ""
    segmented = record.summary.get("task") == "segment"
    lead = "The image, the ground truth, the prediction." if segmented else "The ground truth, then the prediction."
    for entry in entries:
        image = to_data_uri(entry["image"], record.folder, limit=_MAX_PIXELS)
        if image is not None:
            caption = escape(entry.get("caption", ""))
            items += f'<figure class="wide"><img src="{image}" alt=""><figcaption>{caption}</figcaption></figure>'
    return f'<p class="lead">{lead}</p>{items}' if items else ""
