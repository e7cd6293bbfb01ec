"""The page of a report: its sections, escaping, means over seeds, and the explorer."""

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import yaml

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.report import html as page
from frugalvit.report.run_record import read_run
from frugalvit.utils import console
from frugalvit.visualization.explorer_data import Picture, gather
from helpers.fake_backbones import PatchFeatures
from helpers.report_samples import add_to_summary, picture, write_run

HOSTILE = ('<script>alert("x")</script>', '"><img src=x onerror=alert(1)>', "{{style}}", "a & b")


class Reader(HTMLParser):
    """Collects the tags and texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.texts.append(data)


class FewExamples:
    """A split of a dataset whose first picture is unreadable."""

    names = ("bad.jpg", "one.jpg", "two.jpg", "three.jpg")

    def __len__(self):
        return 4

    def read(self, index):
        if index == 0:
            raise UnreadableImage("bad.jpg", "truncated")
        return picture(index, 60, 80)


def test_report_has_all_sections(tmp_path):
    run = write_run(tmp_path / "run")
    out = page.write_report([run], run / "report.html", model=PatchFeatures(), examples=FewExamples())
    text = out.read_text()
    reader = Reader(text)
    assert {"results", "auto", "curves", "confusion", "mistakes", "augmentations", "explorer", "configuration"} <= set(
        reader.ids
    )
    assert (run / "lens.json").is_file()
    text = " ".join(reader.texts)
    assert "2,000 images: as many as fit into 20,000 steps" in text
    assert "localization.weight" in text and "0.78" in text
    assert not any(
        name in ("src", "href") and not value.startswith(("data:", "#")) for name, value in reader.attributes
    )
    assert page.report([read_run(run)]) == page.report([read_run(run)])


def test_missing_files_have_no_section(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "epoch": 0.1, "split": "train", "loss": 2.0}\n')
    reader = Reader(page.write_report([run], tmp_path / "r.html").read_text())
    assert set(reader.ids) == {"theme", "curves"}
    (run / "metrics.jsonl").unlink()
    (run / "summary.json").write_text('{"task": "train", "top1": 3}')
    reader = Reader(page.write_report([run], tmp_path / "r.html").read_text())
    assert set(reader.ids) == {"theme", "next", "details", "results"}


def test_hostile_names_are_escaped(tmp_path):
    run = write_run(tmp_path / "run", classes=HOSTILE)
    mistakes = json.loads((run / "mistakes.json").read_text())
    mistakes[0] |= {"file": HOSTILE[0], "label": HOSTILE[1]}
    mistakes[1] |= {"image": '"><img src=x onerror=alert(1)>'}
    (run / "mistakes.json").write_text(json.dumps(mistakes))
    auto = [{"name": HOSTILE[0], "value": HOSTILE[1], "reason": HOSTILE[2]}]
    add_to_summary(run, auto=auto, alarms=[HOSTILE[0]])
    text = page.write_report([run], tmp_path / "r.html").read_text()
    reader = Reader(text)
    assert reader.tags.count("img") == 7  # six mistakes and the augmentations
    assert not any(name == "onerror" for name, _ in reader.attributes)
    assert text.count("alert(") > 0 and "<script>alert" not in text
    for name in HOSTILE:
        assert any(name in data for data in reader.texts)


def test_confusion_of_many_classes_lists_the_most_frequent(tmp_path):
    run = write_run(tmp_path / "run", classes=tuple(f"class {i}" for i in range(40)))
    text = page.write_report([run], tmp_path / "r.html").read_text()
    assert "Confused most often" in text and 'class="confusion"' not in text


def test_most_confused_pairs(tmp_path):
    run = write_run(tmp_path / "run")
    add_to_summary(run, confusion=[[8, 2, 0], [0, 9, 0], [5, 0, 5]])
    text = page.report([read_run(run)])
    table = re.findall(
        r"<tr><th scope=\"row\">(\w+)</th><td>(\w+)</td><td class=\"number\">(\d+)</td><td class=\"number\">(\d+) %",
        text,
    )
    assert table == [("bird", "cat", "5", "50"), ("cat", "dog", "2", "20")]


def test_several_seeds_have_a_mean(tmp_path):
    runs = [write_run(tmp_path / f"w{w}_{s}", seed=s, weight=w) for w in (0.0, 0.5) for s in (0, 1)]
    for run, device in zip(runs, ("cpu", "cpu", "cuda", "cuda"), strict=True):
        add_to_summary(run, weights="the <last> step", on=device, steps=4321)
    add_to_summary(runs[1], top5=math.nan)
    text = page.write_report(runs, tmp_path / "r.html").read_text()
    values = [0.78, 0.79]
    assert f"{np.mean(values):.4g} ± {np.std(values, ddof=1):.4g}" in text
    assert "What differs" in text and "mean of 2" in text
    assert text.count("4,321</td>") == 6 and "4,321 ±" not in text and "nan ±" not in text
    assert text.count("weights: the &lt;last&gt; step") == 1 and "<last>" not in text, "common texts are shown once"
    assert "<td>cpu</td>" in text and "<td>cuda</td>" in text and "on: cpu" not in text


@pytest.mark.parametrize(("classes", "shown"), [(5, False), (6, True)])
def test_few_classes_have_no_fifth_guess(tmp_path, classes, shown):
    run = write_run(tmp_path / "run", classes=tuple(f"class {k}" for k in range(classes)))
    texts = Reader(page.report([read_run(run)])).texts
    assert ("top-5" in texts) is shown and "top5" not in " ".join(texts)


@pytest.mark.parametrize(
    ("known", "unseen", "words"),
    [
        (99.0, 60.0, "It overfits"),
        (70.0, 65.0, "It underfits:"),
        (80.0, 60.0, "overfits too"),
        (95.0, 92.0, "fits well"),
    ],
)
def test_the_verdict_comes_first(tmp_path, known, unseen, words):
    run = write_run(tmp_path / "run")
    bins = [{"images": 90, "confidence": 90.0, "accuracy": 60.0}, {"images": 10, "confidence": 50.0, "accuracy": 40.0}]
    more = {"calibration": {"bins": bins, "error": 25.0}, "best_step": 150, "chosen_on": "val"}
    more |= {"steps": 200, "alarms": ["<odd>"]}
    add_to_summary(
        run, top1=unseen, scored_images=200, scored_on="test", training_images={"top1": known, "count": 40}, **more
    )
    text = page.report([read_run(run)])
    assert "<h1>Classifier: 3 classes of photos</h1>" in text
    order = [f"It is right on {unseen:.1f} % of 200 images of test (95 % interval", words, "&lt;odd&gt;", 'id="next"']
    order += ['id="classes"', 'id="calibration"', 'id="curves"', 'id="mistakes"', 'id="details"', 'id="results"']
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert "25.0 points from its accuracy, on average over 100 images: it is too sure" in text
    assert text.count(">best, 14.9<") == text.count('class="chart"') - 1, "every curve, but not the calibration"
    assert text.index('id="details"') < text.index("gradient norm") and "<details open" not in text


def test_a_failed_run_is_called_failed(tmp_path):
    run = write_run(tmp_path / "run")
    more = {"training_images": {"top1": 11.0, "count": 40}, "at_chance": True, "alarms": ["nothing learned"]}
    add_to_summary(run, top1=10.0, scored_images=200, scored_on="test", **more)
    text = page.report([read_run(run)])
    assert "It failed" in text and "underfits" not in text


@pytest.mark.parametrize(("floor", "near"), [(91.0, True), (99.0, True), (60.0, False)])
def test_a_model_near_the_floor_does_not_fit_well(tmp_path, floor, near):
    run = write_run(tmp_path / "run")
    simple = {"best": floor, "method": "logistic", "scored_images": 200}
    more = {"training_images": {"top1": 95.0, "count": 40}, "floor": simple, "alarms": []}
    add_to_summary(run, top1=92.0, scored_images=200, scored_on="test", **more)
    text = page.report([read_run(run)])
    words = "worse than a simple method" if floor > 95 else "not clearly better than a simple method"
    assert (words in text) is ("frugalvit advise" in text) is near
    assert ("fits well" in text) is not near


def test_worst_classes_come_first_and_many_are_folded(tmp_path):
    run = write_run(tmp_path / "run", classes=tuple(f"class {i}" for i in range(40)))
    matrix = np.diag(np.arange(40)) + np.eye(40, k=1, dtype=int)
    add_to_summary(run, confusion=matrix.tolist())
    text = page.report([read_run(run)]).partition('id="classes"')[2].partition("</section>")[0]
    names = re.findall(r"(class \d+)</th>", text)
    assert names[:2] == ["class 0", "class 1"] and len(names) == 40 and "25 more classes" in text


def about(text):
    return re.search(r'<p class="about">([^<]*)</p>', text)[1]


def test_heading_lists_what_runs_have_in_common(tmp_path):
    runs = [read_run(write_run(tmp_path / f"run{k}", seed=k, epochs=2 + k // 2)) for k in range(3)]
    assert about(page.report(runs[:2])) == "train · swin_tiny_w7 · photos · 2 epochs"
    assert about(page.report(runs)) == "train · swin_tiny_w7 · photos"


def test_unfinished_runs_are_marked(tmp_path):
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("done", "killed"))]
    (runs[1] / "summary.json").unlink()
    (runs[1] / "decisions.json").write_text('[{"name": "batch", "value": 48, "reason": "half of the images"}]')
    assert "ot finished" not in page.report([read_run(runs[0])])
    alone, both = (page.report([read_run(run) for run in part]) for part in (runs[1:], runs))
    assert "--resume" in alone and "half of the images" in alone
    assert f"Not finished: {runs[1]}." in both


def test_alarms_come_before_curves(tmp_path):
    run = write_run(tmp_path / "run")
    add_to_summary(run, alarms=["the teacher has collapsed"])
    text = page.report([read_run(run)])
    assert text.index("The teacher has collapsed") < text.index('id="curves"')


def write_pretraining(folder, **more):
    """A run of pre-training, without mistakes and augmentations."""
    run = write_run(folder, extras=False)
    summary = {"task": "pretrain", "loss": 3.3333, "health": "healthy", "effective_rank": 21.9, "largest_rank": 32}
    (run / "summary.json").write_text(json.dumps(summary | more))
    return run


def test_pretraining_shows_health_before_loss(tmp_path):
    text = page.write_report([write_pretraining(tmp_path / "run")], tmp_path / "r.html").read_text()
    head, rest = text.split('id="results"')
    assert "healthy" in head and "21.90" in head and "of at most 32" in head
    assert "3.333" not in head and "3.333" in rest
    run = write_pretraining(tmp_path / "ill", health="stagnation", knn=40.0, scored_images=10, chance={"knn": 50.0})
    head = page.write_report([run], tmp_path / "r2.html").read_text().split('id="results"')[0]
    assert "see the alarms" in head and "40.0 %" in head and "chance 50.0 %" in head and "10 images" in head


def test_skipped_files_are_listed(tmp_path):
    run = write_pretraining(tmp_path / "run")
    files = [{"name": f"<b>{i}.png", "split": "train", "reason": "truncated"} for i in range(20)]
    facts = {"used": {"train": 80}, "notes": ["val is made from train"], "left_out": {"count": 23, "files": files}}
    (run / "data.json").write_text(json.dumps(facts))
    reader = Reader(page.write_report([run], tmp_path / "r.html").read_text())
    text = " ".join(reader.texts)
    assert "data" in reader.ids and "train: 80 images · 23 unreadable files skipped" in text
    assert "val is made from train" in text and "<b>19.png" in text and "and 3 more" in text


def test_policy_lists_our_scripts(tmp_path):
    import base64
    import hashlib

    text = page.write_report([write_run(tmp_path / "run")], tmp_path / "r.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and "default-src 'none'" in policy[1]
    for script in re.findall(r"<script>(.*?)</script>", text, flags=re.S):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy[1]


def test_models_with_a_1x1_grid_get_a_report(tmp_path, capsys):
    console.set_quiet(False)
    run = write_run(tmp_path / "run")
    out = page.write_report([run], run / "report.html", model=PatchFeatures((8, 8)), examples=FewExamples())
    assert out.is_file() and not (run / "lens.json").exists()
    assert "1x1 grid" in capsys.readouterr().err


@pytest.mark.parametrize("same", [True, False])
def test_explorer_combines_runs_with_the_same_images(tmp_path, same):
    runs = [write_run(tmp_path / name, weight=weight) for name, weight in (("a", 0.0), ("b", 0.5))]
    seen = {
        run: gather([("m", PatchFeatures())], [Picture("0", picture(0 if same else seed, 60, 80))], second_views=True)
        for seed, run in enumerate(runs)
    }
    text = page.write_report(runs, tmp_path / "r.html", seen=seen).read_text()
    models = json.loads(re.search(r'class="explorer"><script[^>]*>(.*?)</script>', text)[1])["models"]
    assert [model["name"] for model in models] == (["a", "b"] if same else ["a"])


MARK = "x\"'><script>alert(1)</script><img src=x onerror=alert(1)>&lt;"


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Change every string in nested JSON, except keys and pictures."""
    if isinstance(value, dict):
        return {key: with_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_strings(inner, change) for inner in value]
    return change(value) if isinstance(value, str) and not value.startswith("data:image/") else value


