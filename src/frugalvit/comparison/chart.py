"""The picture of a comparison: curves over epochs (Drloc, Fig. 3) and every run's final value beside the means."""

import statistics

from matplotlib.figure import Figure

from frugalvit.report.run_record import Curve, mean_curve
from frugalvit.utils import palette
from frugalvit.utils.plotting import drawing

_FEW = 3  # points of a curve that get markers
_LONGEST = 72  # characters of a name
_LINE = 80  # characters in one row of the legend


@drawing({"text.parse_math": False})  # a dollar sign in a name is a dollar sign
def comparison_figure(
    values: dict[str, list[float]], curves: dict[str, list[Curve]], metric: str, labels: tuple[str, str] | None = None
) -> Figure:
    """Left: each setting's mean curve, its seeds thin behind it. Right: final values, dots and mean.

    labels: y-axis labels of curves and final values, which may use different images and weights
    """
    names = [f"{number}  {name}"[:_LONGEST] for number, name in enumerate(values, 1)]
    columns = max(1, min(len(names), _LINE // (max(map(len, names)) + 8)))
    figure = Figure(figsize=(7.2, 2.9 + 0.21 * -(-len(names) // columns)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, (name, finals) in enumerate(values.items()):
        colour, dashes = palette.SERIES[palette.colour(index)], palette.dashes(index) or (None, None)
        for curve in curves[name]:
            if len(curve) > 1:
                left.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.35)
        mean = mean_curve(curves[name])
        points = list(zip(*mean, strict=True)) or [(), ()]
        marker = "o" if len(mean) <= _FEW else None  # a single point has no line
        (line,) = left.plot(*points, color=colour, linewidth=1.8, marker=marker, markersize=4, label=names[index])
        line.set_dashes(dashes)
        right.hlines(statistics.fmean(finals), index + 0.7, index + 1.3, color=colour, linewidth=2)
        right.scatter([index + 1] * len(finals), finals, color=colour, s=14, zorder=3, alpha=0.7, clip_on=False)
    curve_label, value_label = labels or (metric, f"final {metric}")
    left.set(xlabel="epoch", ylabel=curve_label)
    right.set(xlabel="setting", ylabel=value_label, xticks=range(1, len(values) + 1))
    right.set_xlim(0.3, len(values) + 0.7)
    figure.legend(frameon=False, loc="outside upper center", ncols=columns)
    return figure
