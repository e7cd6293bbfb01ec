"""What a report says of a detector's and of a segmenter's pictures and classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frugalvit.report.page import write_report
from helpers.report_samples import write_picture, write_run

LEADS = {"detect": "Truth, then what the model found.", "segment": "The image, the truth, then what the model found."}


def page_of(run: Path, task: str, colours: object) -> str:
    write_picture(run / "best_1.jpg", 0)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    (run / "summary.json").write_text(json.dumps(summary | {"task": task}), encoding="utf-8")
    rows = {"columns": ["class", "IoU"], "rows": [["cat", 0.5], ["dog", 0.4]]}
    material = {"per_class": rows, "best": [{"image": "best_1.jpg", "caption": "x"}], "colours": colours}
    (run / "transfer_report.json").write_text(json.dumps(material), encoding="utf-8")
    return write_report([run], run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", LEADS)
def test_the_order_of_the_panels_is_said(tmp_path: Path, task: str) -> None:
    page = page_of(write_run(tmp_path / "run"), task, {})
    assert page.count(LEADS[task]) == 1 and '<th scope="row">cat</th>' in page
    assert all(lead not in page for name, lead in LEADS.items() if name != task)
    assert "Worst pictures" not in page  # nothing to show, nothing to say


def test_classes_have_the_colours_of_the_pictures(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"), "segment", {"cat": "#0a1b2c", "dog": '"><script>'})
    assert 'fill="#0a1b2c"/></svg> cat</th>' in page and '<th scope="row">dog</th>' in page
    assert "'colours' of transfer_report.json is not all that it should be" in page.replace("&#x27;", "'")
