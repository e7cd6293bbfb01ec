"""Copy the logs of finished tables to docs/results/, and draw figures from them.

    python docs/tools/keep_results.py runs/reproduce

It copies the scores, every hundredth step of the losses, and the numbers of the summaries and probes of the runs of
``frugalvit reproduce``.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from frugalvit.comparison.chart import comparison_figure
from frugalvit.utils.checkout import import_benchmark
from frugalvit.utils.plotting import save

reproduce = import_benchmark("reproduce")
RESULTS = Path(__file__).parent.parent / "results"
EVERY = 100


def keep(runs: Path) -> None:
    for log in sorted(runs.glob("*/*/*/seed_*/metrics.jsonl")):
        target = RESULTS / log.parent.relative_to(runs)
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line["split"] != "train" or line["step"] % EVERY == 0]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        files = ("summary.json", "reproduced.json")
        numbers = {name: value for file in files for name, value in _numbers(log.parent / file).items()}
        if numbers:
            target.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _numbers(path: Path) -> dict[str, float]:
    """Return the numbers in a JSON file; none if the file is missing."""
    facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: value for name, value in facts.items() if isinstance(value, int | float)}


def draw(table: str) -> None:
    """Draw one chart per backbone: curves and final scores of every setting with more than one score."""
    spec = reproduce.load_table(table)
    metric = "knn" if spec.kind == "pretrain" else spec.metric
    for folder in sorted((RESULTS / table).iterdir()):
        curves = {}
        for setting in spec.settings:
            logs = sorted((folder / reproduce.folder_name(setting)).glob("seed_*.jsonl"))
            lines = [[json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] for log in logs]
            scores = [[(line["epoch"], line[metric]) for line in log if metric in line] for log in lines]
            if scores:
                curves[setting] = scores
        values = {setting: [curve[-1][1] for curve in runs] for setting, runs in curves.items()}
        if any(len(curve) > 1 for runs in curves.values() for curve in runs):
            save(comparison_figure(values, curves, metric), RESULTS / f"{table}_{folder.name}.png")


LEARNED = {
    "drloc-flowers": ("with",),
    "drloc-weights": ("λ=0.1", "λ=1.0", "λ=4.0", "λ=16.0"),
    "drloc-variants": ("ce", "ce, λ=2", "reg", "dense, pooled"),  # the error of signed offsets is not comparable
    "drloc-forms": ("released", "paper, raw grid", "clean images", "fast head"),
    "drloc-pairs": ("m=32", "m=128", "m=all"),
    "drloc-width": ("width=256", "width=1024"),
}


def draw_learned() -> None:
    """Draw accuracy over the error of the localisation task, one point for each kind of Drloc (seed 0)."""
    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for table, settings in LEARNED.items():
        for setting in settings:
            log = RESULTS / table / "swin_tiny_w7" / reproduce.folder_name(setting) / "seed_0.jsonl"
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
            error = next(line["localization_error"] for line in reversed(lines) if "localization_error" in line)
            top1 = _numbers(log.with_suffix(".json"))["top1"]
            axes.plot(max(error, 1.01), top1, "o" if error > 1.01 else "<", color="tab:blue")
            if abs(top1 - 43.3) > 0.9:  # the others overlap
                name = setting if error > 1.01 else f"{setting}: {error:.2f}"
                axes.annotate(
                    name,
                    (max(error, 1.01), top1),
                    xytext=(7, 2 if setting == "reg" else -3),
                    textcoords="offset points",
                )
    without = _numbers(RESULTS / "drloc-flowers" / "swin_tiny_w7" / "without" / "seed_0.json")["top1"]
    axes.axhline(without, color="grey", linestyle=":")
    axes.annotate("the paper's; other pairs,\nwidths, images, grids", (1.226, 43.3), va="center", ha="left", wrap=True)
    axes.annotate("without the loss", (1.01, without), xytext=(0, 4), textcoords="offset points", color="grey")
    axes.set_xlim(1.0, 1.31)
    axes.set_xlabel("error of the localisation task at the end, in grid cells")
    axes.set_ylabel("top-1 on Flowers-102, %")
    figure.savefig(RESULTS / "learned.png")


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
    for name in reproduce.list_tables():
        if (RESULTS / name).is_dir():
            draw(name)
    draw_learned()