def test_no_string_of_a_run_becomes_markup(tmp_path):
    """Every string in every file of two runs is hostile, and their names: the page has the same elements."""

    def structure(change: Callable[[str], str]) -> tuple[list[str], set[str], str]:
        runs = [write_run(tmp_path / change(name).replace("/", "|")) for name in ("one", "two", "unfinished")]
        for number, path in enumerate(path for run in runs for path in run.iterdir()):
            if path.suffix == ".json":
                content = with_strings(json.loads(path.read_text()), change)
                if path.name == "summary.json":
                    content |= {change("key"): change(f"{number} ± 2"), change("number"): number}
                path.write_text(json.dumps(content))
        for number, run in enumerate(runs):  # another value of an option: two kinds of runs
            config = yaml.safe_load((run / "config.yaml").read_text())
            config = with_strings(config, change) | {change("option"): number}
            (run / "config.yaml").write_text(yaml.safe_dump(config))
        (runs[-1] / "summary.json").unlink()
        text = page.write_report(runs, tmp_path / "r.html").read_text()
        reader = Reader(text)
        return reader.tags, {name for name, _ in reader.attributes}, text

    tags, attributes, _ = structure(lambda text: text)
    hostile_tags, hostile_attributes, text = structure(lambda text: text + MARK)
    assert hostile_tags.count("script") == tags.count("script")
    assert set(hostile_tags) <= set(tags) and hostile_tags.count("img") <= tags.count("img")
    assert hostile_attributes <= attributes
    assert text.count("alert(1)") > 20 and "<script>alert" not in text and "<img src=x" not in text


