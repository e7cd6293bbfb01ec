"""The comparison section of a report: means and paired differences."""

import json

from frugalvit.report import html as page
from helpers.report_samples import write_run


def test_comparison_shows_means_and_differences(tmp_path):
    for setting, weight in (("with", 0.5), ("without", 0.0)):
        for seed in (0, 1):
            write_run(tmp_path / "compare" / setting / f"seed_{seed}", seed=seed, weight=weight)
    rows = [["with", "71.50 ± 0.50 %", "+1.50 [+0.25, +2.75], p = 0.031"], ["without", "70.00 ± 0.00 %", "-"]]
    table = {"columns": ["setting", "top-1", "against without"], "rows": rows}
    result = {"metric": "top1", "luck": "seeds and images", "table": table}
    (tmp_path / "compare" / "comparison.json").write_text(json.dumps(result))
    text = page.write_report([tmp_path / "compare"], tmp_path / "r.html").read_text()
    assert (
        "71.50 ± 0.50" in text and "+1.50 [+0.25, +2.75], p = 0.031" in text and "luck of the seeds and images" in text
    )
    assert all(f"{setting}/seed_{seed}" in text for setting in ("with", "without") for seed in (0, 1))


def test_several_comparisons_have_headings(tmp_path):
    for folder, mean in (("a", 71.5), ("b", 62.25)):
        write_run(tmp_path / folder / "compare" / "with" / "seed_0")
        result = {"metric": "top1", "table": {"columns": ["setting", "top-1"], "rows": [["with", f"{mean} ± 0.5 %"]]}}
        (tmp_path / folder / "compare" / "comparison.json").write_text(json.dumps(result))
    both = [tmp_path / folder / "compare" for folder in "ab"]
    text = page.write_report(both, tmp_path / "r.html").read_text()
    assert all(f"<h3>{folder}</h3>" in text for folder in both)
    assert "71.5 ± 0.5" in text and "62.25 ± 0.5" in text


def test_the_page_starts_with_the_question_and_the_answer(tmp_path):
    for setting in ("with", "without"):
        write_run(tmp_path / "compare" / setting / "seed_0")
    settings = {name: {"mean": 71.5, "deviation": 0.0, "values": [71.5]} for name in ("with", "without")}
    answers = {"verdicts": {"with": "with helps by <3.1>"}, "scored": "200 images of val; chance 50.0 %"}
    result = {"settings": settings, "table": {"columns": ["setting"], "rows": [["with"], ["without"]]}} | answers
    (tmp_path / "compare" / "comparison.json").write_text(json.dumps(result))
    text = page.write_report([tmp_path / "compare"], tmp_path / "r.html").read_text()
    order = ["<h1>Which is better: with or without?</h1>", "<p>With helps by &lt;3.1&gt;.</p>", "Scored on 200 images"]
    positions = [text.index(part) for part in [*order, "<table>", 'id="classes"']]
    assert positions == sorted(positions)
