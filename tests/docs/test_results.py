"""The tables in docs/RESULTS.md say what the kept metrics say."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator

import pytest

from frugalvit.utils.statistics import paired_difference
from helpers.kept_results import DOCS, PROSE, TEXT, last, scores, signed

MARKER = re.compile(r"^<!-- results: ([^:]+): (.+) -->\n\n((?:\|.*\n)+)", re.MULTILINE)


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """(table, setting, metric, the cell that shows it, the cell that counts the seeds) of every marked table."""
    for tables, metrics, text in MARKER.findall(TEXT):
        header, _, *body = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
        place = header.index("table, setting") if "table, setting" in header else 0
        for cells in body:
            table, setting = cells[place].split(", ", 1) if place else (tables, cells[0])
            assert table in tables.split()
            for offset, metric in enumerate(metrics.split(), start=place + 1):
                yield table, setting, metric, cells[offset], cells[header.index("seeds")] if "seeds" in header else ""


@pytest.mark.parametrize(("table", "setting", "metric", "shown", "seeds"), list(rows()))
def test_a_cell_is_what_the_logs_say(table: str, setting: str, metric: str, shown: str, seeds: str) -> None:
    values = scores(table, setting, metric)
    numbers = [re.sub(r"[^\d.]", "", part) for part in shown.split("±")]
    wanted = [statistics.fmean(values), *([statistics.stdev(values)] if len(values) > 1 else [])]
    assert [
        f"{value:.{len(number.partition('.')[2])}f}" for value, number in zip(wanted, numbers, strict=True)
    ] == numbers
    assert seeds in ("", str(len(values)))


def test_many_cells_are_marked() -> None:
    assert len(list(rows())) > 30


def test_the_paired_difference() -> None:
    first, second = (scores("drloc-flowers", setting, "top1") for setting in ("with", "without"))
    defaults = [scores("defaults-flowers", setting, "top1") for setting in ("auto", "paper")]
    for found in (paired_difference(first, second), paired_difference(*defaults)):
        text = f"+{found.mean:.2f}, 95 % interval +{found.low:.2f} to +{found.high:.2f}, p = {found.p_value:.3f}"
        assert text in TEXT
    mixed = paired_difference(
        *(scores("defaults-flowers", setting, "top1") for setting in ("auto, half mixed", "auto"))
    )
    told = f"+{mixed.mean:.2f}, 95 % interval +{mixed.low:.2f} to +{mixed.high:.2f}, p = {mixed.p_value:.3f}, against"
    assert told in TEXT
    plain = "auto, not mixed, no RandAugment"
    for setting, other in ((f"{plain}, with Drloc", plain), (plain, "auto, not mixed"), ("auto, not mixed", "auto")):
        found = paired_difference(*(scores("defaults-flowers", name, "top1") for name in (setting, other)))
        told = (
            f"{signed(found.mean)}, 95 % interval {signed(found.low)} to {signed(found.high)}, p = {found.p_value:.3f}"
        )
        assert f"| {told}, against" in TEXT
    first = paired_difference(*(scores("defaults-flowers", name, "top1") for name in (f"EsViT, {plain[6:]}", plain)))
    told = f"{signed(first.mean)}, 95 % interval {signed(first.low)} to {signed(first.high)}, p = {first.p_value:.3f}"
    assert f'| {told}, against "{plain}" |' in TEXT
    less = paired_difference(*(scores("defaults-flowers", name, "top1") for name in (plain, "auto")))
    assert f"that is {signed(less.mean)} ({signed(less.low)} to {signed(less.high)})" in PROSE
    rates = paired_difference(*(scores("defaults-flowers", setting, "top1") for setting in ("auto", "lr=0.00013")))
    assert f"by {rates.mean:.1f} points in the mean (95 % interval −{-rates.low:.1f} to +{rates.high:.1f}" in TEXT
    small = paired_difference(
        *(scores("defaults-flowers", setting, "top1") for setting in ("auto, with Drloc", "auto"))
    )
    assert f"−{-small.mean:.2f} points (−{-small.low:.2f} to +{small.high:.2f})" in PROSE
    few = paired_difference(*(scores("few-labels", setting, "top1") for setting in ("Drloc", "from scratch")))
    assert f"−{-few.mean:.2f} points, 95 % interval −{-few.low:.2f} to −{-few.high:.2f}" in PROSE


@pytest.mark.parametrize(("setting", "told"), [("λ=4", "({0}, {1} to {2},"), ("ce", "points away ({1} to {2};")])
def test_a_small_network_pulled_harder(setting: str, told: str) -> None:
    plain, pulled = (scores("defaults-flowers", f"auto{more}", "top1") for more in ("", f", with Drloc, {setting}"))
    found = paired_difference(pulled, plain)
    assert told.format(*map(signed, (found.mean, found.low, found.high))) in PROSE


def test_the_steps_measured_on_the_gpu() -> None:
    """Each row of the table of speeds is a row that ``frugalvit bench step`` printed."""
    kept = json.loads((DOCS / "results" / "h200.json").read_text(encoding="utf-8"))
    measured = [row for name, found in kept.items() if name.startswith("bench step") for row in found["rows"]]
    table = TEXT[TEXT.index("| step | images a second |") :].split("\n\n")[0]
    printed = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(printed) == len(measured)
    for cells in printed:
        rate = float(cells[1].replace(",", ""))
        row = next(row for row in measured if row["images_per_second"] == rate)
        assert float(cells[2].replace(",", "")) == pytest.approx(row["ms"], abs=0.051)
        assert float(cells[3]) == pytest.approx(row["host_ms"], abs=0.051)
        memory = row["reserved_gib" if "reserved" in cells[4] else "peak_gib"]
        assert float(cells[4].split()[0]) == pytest.approx(memory, abs=0.051)
        assert float(cells[5].split()[0]) == row["matrix_rate_percent"]


@pytest.mark.parametrize("setting", ["with", "without"])
def test_the_demonstration(setting: str) -> None:
    values = [last(path, "top1") for path in sorted((DOCS / "results" / "demo" / setting).glob("seed_*.jsonl"))]
    printed = re.search(rf"^\| few digits, {setting}[^|]*\| ([\d.]+) ± ([\d.]+) \| (\d+) \|", TEXT, re.MULTILINE)
    assert printed is not None and int(printed[3]) == len(values)
    assert float(printed[1]) == pytest.approx(statistics.fmean(values), abs=0.005)
    assert float(printed[2]) == pytest.approx(statistics.stdev(values), abs=0.005)


def test_the_localization_error_is_as_told() -> None:
    path = DOCS / "results" / "drloc-flowers" / "swin_tiny_w7" / "with" / "seed_0.jsonl"
    assert "to 1.20 grid cells" in PROSE and last(path, "localization_error") == pytest.approx(1.20, abs=0.005)


def test_defaults_for_small_data() -> None:
    logs = {"paper": ("esvit-defaults", "paper"), "auto": ("esvit-flowers", "L_V+L_R")}
    found = {}
    for name, (table, setting) in logs.items():
        path = DOCS / "results" / table / "swin_tiny_w7" / setting / "seed_0.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[name] = next(line["knn"] for line in lines if "knn" in line and line["epoch"] == 24)
    assert f"{found['auto']:.1f} with ours, {found['paper']:.1f} with the paper's" in TEXT


@pytest.mark.parametrize("backbone", ["t2t_vit_14", "cvt_13", "vit_base", "resnet50"])
def test_other_backbones(backbone: str) -> None:
    """The paired differences, and how well each learned the task."""
    table = f"drloc-flowers/{backbone}"
    found = paired_difference(*(scores(table, setting, "top1") for setting in ("with", "without")))
    error = statistics.fmean(scores(table, "with", "localization_error"))
    row = next(line for line in TEXT.splitlines() if f"| {table}, with | " in line and "±" in line)
    assert f"| {error:.2f} | {signed(found.mean)}, {signed(found.low)} to {signed(found.high)} |" in row


def test_the_same_seed() -> None:
    """What the text says of runs with the same seed."""
    pairs = zip(*(scores("drloc-flowers/t2t_vit_14", setting, "top1") for setting in ("with", "without")), strict=True)
    gains = [first - second for first, second in pairs]
    assert "gains with each seed ({:.1f}, {:.1f} and {:.1f} points)".format(*gains) in PROSE
    swin = {setting: scores("drloc-flowers", setting, "top1")[0] for setting in ("with", "without")}
    assert f"without the loss has {swin['without']:.2f} and" in PROSE and f"error of 1.20) {swin['with']:.2f}" in PROSE
    assert f"at 128 with that seed {swin['with']:.2f} and {swin['without']:.2f}" in PROSE
    assert f"({swin['with']:.2f} with this seed)" in PROSE
    forms = (scores("drloc-variants", "ce", "top1"), scores("drloc-flowers", "without", "top1"))
    gains = [ce - without for ce, without in zip(*forms, strict=True)]
    assert "which chose nothing, gave +{1:.1f} and +{2:.1f}".format(*gains) in PROSE
    (ce,) = scores("drloc-variants/vit_base", "ce", "top1")
    paper, without = (scores("drloc-flowers/vit_base", setting, "top1")[0] for setting in ("with", "without"))
    told = f"{ce - without:+.1f} (the paper's form with this seed: {paper - without:+.1f})".replace("-", "−")
    assert told in PROSE
    few = [scores("few-labels", setting, "top1")[0] for setting in ("Drloc", "from scratch")]
    assert "had {:.2f} and a run without it {:.2f}".format(*few) in PROSE
    early = [
        json.loads(line)
        for setting in ("Drloc", "from_scratch")
        for line in (DOCS / "results" / "best-cifar" / "swin_mini" / setting / "seed_0.jsonl").read_text().splitlines()
    ]
    assert (
        "(at a quarter of the run {:.1f} to {:.1f})".format(
            *(line["top1"] for line in early if line["step"] == 5000 and "top1" in line)
        )
        in TEXT
    )


@pytest.mark.parametrize(("backbone", "seeds"), [("t2t_vit_14", 3), ("cvt_13", 2)])
def test_as_a_classification_elsewhere(backbone: str, seeds: int) -> None:
    """The gain of Eq. 5 and of the paper's form, each over the same seeds without the loss."""
    ce, paper, without = (
        scores(f"{table}/{backbone}", setting, "top1")
        for table, setting in (("drloc-variants", "ce"), ("drloc-flowers", "with"), ("drloc-flowers", "without"))
    )
    gain = statistics.fmean(one - other for one, other in zip(ce, without[:seeds], strict=True))
    papers = statistics.fmean(one - other for one, other in zip(paper, without, strict=True))
    assert f"| {signed(gain)} (the paper's form: {signed(papers)}) |" in TEXT


