"""Draw curves as inline SVG, which needs no script; a small script adds the values under the pointer.

Colours come from the page's CSS, for light, dark and print.
"""

import html
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from frugalvit.report.run_record import Curve, RunRecord, mean_curve, thin_curve
from frugalvit.utils import palette
from frugalvit.utils.scores import SCORE_NAMES, as_percent

WIDTH, HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 30  # the left one is a minimum
_LETTER = 6.5  # width of a digit beside the axes
_GAP = 6  # between a number on the left and the frame


@dataclass(frozen=True)
class Series:
    """One line: its label, its style (colour and dash) and points. ``weight``: "run", "mean" or "faint"."""

    label: str
    style: int
    curve: Curve
    weight: str = "run"


@dataclass(frozen=True)
class Panel:
    """One small chart, under a heading. ``best``: the x of the best weights."""

    heading: str
    title: str
    x_label: str
    series: list[Series]
    by_split: bool
    best: float | None = None


# Headings, and parts of the names of their metrics; the first match counts.
_HEADINGS: tuple[tuple[str, str], ...] = (
    ("Loss", "loss cross_entropy squared_error"),
    ("k-NN", "knn"),
    ("Pseudo-labels", "pseudo_labels"),
    ("Score", "top1 top5 accuracy mean_per_class miou _ap map auc f1 r2 rounded"),
    ("Localization error", "error"),
    ("Health", "entropy norm rank deviation skipped prototypes agreement dominant match images_per memory kl"),
    ("Loss", "localization view region"),
    ("Schedules", "lr decay momentum temp weight lambda ema"),
)
_ORDER = ("Loss", "Score", "k-NN", "Pseudo-labels", "Localization error", "Schedules", "Health", "Other")
_PER_CENT = ("Score", "k-NN", "Pseudo-labels")
MAIN = ("Loss", "Score", "k-NN")
"""Headings that a page shows first; the others are among its details."""


def heading_of(metric: str) -> str:
    name = metric.lower()
    return next((title for title, parts in _HEADINGS if any(part in name for part in parts.split())), "Other")


def panels(records: list[RunRecord]) -> list[Panel]:
    """Make one panel per metric from the curves of the runs, in the order of the headings.

    The splits of one kind of run share a panel. Several kinds have a panel per split: colours stand for kinds then.
    """
    kinds = list(dict.fromkeys(record.kind() for record in records))
    keys = dict.fromkeys(key for record in records for key in record.curves)
    by_title: dict[str, list[tuple[str, str]]] = {}
    for split, metric in keys:
        both = len({s for s, m in keys if m == metric}) > 1
        title = metric if len(kinds) == 1 or not both else f"{metric} ({split})"
        by_title.setdefault(title, []).append((split, metric))
    by_heading: dict[str, list[Panel]] = {title: [] for title in _ORDER}
    for title, members in by_title.items():
        series: list[Series] = []
        for number, key in enumerate(members):
            for index, kind in enumerate(kinds):
                same = [record for record in records if record.kind() == kind and key in record.curves]
                prefix = f"{key[0]} " if len(kinds) == 1 and len(members) > 1 else ""
                labels = [key[0] if len(records) == 1 else f"{prefix}{record.name}" for record in same]
                style, weight = number if len(kinds) == 1 else index, "faint" if len(same) > 1 else "run"
                curves = [
                    [(x, float(f"{as_percent(key[1], y):.6g}")) for x, y in record.curves[key]] for record in same
                ]
                series += [Series(label, style, curve, weight) for label, curve in zip(labels, curves, strict=True)]
                if len(same) > 1 and (mean := mean_curve(curves)):
                    series.append(Series(f"{prefix}mean of {len(same)}", style, mean, "mean"))
        heading = heading_of(members[0][1])
        name = SCORE_NAMES.get(title, title).replace("_", " ")
        best = records[0].best_epoch if len(records) == 1 else None
        panel = Panel(heading, name, "epoch", series, len(kinds) == 1, best)
        if all(panel.series != other.series for other in by_heading[heading]):  # one loss is the sum of one term
            by_heading[heading].append(panel)
    # The total loss comes before its terms.
    return [
        panel
        for panels in by_heading.values()
        for panel in sorted(panels, key=lambda p: p.title.split()[:1] != ["loss"])
    ]


