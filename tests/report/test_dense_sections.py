"""The sections of detection and segmentation runs."""

import json
from pathlib import Path

import pytest

from frugalvit.report.html import write_report
from helpers.report_samples import write_picture, write_run

LEADS = {"detect": "The ground truth, then the prediction.", "segment": "The image, the ground truth, the prediction."}


def page_of(run: Path, task: str, colours: object) -> str:
    write_picture(run / "best_1.jpg", 0)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    (run / "summary.json").write_text(json.dumps(summary | {"task": task}), encoding="utf-8")
    rows = {"columns": ["class", "IoU"], "rows": [["cat", 0.5], ["dog", 0.4]]}
    material = {"per_class": rows, "best": [{"image": "best_1.jpg", "caption": "x"}], "colours": colours}
    (run / "transfer_report.json").write_text(json.dumps(material), encoding="utf-8")
    return write_report([run], run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", LEADS)
def test_pictures_have_a_caption_and_a_lead(tmp_path: Path, task: str) -> None:
    page = page_of(write_run(tmp_path / "run"), task, {})
    assert page.count(LEADS[task]) == 1 and '<th scope="row">cat</th>' in page
    assert all(lead not in page for name, lead in LEADS.items() if name != task)
    assert "Worst pictures" not in page


def test_classes_have_their_colours(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"), "segment", {"cat": "#0a1b2c", "dog": '"><script>x'})
    assert 'fill="#0a1b2c"/></svg> cat</th>' in page and "<script>x" not in page


def test_precision_curves_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    curves = {"box": {"IoU <0.50>": [1.0] * 101}}
    (run / "transfer_report.json").write_text(json.dumps({"curves": curves}), encoding="utf-8")
    page = write_report([run], run / "report.html").read_text(encoding="utf-8")
    assert "IoU &lt;0.50&gt;" in page and "recall" in page