def test_one_seed_differences() -> None:
    """What the text says two single runs differ by."""

    def gain(table: str, setting: str, baseline: str) -> float:
        return scores(table, setting, "top1")[0] - scores(table, baseline, "top1")[0]

    assert f"320 epochs (+{gain('best-flowers', 'Drloc, ce', 'from scratch'):.1f}, one" in PROSE
    assert f"on CIFAR-100 at 224 px it adds {gain('drloc-cifar', 'with, ce', 'without'):.1f}** (55.65 to 67.08" in PROSE
    half = gain("best-cifar", "60 epochs, half mixed", "60 epochs"), gain("best-cifar", "Drloc, half mixed", "Drloc")
    assert f"+{half[0]:.1f} points after 60 epochs" in PROSE and f"(−{-half[1]:.1f} on every other after 200" in PROSE
    short = "60 epochs, windows of 4"
    less = [gain("best-cifar", f"{short}, {mixed}", short) for mixed in ("half mixed", "not mixed")]
    assert "with windows of 4 +{:.1f}, and +{:.1f} on none)".format(*less) in PROSE
    assert f"| 19,500 at batch 256 | +{gain('defaults-cifar', 'auto', 'paper'):.2f} |" in TEXT
    gone = [scores("best-flowers", f"Drloc, ce{mixed}", "top1")[0] for mixed in (", not mixed", "")]
    assert "is gone ({:.2f} without mixing, which".format(*gone) in PROSE and f"267; {gone[1]:.2f} with)" in PROSE
    assert f"windows of 8 (+{gain('best-cifar', '60 epochs, windows of 4', '60 epochs'):.1f})" in PROSE
    weak, without = scores("drloc-variants", "ce, λ=0.2", "top1"), scores("drloc-flowers", "without", "top1")[:2]
    weak = [one - other for one, other in zip(weak, without, strict=True)]
    assert f"| 2 | +{statistics.fmean(weak):.2f} | 0.24 |" in TEXT


