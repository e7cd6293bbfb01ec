"""The picture of a comparison: curves over epochs (Drloc, Fig. 3) and every run's final value beside the means."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.figure import Figure

from frugalvit.report import palette
from frugalvit.report.plots import save

Curve = list[tuple[float, float]]
_WIDTH = 24  # letters that fit side by side under the right chart


def comparison_chart(values: dict[str, list[float]], curves: dict[str, list[Curve]], metric: str, path: Path) -> None:
    """Left: each setting's mean curve, its seeds thin behind it. Right: final values, dots and mean."""
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, name in enumerate(values):
        colour, dashes = palette.SERIES[index % 8], palette.DASHES[index % 8]
        for curve in curves[name]:
            if len(curve) > 1:
                left.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.35)
        mean = _mean_curve(curves[name])
        if mean:
            line = left.plot(*zip(*mean, strict=True), color=colour, linewidth=1.8, label=name)[0]
            line.set_dashes(dashes or (None, None))
        right.hlines(statistics.fmean(values[name]), index - 0.3, index + 0.3, color=colour, linewidth=2)
        right.scatter([index] * len(values[name]), values[name], color=colour, s=14, zorder=3)
    left.set_xlabel("epoch")
    left.set_ylabel(metric)
    if left.has_data():
        left.legend(frameon=False)
    right.set_xlim(-0.7, len(values) - 0.3)
    right.margins(y=0.2)
    right.set_xticks(range(len(values)), list(values))
    if sum(map(len, values)) > _WIDTH:  # names that would run into each other
        right.tick_params(axis="x", labelrotation=30)
        for label in right.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    right.set_ylabel(f"final {metric}")
    save(figure, path)


def _mean_curve(curves: list[Curve]) -> Curve:
    """The mean over runs at the epochs that all of them have."""
    if not curves or not all(curves):
        return []
    shared = set.intersection(*({epoch for epoch, _ in curve} for curve in curves))
    return [(epoch, statistics.fmean(dict(curve)[epoch] for curve in curves)) for epoch in sorted(shared)]
