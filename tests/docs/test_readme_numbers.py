"""The README's numbers are those of the kept results."""

from __future__ import annotations

import json
import statistics

from frugalvit.utils.statistics import paired_difference
from helpers.kept_results import DOCS, scores


def test_the_readme_says_no_more() -> None:
    """Its accuracies are those of the tables, rounded."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    shown = {
        "from scratch": (("drloc-flowers", "without"), ("few-labels", "from scratch")),
        "+ Drloc, as a classification | 47": (("drloc-variants", "ce"), ("drloc-learned", "ce")),
        "from scratch, as long, nothing": (("mixing-flowers", "not mixed"), ("few-labels", "not mixed")),
        "+ Drloc, as a classification | 61": (
            ("mixing-flowers", "not mixed, with Drloc"),
            ("few-labels", "not mixed, with Drloc, ce"),
        ),
        "without RandAugment": (("mixing-flowers", "not mixed, no RandAugment, with Drloc"),),
        "+ EsViT first": (("finetune-flowers", "EsViT"), ("few-labels", "EsViT")),
        "+ both": (("finetune-flowers", "EsViT + Drloc"), ("few-labels", "EsViT + Drloc")),
    }
    for start, places in shown.items():
        line = next(line for line in readme.splitlines() if line.startswith(f"| {start}"))
        for cell, (table, setting) in zip(line.strip("|").split("|")[1:], places, strict=False):
            values = scores(table, setting, "top1")
            assert cell.strip(" *").startswith(f"{statistics.fmean(values):.1f}")
            if len(values) > 1:
                assert f"± {statistics.stdev(values):.1f}" in cell
    settings = ("long EsViT + Drloc", "Drloc, ce", "Drloc, ce, not mixed", "from scratch")
    best, drloc, unmixed, alone = (scores("best-flowers", setting, "top1")[0] for setting in settings)
    told = f"as long with Drloc alone: {drloc:.1f}, not mixed {unmixed:.1f}, without either: {alone:.1f})"
    assert f"{told} | **{best:.1f}** |" in readme
    both = scores("finetune-flowers", "EsViT + Drloc, ce", "top1")
    assert f"(as a classification {statistics.fmean(both):.1f} ± {statistics.stdev(both):.1f}) |" in readme
    few = (
        statistics.fmean(scores("few-labels", setting, "top1")) for setting in ("EsViT", "not mixed, with Drloc, ce")
    )
    told = "({:.1f} against {:.1f} with a tenth of the labels; {:.1f} against {:.1f} after 320 epochs with all, "
    assert told.format(*few, best, unmixed) in " ".join(readme.split())
    baseline = scores("mixing-flowers", "not mixed", "top1")
    mixed = paired_difference(baseline, scores("drloc-flowers", "without", "top1"))
    prose = " ".join(readme.split())
    assert (
        f"by {mixed.mean:.1f} points more** (paired, three seeds, 95 % interval +{mixed.low:.1f} to +{mixed.high:.1f})"
        in prose
    )
    gain = paired_difference(scores("mixing-flowers", "not mixed, with Drloc", "top1"), baseline)
    assert f"and **{gain.mean:.1f}** to the latter (+{gain.low:.1f} to +{gain.high:.1f})" in prose
    small = [
        scores("defaults-flowers", setting, "top1")
        for setting in ("auto, not mixed, no RandAugment, with Drloc", "paper")
    ]
    chosen = [scores("defaults-swin", setting, "top1") for setting in ("auto", "paper")]
    told = " and ".join(f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" for values in chosen)
    assert f"100 epochs: {told} with Swin-T and 2,040 flowers" in prose
    chosen = [scores("defaults-cifar", setting, "top1")[0] for setting in ("auto", "paper")]
    assert "{:.1f} and {:.1f} with a Swin of 7 million".format(*chosen) in prose
    ours, papers = (f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" for values in small)
    assert f"{ours}, where the papers' values give {papers} (three seeds)" in prose
    for name, backbone in (("Swin-T", "swin_tiny_w7"), ("ViT-Ti", "vit_tiny_patch16_224")):
        alone, drloc = (scores(f"drloc-cifar/{backbone}", setting, "top1")[0] for setting in ("without", "with, ce"))
        line = next(line for line in readme.splitlines() if line.startswith(f"| {name} |"))
        assert line.replace("*", "").startswith(f"| {name} | {alone:.2f} | {drloc:.2f} |")
        assert backbone != "swin_tiny_w7" or f"CIFAR-100 at 224 px it adds **{drloc - alone:.1f}**" in prose
    deeper, first, drloc, alone = (
        scores("best-cifar", setting, "top1")[0]
        for setting in ("longer EsViT + Drloc, drop path", "EsViT + Drloc", "Drloc", "from scratch")
    )
    longest = scores("best-cifar", "longest EsViT + Drloc, drop path", "top1")
    assert len(longest) == 2 and f"has **{statistics.fmean(longest):.1f}** after 640 epochs of EsViT on the" in prose
    assert f"(two seeds of the latter), {deeper:.1f} after 400 and 360, {first:.1f} after 100 and 684 (one" in prose
    assert f"each; {drloc:.1f} with Drloc alone and {alone:.1f} without" in prose
    few = [json.loads(line) for line in (DOCS / "results" / "labels-cifar.jsonl").read_text().splitlines()]
    ten = [row["logistic"] for row in few if row["epochs"] == 640 and row["of_each_class"] == 10]
    assert f"has {statistics.fmean(ten):.1f} ± {statistics.stdev(ten):.1f} (three seeds)" in prose
    kept = json.loads((DOCS / "results" / "h200.json").read_text(encoding="utf-8"))
    for name, memory, row in (
        ("pretrain --batch 64 --against", "peak_gib", 0),
        ("pretrain --batch 64 --against", "peak_gib", 1),
        ("pretrain --batch 64 --data flowers102, two cores", "peak_gib", 0),
        ("pretrain --batch 256 --data flowers102, two cores", "peak_gib", 0),
        ("train --batch 256 --against", "peak_gib", 0),
        ("train --batch 256 --against", "peak_gib", 2),
        ("train --batch 256 --compile graphs --data flowers102, two cores, the head in bf16", "reserved_gib", 0),
    ):
        found = kept[f"bench step {name}"]["rows"][row]
        assert f"| {found['images_per_second']:,.0f} in {found[memory]:.1f} GiB" in readme, name