def test_a_teacher_that_follows_quickly() -> None:
    path = DOCS / "results" / "esvit-cifar" / "swin_mini" / "for_small_images,_quick_teacher" / "seed_0.jsonl"
    knn = [(line["epoch"], line["knn"]) for line in map(json.loads, path.read_text().splitlines()) if "knn" in line]
    told = {epoch: next(value for at, value in knn if int(at) == epoch) for epoch in (4, 14)}
    assert f"had a k-NN of {told[4]:.1f} after 5 epochs, {told[14]:.1f} after 14 and {knn[-1][1]:.1f} after 52" in PROSE


@pytest.mark.parametrize(
    ("run", "metric", "told"),
    [
        (
            "esvit-cifar/swin_mini/for_small_images,_slow_teacher",
            "knn",
            {10: "{:.1f} after 10 epochs, ", 30: "{:.1f} after 30 and ", 100: "{:.1f} after 100 (the second"},
        ),
        (
            "best-cifar/swin_mini/Drloc,_windows_of_4",
            "top1",
            {206: "had {:.2f} after 206 and ", 257: "**{:.2f} after 257**, where"},
        ),
        (
            "best-cifar/swin_mini/EsViT+Drloc",
            "top1",
            {206: "({:.2f} after 206, ", 257: "{:.2f} after 257), and ", 684: "{:.2f} at the end. "},
        ),
        (
            "esvit-nano/swin_nano/lr=0.0005",
            "knn",
            {1: "rose from {:.1f} after the first epoch to ", 8: "{:.1f} after 8 and ", 20: "{:.1f} at the end; "},
        ),
        ("esvit-nano/swin_nano/L_V+L_R", "knn", {8: "had {:.1f} after 8 and ", 9: "{:.1f} after 9, where that run"}),
        ("best-cifar/swin_mini/EsViT+Drloc,_as_published", "top1", {300: "at batch 256 and ends at {:.2f}, where it"}),
        (
            "best-cifar/swin_mini/longer_EsViT+Drloc",
            "top1",
            {103: "{:.2f} after 103 epochs, ", 206: "{:.2f} after 206 and ", 360: "**{:.2f} after 360** with"},
        ),
        (
            "best-cifar/swin_mini/longer_EsViT+Drloc",
            "top5",
            {206: "hardly anything is gained and top-5 falls ({:.2f} to ", 360: "{:.2f}). Against"},
        ),
        (
            "esvit-cifar/swin_mini/for_small_images,_slow_teacher,_300_epochs_more",
            "knn",
            {
                6: "falls from 34.1 to {:.1f} while the heads are new, and is ",
                60: "{:.1f} after 60 epochs, ",
                120: "{:.1f} after 120, ",
                210: "{:.1f} after 210 and ",
                300: "{:.1f} after 300: of",
            },
        ),
        ("best-cifar/swin_mini/EsViT+Drloc", "top1", {412: "had to be: {:.2f} after 412 epochs"}),
        ("best-cifar/swin_mini/EsViT+Drloc,_more_variety", "top1", {257: "on the way ({:.2f} after 257) and ends"}),
    ],
)
def test_on_the_way(run: str, metric: str, told: dict[int, str]) -> None:
    lines = (DOCS / "results" / run / "seed_0.jsonl").read_text().splitlines()
    found = {int(line["epoch"]): line[metric] for line in map(json.loads, lines) if metric in line}
    assert "".join(words.format(found[epoch]) for epoch, words in told.items()) in PROSE


