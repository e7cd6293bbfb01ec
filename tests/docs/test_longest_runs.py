"""What docs/RESULTS.md tells of the longest runs on CIFAR-100 at 32 px is what their logs say."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import mean, stdev

from frugalvit.reproduce.command import folder_name
from helpers.kept_results import DOCS, PROSE, TEXT, scores


def test_changes_of_the_longest_fine_tuning() -> None:
    """What is told of the runs that begin from 400 epochs of EsViT, the best look at the test images included."""
    start = "longer_EsViT+Drloc"
    looks: dict[tuple[str, int], list[dict[str, float]]] = {}
    for path in (DOCS / "results" / "best-cifar" / "swin_mini").glob(f"{start}*/seed_*.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        name = path.parent.name.removeprefix(start).removeprefix(",_")
        looks[name, int(path.stem[-1])] = [line for line in lines if line["split"] == "test"]
    assert f"with one seed, {looks['', 1][-1]['top1']:.2f} with another" in PROSE
    deeper = looks["drop_path", 0][-1]
    assert f"seems to help: {deeper['top1']:.2f} and a top-5 of {deeper['top5']:.2f}, with" in PROSE
    assert f'("more variety") cost {deeper["top1"] - looks["more_variety", 0][-1]["top1"]:.1f} points' in PROSE
    spared, plain = (
        next(line["top1"] for line in looks[name, 0] if round(line["epoch"]) == 155) for name in ("layer_decay", "")
    )
    assert f"until epoch 155 ({spared:.2f} to {plain:.2f})" in PROSE
    best, epoch = max((line["top1"], round(line["epoch"])) for run in looks.values() for line in run)
    assert f"{best:.2f} after {epoch} epochs with the second seed, of seven looks at each of five runs)" in PROSE
    assert {len(run) for run in looks.values()} == {7} and len(looks) == 5
    assert f"with the last weights {max(run[-1]['top1'] for run in looks.values()):.2f}." in PROSE


def test_longest_pretraining() -> None:
    """What is told of 640 epochs of EsViT in three parts, and of the two fine-tunings after it."""
    runs = DOCS / "results" / "best-cifar" / "swin_mini" / "longest_EsViT+Drloc,_drop_path"
    looks = [
        [line for line in map(json.loads, log.read_text().splitlines()) if line["split"] == "test"]
        for log in sorted(runs.glob("seed_*.jsonl"))
    ]
    first, second = (run[-1]["top1"] for run in looks)
    assert f"it is {first:.2f} and {second:.2f} with the last weights" in PROSE
    best, epoch = max((line["top1"], round(line["epoch"])) for run in looks for line in run)
    assert f"{best:.2f} after {epoch} epochs, of seven looks at each of two runs" in PROSE
    assert [len(run) for run in looks] == [7, 7]
    speeds = [json.loads(path.read_text())["seconds_per_step"] for path in runs.glob("seed_*.json")]
    assert f"{round(2 * 512 / mean(speeds), -2):,.0f} images a second in all):" in PROSE
    start = "for small images, slow teacher, 270 epochs more of all"
    before, after = (
        {probe: scores("esvit-cifar", name, probe)[0] for probe in ("knn", "linear", "logistic")}
        for name in (start, f"{start}, twice")
    )
    more = [after[probe] - before[probe] for probe in before]
    assert f"has {min(more):.1f} to {max(more):.1f} points more in every probe of classes" in PROSE
    assert f"k-NN by {more[0]:.1f} points ({before['knn']:.1f} to {after['knn']:.1f}, below)" in PROSE
    (shorter,) = scores("best-cifar", "longer EsViT + Drloc, drop path", "top1")
    assert f"the fine-tuned network by {mean([first, second]) - shorter:.1f}, which" in PROSE
    log = DOCS / "results" / "esvit-cifar" / "swin_mini" / folder_name(f"{start}, twice") / "seed_0.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert f"({[line['prototypes_used'] for line in lines if 'prototypes_used' in line][-1]:.0f} prototypes in" in PROSE
    at = {round(line["epoch"]): line["knn"] for line in lines if "knn" in line}
    told = f"is {at[5]:.1f} after 5 epochs, {at[32]:.1f} after 32, {at[140]:.1f} after 140 and {at[270]:.1f} at the end"
    assert told in PROSE


def test_answers_of_mirror_images() -> None:
    rows = [json.loads(line) for line in (DOCS / "results" / "mirror-cifar.jsonl").read_text().splitlines()]
    with_it, without = ([row["top1"] for row in rows if row["mirror"] is mirror] for mirror in (True, False))
    gains = {f"{one - other:.1f}" for one, other in zip(with_it, without, strict=True)}
    assert gains == {"0.4"} and "**Answers of mirror images add 0.4**" in PROSE
    told = "the two have {:.2f} and {:.2f} instead of {:.2f} and {:.2f} (two ARM cores"
    assert told.format(*with_it, *without) in PROSE
    trained = scores("best-cifar", rows[0]["setting"], "top1")
    above = [here - there for here, there in zip(without, trained, strict=True)]
    assert "is {:.2f} and {:.2f} above the bf16 of training".format(*above) in PROSE


def test_pretraining_in_one_go() -> None:
    """What is told of 300 epochs of EsViT under one schedule, against 100 and 300 more."""
    runs = DOCS / "results" / "best-cifar" / "swin_mini"
    one_go, wider, longer = (
        [line for line in map(json.loads, (runs / name / "seed_0.jsonl").read_text().splitlines()) if "top5" in line]
        for name in (
            "EsViT_in_one_go+Drloc,_drop_path_0.2",
            "EsViT_in_one_go+Drloc,_drop_path_0.3",
            "longer_EsViT+Drloc,_drop_path",
        )
    )
    assert f"end at {one_go[-1]['top1']:.2f} with the same stochastic depth" in PROSE
    at_once, before = (next(line["top1"] for line in run if round(line["epoch"]) == 258) for run in (one_go, longer))
    assert f"({at_once:.2f} after 258 epochs, where the other has {before:.2f})" in PROSE
    assert all(here["top1"] < there["top1"] for here, there in zip(one_go, longer, strict=False))  # behind all the way
    assert f"(0.3) ends {one_go[-1]['top1'] - wider[-1]['top1']:.1f} lower" in PROSE
    assert f"top-5 ({wider[-1]['top5']:.2f} to {one_go[-1]['top5']:.2f})" in PROSE
    seconds = json.loads((runs / "EsViT_in_one_go+Drloc,_drop_path_0.2" / "seed_0.json").read_text())
    assert f"{2 * 512 / seconds['seconds_per_step']:,.0f}"[:4] == "78,3" and "78,400 images a second" in PROSE


def test_pretraining_that_keeps_its_heads() -> None:
    """What is told of the two ways to go on, with new projection heads and with the old ones."""
    kept, new = (
        DOCS / "results" / "esvit-cifar" / "swin_mini" / f"for_small_images,_slow_teacher,_{name}" / "seed_0.json"
        for name in ("270_epochs_more_of_all", "300_epochs_more")
    )
    one, other = json.loads(kept.read_text()), json.loads(new.read_text())
    behind = [other[probe] - one[probe] for probe in ("knn", "linear", "logistic")]
    assert f"it is {min(behind):.1f} to {max(behind):.1f} behind the third in every probe of classes" in PROSE
    assert f"as many steps more as the third ({one['steps']:,})" in PROSE
    assert f"{one['seconds_per_step'] * 1000:.0f} ms a step on a slower machine" in PROSE
    last = [json.loads(line) for line in kept.with_suffix(".jsonl").read_text().splitlines()]
    used = [line["prototypes_used"] for line in last if "prototypes_used" in line][-1]
    assert f"its 2,048 prototypes ({used:.0f} in use)" in PROSE


def test_what_labels_are_worth() -> None:
    """Probes of frozen features with some labels of each class, after two lengths of pre-training."""
    rows = [json.loads(line) for line in (DOCS / "results" / "labels-cifar.jsonl").read_text().splitlines()]
    found: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for row in rows:
        for probe in ("knn", "logistic"):
            found[row["epochs"], probe, row["of_each_class"]] += [row[probe]] if probe in row else []
    columns = [(epochs, probe) for epochs in (370, 640) for probe in ("knn", "logistic")]
    for number in sorted({row["of_each_class"] for row in rows}):
        cells = [_with_deviation(found[(*column, number)]) for column in columns]
        assert f"| {' | '.join([str(number), *cells])} |".replace("|  |", "| |") in TEXT
    start = "for small images, slow teacher, 270 epochs more of all"
    every = {
        (epochs, probe): scores("esvit-cifar", name, probe)[0]
        for epochs, name in ((370, start), (640, f"{start}, twice"))
        for probe in ("knn", "logistic")
    }
    assert f"| 500 (all) | {' | '.join(f'{every[column]:.2f}' for column in columns)} |" in TEXT
    tenth, fiftieth = (mean(found[640, "logistic", number]) / every[640, "logistic"] for number in (50, 10))
    assert f"gives {100 * fiftieth:.0f} % of what all of them give, a tenth {100 * tenth:.0f} %" in PROSE
    gains = [mean(found[640, "logistic", n]) - mean(found[370, "logistic", n]) for n in (2, 5, 10, 25, 50, 100)]
    assert f"{min(gains):.1f} to {max(gains):.1f} points more with the logistic probe" in PROSE


def _with_deviation(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else "".join(f"{one:.2f}" for one in values)
