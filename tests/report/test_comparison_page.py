"""The comparison section of a report: means and paired differences."""

import json

from frugalvit.report import html as page
from helpers.report_samples import write_run


def test_comparison_shows_means_and_differences(tmp_path):
    for setting, weight in (("with", 0.5), ("without", 0.0)):
        for seed in (0, 1):
            write_run(tmp_path / "compare" / setting / f"seed_{seed}", seed=seed, weight=weight)
    difference = {"mean": 1.5, "low": 0.25, "high": 2.75, "p_value": 0.031, "count": 2}
    settings = {
        "with": {"mean": 71.5, "deviation": 0.5, "values": [71, 72], "floor": 35.25},
        "without": {"mean": 70, "deviation": 0, "values": [70, 70], "floor": 35.25},
    }
    result = {"metric": "top1", "settings": settings, "differences": {"with": difference}}
    (tmp_path / "compare" / "comparison.json").write_text(json.dumps(result))
    text = page.write_report([tmp_path / "compare"], tmp_path / "r.html").read_text()
    assert "71.50 ± 0.50" in text and "+1.50 [+0.25, +2.75], p = 0.031" in text and "35.25" in text
    assert all(f"{setting}/seed_{seed}" in text for setting in ("with", "without") for seed in (0, 1))


def test_several_comparisons_have_headings(tmp_path):
    for folder, mean in (("a", 71.5), ("b", 62.25)):
        write_run(tmp_path / folder / "compare" / "with" / "seed_0")
        settings = {"with": {"mean": mean, "deviation": 0.5, "values": [mean - 0.5, mean + 0.5]}}
        result = {"metric": "top1", "settings": settings, "differences": {}}
        (tmp_path / folder / "compare" / "comparison.json").write_text(json.dumps(result))
    both = [tmp_path / folder / "compare" for folder in "ab"]
    text = page.write_report(both, tmp_path / "r.html").read_text()
    assert all(f"<h3>{folder}</h3>" in text for folder in both)
    assert "71.50 ± 0.50" in text and "62.25 ± 0.50" in text


def test_one_seed_has_no_interval(tmp_path):
    write_run(tmp_path / "compare" / "with" / "seed_0")
    difference = {"mean": 1.5, "low": None, "high": None, "p_value": None, "count": 1}
    settings = {"with": {"mean": 71.5, "deviation": 0.0, "values": [71.5]}}
    result = {"metric": "top1", "settings": settings, "differences": {"with": difference}}
    (tmp_path / "compare" / "comparison.json").write_text(json.dumps(result))
    text = page.write_report([tmp_path / "compare"], tmp_path / "r.html").read_text()
    assert "+1.50 (one seed: no interval)" in text and "71.50 ± " not in text


def test_the_page_starts_with_the_question_and_the_answer(tmp_path):
    for setting in ("with", "without"):
        write_run(tmp_path / "compare" / setting / "seed_0")
    settings = {name: {"mean": 71.5, "deviation": 0.0, "values": [71.5]} for name in ("with", "without")}
    answers = {"verdicts": {"with": "with helps by <3.1>"}, "scored": "200 images of val; chance 50.0 %"}
    result = {"metric": "top1", "settings": settings, "differences": {}} | answers
    (tmp_path / "compare" / "comparison.json").write_text(json.dumps(result))
    text = page.write_report([tmp_path / "compare"], tmp_path / "r.html").read_text()
    order = ["<h1>Which is better: with or without?</h1>", "<p>With helps by &lt;3.1&gt;.</p>", "Scored on 200 images"]
    positions = [text.index(part) for part in [*order, "<table>", 'id="classes"']]
    assert positions == sorted(positions)