def test_views_for_small_images() -> None:
    """k-NN at the epoch at which the better run was cut off."""
    folder = DOCS / "results" / "esvit-cifar" / "swin_mini"
    runs = {
        setting: [json.loads(line) for line in (folder / setting / "seed_0.jsonl").read_text().splitlines()]
        for setting in ("for_small_images", "L_V+L_R")
    }
    better, other = ({line["epoch"]: line["knn"] for line in run if "knn" in line}[82] for run in runs.values())
    assert f"k-NN of {better:.1f} on the validation images where the other had had {other:.1f}" in PROSE


@pytest.mark.parametrize(
    ("table", "setting", "baseline", "told"),
    [
        ("drloc-variants", "ce", "drloc-flowers, without", "{0}, 95 % interval {1} to {2}, p = {p:.3f}"),
        (
            "mixing-flowers",
            "not mixed",
            "drloc-flowers, without",
            "{0}, 95 % interval {1} to {2}, p = {p:.3f}, against",
        ),
        (
            "mixing-flowers",
            "not mixed, with Drloc",
            "mixing-flowers, not mixed",
            "{0}, 95 % interval {1} to {2}, p = {p:.3f}",
        ),
        (
            "mixing-flowers",
            "not mixed, no RandAugment, with Drloc",
            "mixing-flowers, not mixed, with Drloc",
            "{0}, 95 % interval {1} to {2}, against none with Drloc",
        ),
        ("defaults-swin", "auto", "defaults-swin, paper", "{0}, 95 % interval {1} to {2} |"),
        ("drloc-weights", "λ=4.0", "drloc-flowers, without", "{0}, 95 % interval {1} to {2}, p = {p:.3f}"),
        ("drloc-learned", "ce", "few-labels, from scratch", "{0}, 95 % interval {1} to {2}"),
        ("drloc-learned", "λ=4", "few-labels, from scratch", "{0}, 95 % interval {1} to {2}"),
        ("few-labels", "not mixed", "few-labels, from scratch", "{0}, 95 % interval {1} to {2}, against every step"),
        (
            "few-labels",
            "not mixed, with Drloc, ce",
            "few-labels, not mixed",
            "{0}, 95 % interval {1} to {2}, against none",
        ),
        ("finetune-flowers", "EsViT + Drloc, ce", "finetune-flowers, EsViT", "(95 % interval {1} to {2};"),
        ("finetune-flowers", "EsViT, gently", "finetune-flowers, EsViT", "60.72, {0} points ({1} to {2}), behind with"),
    ],
)
def test_pulling_harder(table: str, setting: str, baseline: str, told: str) -> None:
    """What the stronger forms of Drloc add, seed against seed."""
    other = scores(*baseline.split(", ", 1), "top1")
    better = scores(table, setting, "top1")
    found = paired_difference(better, other[: len(better)])
    assert told.format(*map(signed, (found.mean, found.low, found.high)), p=found.p_value) in PROSE


