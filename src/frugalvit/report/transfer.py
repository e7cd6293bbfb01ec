"""What a report shows of a detection or segmentation run: precision over recall, classes, best and worst pictures.

A run leaves transfer_report.json: {"curves": {"box": {"IoU 0.50": [101 precisions]}}, "per_class": {"columns", "rows"},
"best" and "worst": [{"image": a file in the folder, "caption": …}]}, every part optional.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from frugalvit.errors import UserError
from frugalvit.report import charts
from frugalvit.report.records import Record, embed
from frugalvit.report.sections import table

_WIDEST = 960
"""Pixels of a picture in the page."""


def read_material(record: Record) -> dict[str, Any]:
    path = record.folder / "transfer_report.json"
    if not path.is_file():
        return {}
    try:
        material = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error}).") from None
    return material if isinstance(material, dict) else {}


def precision_recall(record: Record) -> str:
    """Precision at every recall, mean over classes, one chart for boxes and one for masks."""
    drawn = legend = ""
    for kind, curves in read_material(record).get("curves", {}).items():
        series = [
            charts.Series(name, style, [(place / max(1, len(values) - 1), value) for place, value in enumerate(values)])
            for style, (name, values) in enumerate(curves.items())
        ]
        if series:
            drawn += charts.chart(charts.Panel(kind, "precision", "recall", series, by_split=False))
            names = "".join(
                f'<li><svg viewBox="0 0 34 8" aria-hidden="true">{charts.swatch(line.style, 34)}</svg>'
                f"{escape(line.label)}</li>"
                for line in series
            )
            legend = f'<ul class="legend">{names}</ul>'
    return f'{legend}<div class="charts">{drawn}</div>' if drawn else ""


def per_class(record: Record) -> str:
    found = read_material(record).get("per_class")
    return table(found["columns"], found["rows"]) if found and found.get("rows") else ""


def best(record: Record) -> str:
    return _pictures(record, "best")


def worst(record: Record) -> str:
    return _pictures(record, "worst")


def _pictures(record: Record, kind: str) -> str:
    items = ""
    for entry in read_material(record).get(kind, []):
        image = embed(str(entry.get("image", "")), record.folder, limit=_WIDEST)
        if image is not None:
            caption = escape(str(entry.get("caption", "")))
            items += f'<figure class="wide"><img src="{image}" alt=""><figcaption>{caption}</figcaption></figure>'
    return items
