"""What a run learned from, as ``data.json`` tells it: how many images, what was left out, and what was said of them."""

from __future__ import annotations

from html import escape

from frugalvit.report import sections
from frugalvit.report.records import Record
from frugalvit.words import counted

_OPEN = 10
"""Up to so many files that were left out are shown at once."""


def data(record: Record) -> str:
    """A line of numbers, the notes of the data, and a table of the files that were left out."""
    used, notes = record.data.get("used", {}), record.data.get("notes", [])
    left_out = record.data.get("left_out", {"count": 0, "files": []})
    count, files = left_out["count"], left_out["files"]
    words = [f"{name}: {counted(number, 'image')}" for name, number in used.items()]
    words += [f"{counted(count, 'unreadable file')} left out"] if count else []
    body = f"<p>{escape(' · '.join(words))}</p>" if words else ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    body += f"<ul>{items}</ul>" if items else ""
    if not files:
        return body
    rows = [[file["name"], file["split"], file["reason"]] for file in files]
    shown = sections.table(["left out", "of", "because"], rows)
    if count > len(files):
        shown += f'<p class="quiet">and {count - len(files):,} more</p>'
    return body + (shown if len(files) <= _OPEN else f"<details><summary>Which</summary>{shown}</details>")