def chart(panel: Panel) -> str:
    """Draw a panel as an HTML figure: SVG, and its points as JSON for the read-out."""
    curves = [(series, thin_curve(series.curve)) for series in panel.series]
    xs = [x for _, curve in curves for x, _ in curve]
    ys = [y for _, curve in curves for _, y in curve]
    # On a linear axis a few large values would flatten all others.
    logarithmic = min(ys) > 0 and max(ys) > 50 * statistics.median_high(ys)
    scale = math.log10 if logarithmic else float
    x0, x1 = _widen(min(xs), max(xs))
    y0, y1 = _widen(*(scale(bound) for bound in (min(ys), max(ys))))
    margin = 0.05 * (y1 - y0)
    y0, y1 = (y0 if min(ys) == 0 else y0 - margin), y1 + margin
    if panel.heading in _PER_CENT and max(ys) <= 100 and not logarithmic:
        y1 = min(y1, 100.0)

    levels = log_ticks(y0, y1) if logarithmic else ticks(y0, y1)
    texts = [f"{value:g}" for value in levels] if logarithmic else tick_texts(levels)
    left = max(_LEFT, _GAP + math.ceil(_LETTER * max(map(len, texts), default=0)) + 1)

    def across(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (WIDTH - left - _RIGHT)

    def down(y: float) -> float:
        return HEIGHT - _BOTTOM - (scale(y) - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)

    heights = [(down(value), text) for value, text in zip(levels, texts, strict=True)]
    parts = _axes(panel, left, ticks(x0, x1), across, heights)
    for series, curve in curves:
        points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in curve)
        style = f"--line:var(--series-{palette.colour(series.style)})"
        marks = f'stroke-dasharray="{palette.dash(series.style)}"' if palette.dash(series.style) else ""
        if len(curve) == 1:
            x, y = curve[0]
            parts.append(f'<circle class="dot" style="{style}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="3"/>')
        else:
            parts.append(f'<polyline class="line {series.weight}" style="{style}" {marks} points="{points}"/>')
    if panel.best is not None:
        x, end = across(panel.best), "end" if panel.best > (x0 + x1) / 2 else "start"
        parts.append(f'<line class="best" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        shift = -4 if end == "end" else 4
        parts.append(f'<text x="{x + shift:.1f}" y="{_TOP + 9}" text-anchor="{end}">best, {panel.best:.3g}</text>')
    lines = [
        {
            "label": series.label,
            "style": palette.colour(series.style),
            "x": [_short(x) for x, _ in curve],
            "y": [_short(y) for _, y in curve],
        }
        for series, curve in curves
    ]
    data = {"x": [x0, x1], "label": panel.x_label, "series": lines}
    key, heading = _key(panel), html.escape(panel.heading)
    title = html.escape(panel.title) + (' <span class="quiet">log scale</span>' if logarithmic else "")
    return (
        f'<figure class="chart"><figcaption><span class="eyebrow">{heading}</span> {title}{key}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{html.escape(panel.title)}" '
        f'data-frame="{left} {WIDTH - _RIGHT} {_TOP} {HEIGHT - _BOTTOM}">{"".join(parts)}</svg>'
        f'<p class="readout" aria-live="polite"></p>{json_block(data)}</figure>'
    )


def _key(panel: Panel) -> str:
    """Draw the key of the splits in a panel; the page's legend has the kinds of runs."""
    lines = [series for series in panel.series if series.weight != "faint"]
    if not panel.by_split or len(lines) < 2:
        return ""
    return "".join(
        f' <svg class="key" viewBox="0 0 22 8" aria-hidden="true">{swatch(line.style, 22)}</svg>'
        f'<span class="quiet">{html.escape(line.label.split()[0])}</span>'
        for line in lines
    )


def swatch(style: int, width: int) -> str:
    """Draw a short piece of a series' line."""
    colour = f"--line:var(--series-{palette.colour(style)})"
    dashes = palette.dash(style) or "none"
    ends = f'x1="1" x2="{width - 1}" y1="4" y2="4"'
    return f'<line {ends} class="line mean" style="{colour}" stroke-dasharray="{dashes}"/>'


def _axes(panel: Panel, left: int, x_ticks: list[float], across: Any, heights: list[tuple[float, str]]) -> list[str]:
    """Draw rules and numbers; ``heights`` are the positions and texts of the ticks on the left."""
    parts: list[str] = []
    bottom = HEIGHT - _BOTTOM
    for y, text in heights:
        parts.append(f'<line class="rule" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - _GAP}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    for tick, text in zip(x_ticks, tick_texts(x_ticks), strict=True):
        x, anchor = across(tick), "middle"
        if x + _LETTER / 2 * len(text) > WIDTH:  # a long number would be cut off
            x, anchor = WIDTH - 1, "end"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="{anchor}">{text}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    label = html.escape(panel.x_label)
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end" class="quiet">{label}</text>')
    return parts


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Choose about ``count`` round numbers between ``low`` and ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Choose powers of ten between ``10**low`` and ``10**high``, with 2 and 5 if there are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    values = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [value for value in values if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def json_block(data: Any) -> str:
    """Write JSON into a script element, escaped so that no text inside can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json">{text}</script>'


def _widen(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-7 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) * 0.1
    return (low - margin, high + margin) if margin else (0.0, 1.0)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def tick_texts(values: list[float]) -> list[str]:
    """Write ticks with as many decimals as they need."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest >= 1e5 or (0 < largest < 1e-2):
        return [f"{value:.3g}" for value in values]
    gap = min((b - a for a, b in itertools.pairwise(values)), default=largest or 1.0)
    decimals = next((d for d in range(9) if abs(round(gap, d) - gap) <= 1e-6 * gap), 9)
    return [f"{value:,.{decimals}f}" for value in values]
