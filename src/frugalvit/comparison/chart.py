"""The picture of a comparison: curves over epochs (Drloc, Fig. 3) and every run's final value beside the means."""

import itertools
import statistics
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from frugalvit.report.run_record import Curve, mean_curve
from frugalvit.report.svg_charts import heading_of, is_percentage
from frugalvit.utils import palette
from frugalvit.utils.plotting import drawing, save

_FEW = 3  # points of a curve that are drawn as such
_WIDTH = 28  # letters that fit side by side under the right chart
_TURNED = (6, 20)  # names, and letters of each, that fit there slantwise
_LINE, _SWATCH = 92, 9  # letters that fit side by side above both, and how many a line's sample takes
_LONGEST = 72  # letters of a name there
_MANY, _SMALL = 10, 0.75  # names from which on letters are smaller, and how much
_TOUCHING = 0.03  # of the values' range: dots nearer than this lie on each other
_FEET = 96  # points of the size of a number there times how many there are
_ASIDE, _WIDEST = 0.1, 0.28  # from dot to dot, and from the foot to the last


def comparison_chart(
    values: dict[str, list[float]],
    curves: dict[str, list[Curve]],
    metric: str,
    path: Path,
    labels: tuple[str, str] | None = None,
) -> None:
    """Draw a comparison into a file."""
    with drawing({"text.parse_math": False}):  # a setting with a dollar sign is a name
        save(comparison_figure(values, curves, metric, labels), path)


def comparison_figure(
    values: dict[str, list[float]],
    curves: dict[str, list[Curve]],
    metric: str,
    labels: tuple[str, str] | None = None,
) -> Figure:
    """Left: each setting's mean curve, its seeds thin behind it. Right: final values, dots and mean.

    ``labels`` say what each of the two is: curves and final values may be of other images and other weights.

    The names of the curves stand above both charts: inside, any place may be a curve's. Where they are too long or too
    many for the foot of the right chart, they are numbered there.
    """
    numbered = len(values) > _TURNED[0] or max(map(len, values)) > _TURNED[1]
    texts = [f"{number}  {name}" if numbered else name for number, name in enumerate(values, 1)]
    texts = [text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…" for text in texts]
    smaller = _SMALL if len(texts) >= _MANY else 1.0
    columns = max(1, min(len(texts), int(_LINE / smaller) // (max(map(len, texts)) + _SWATCH)))
    rows = -(-len(texts) // columns)
    figure = Figure(figsize=(7.2, 2.9 + 0.21 * smaller * rows), layout="constrained")
    letters = smaller * matplotlib.rcParams["font.size"]
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    everything = [value for found in values.values() for value in found]
    reach = _TOUCHING * (max(everything) - min(everything))
    lines = []
    for index, name in enumerate(values):
        colour, dashes = palette.SERIES[palette.colour(index)], palette.dashes(index) or (None, None)
        for curve in curves[name]:
            if len(curve) > 1:
                left.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.35)
        line = Line2D([], [], color=colour, linewidth=1.8)
        mean = mean_curve(curves[name])
        if mean:
            points = "o" if len(mean) <= _FEW else None  # a single one has no line to be seen by
            line = left.plot(*zip(*mean, strict=True), color=colour, linewidth=1.8, marker=points, markersize=4)[0]
        line.set_dashes(dashes)
        lines.append(line)
        right.hlines(statistics.fmean(values[name]), index - 0.3, index + 0.3, color=colour, linewidth=2)
        places = [index + aside for aside in sideways(values[name], reach)]
        right.scatter(places, values[name], color=colour, s=14, zorder=3, clip_on=False)
    left.set_xlabel("epoch")
    curve_label, value_label = labels or (metric, f"final {metric}")
    left.set_ylabel(curve_label)
    if left.has_data() or numbered:
        figure.legend(lines, texts, frameon=False, loc="outside upper center", ncols=columns, fontsize=letters)
    right.set_xlim(-0.7, len(values) - 0.3)
    right.margins(y=0.2)
    right.set_xticks(range(len(values)), [str(k + 1) for k in range(len(values))] if numbered else texts)
    right.tick_params(axis="x", labelsize=min(letters, _FEET / len(values)) if numbered else letters)
    room = _WIDTH / (len(values) + 0.4)  # letters from one foot to the next
    if not numbered and any((len(a) + len(b)) / 2 + 1 > room for a, b in itertools.pairwise(values)):
        right.tick_params(axis="x", labelrotation=30)
        for label in right.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    right.set_ylabel(value_label)
    if is_percentage(heading_of(metric)):
        _end_at_a_hundred(left)
        _end_at_a_hundred(right)
    return figure


def sideways(values: list[float], reach: float) -> list[float]:
    """How far aside of its foot each dot stands: those within ``reach`` of their neighbour lie side by side."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    together: list[list[int]] = []
    for index in order:
        if together and values[index] - values[together[-1][-1]] <= reach:
            together[-1].append(index)
        else:
            together.append([index])
    aside = [0.0] * len(values)
    for group in together:
        step = min(_ASIDE, 2 * _WIDEST / max(1, len(group) - 1))
        for place, index in enumerate(sorted(group)):
            aside[index] = step * (place - (len(group) - 1) / 2)
    return aside


def _end_at_a_hundred(axes: Axes) -> None:
    """A margin beyond what a percentage can be is no room for anything."""
    low, high = axes.dataLim.intervaly
    if 0 <= low <= high <= 100:
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, 0), min(top, 100))