def test_what_drloc_costs() -> None:
    """In turns, and by the profiler."""
    kept = json.loads((DOCS / "results" / "h200.json").read_text(encoding="utf-8"))
    name = "bench step train --batch {} --compile graphs --data flowers102, two cores, the head in bf16"
    turns = {batch: abs(kept[name.format(batch)]["rows"][0]["drloc_percent"]) for batch in (128, 256)}
    assert f"{turns[128]:.1f} % at batch 128 and {turns[256]:.1f} % at 256" in PROSE
    profile = kept["profile of the supervised step, kernels on the device, with and without Drloc"]
    large, small = profile["batch 256"], profile["batch 128"]
    told = "{with_kernels} kernels, {with_ms:.2f} ms instead of {without_kernels}, {without_ms:.2f} ms"
    assert told.format(**large) in PROSE
    assert "{with_ms:.2f} instead of {without_ms:.2f}".format(**small) in PROSE
    classified = [profile[f"batch {batch}, as a classification"] for batch in (128, 256)]
    times = [f"{found['with_ms']:.2f} against {found['without_ms']:.2f}" for found in classified]
    more = [100 * (found["with_ms"] / found["without_ms"] - 1) for found in classified]
    assert f"{' and '.join(times)} ms of kernels, {more[0]:.1f} and {more[1]:.1f} %" in PROSE
    name = "bench step train --batch {} --compile graphs --data flowers102, two cores, Drloc as a classification"
    turns = {batch: kept[name.format(batch)]["rows"][0]["drloc_percent"] for batch in (128, 256)}
    assert f"−{-turns[128]:.1f} and {turns[256]:.1f} % in turns" in PROSE


@pytest.mark.parametrize(
    ("table", "told"), [("finetune-flowers", "−{:.2f} points"), ("few-labels", "{:.2f} with a tenth")]
)
def test_drloc_after_pretraining(table: str, told: str) -> None:
    found = paired_difference(*(scores(table, setting, "top1") for setting in ("EsViT + Drloc", "EsViT")))
    assert told.format(abs(found.mean)) in TEXT
    assert f"−{-found.low:.2f} to +{found.high:.2f}" in TEXT