@pytest.mark.parametrize("task", ["train", "pretrain", "detect", "compare"])
def test_no_text_of_a_page_becomes_markup(tmp_path, task):
    """Title, sentences, tiles, commands, notes, axes, keys, captions and comparisons repeat texts of files."""

    def structure(change: Callable[[str], str]) -> tuple[set[str], set[str], str]:
        runs = [tmp_path / change(name).replace("/", "|") / "with" / "seed_0" for name in ("one", "two")]
        runs = runs if task == "compare" else runs[:1]
        for run in map(write_run, runs):
            floor = {"best": 30.0, "method": change("forest")}
            add_to_summary(run, task="train" if task == "compare" else task, scored_on=change("val"), scored_images=9)
            add_to_summary(run, floor=floor, health=change("healthy"), note=change("same"))
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            named = [
                {k if k in ("step", "epoch", "split") else change(k): v for k, v in line.items()} for line in lines
            ]
            named = [json.dumps(line | {"split": change(line["split"])}) for line in named]
            (run / "metrics.jsonl").write_text("\n".join(named))
            (run / "data.json").write_text(json.dumps({"used": {change("train"): 9}, "notes": [change("made")]}))
            (run / "config.yaml").write_text(yaml.safe_dump({"data": change("photos")}))
            shown = {"image": "augmentations.jpg", "caption": change("street")}
            dense = {"curves": {change("box"): {change("IoU"): [1.0] * 101}}, "best": [shown], "worst": [shown]}
            (run / "transfer_report.json").write_text(json.dumps(dense if task == "detect" else {}))
            settings = {change("with"): {"mean": 71.5, "deviation": 0.0, "values": [71.5]}}
            answers = {"luck": change("seeds"), "table": {"columns": [change("setting")], "rows": [[change("with")]]}}
            answers |= {"verdicts": {"with": change("it helps")}, "scored": change("9 images")}
            compared = json.dumps({"metric": change("top1"), "settings": settings} | answers)
            (run.parent.parent / "comparison.json").write_text(compared)
        given = [run.parent.parent for run in runs] if task == "compare" else runs
        text = page.write_report(given, tmp_path / "r.html").read_text()
        reader = Reader(text)
        return set(reader.tags), {name for name, _ in reader.attributes}, text

    *elements, _ = structure(lambda text: text)
    *hostile_elements, text = structure(lambda text: text + MARK)
    assert hostile_elements == elements
    assert text.count("alert(1)") > 20 and "<script>alert" not in text and "<img src=x" not in text
