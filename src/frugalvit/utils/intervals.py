"""95 % intervals of scores: of a share of images, and by the jackknife."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PARTS = 20
"""Image i is in part i mod 20. Leaving out one part at a time shows how much a score depends on the images."""


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy measured on ``count`` images, in percent, within 0 and 100 (Wilson 1927)."""
    z = 1.959963984540054  # of 95 %
    share, weight = right / count, z * z / count
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def pseudo_values(total: float, without: Sequence[float]) -> list[float]:
    """Return the jackknife's pseudo-values G·θ - (G - 1)·θ_g of a score θ, which is θ_g without part g.

    They vary like independent scores of the G parts; for a share of images they are nearly the scores of the parts.
    """
    count = len(without)
    return [count * total - (count - 1) * score for score in without]


def jackknife_interval(
    score: float, values: Sequence[float], highest: float = 100.0, lowest: float = 0.0
) -> tuple[float, float]:
    """Return the 95 % interval of a score between ``lowest`` and ``highest`` from its pseudo-values (Tukey 1958)."""
    from scipy import stats

    if len(values) < 2:
        return lowest, highest
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return max(lowest, score - half), min(highest, score + half)


def jackknife_facts(
    total: Mapping[str, float | None],
    without: Sequence[Mapping[str, float | None]],
    limits: Mapping[str, tuple[float, float]] | None = None,
    highest: float = 100.0,
    digits: int = 6,
) -> dict[str, Any]:
    """Return the interval and the pseudo-values of every score. Undefined scores (None, NaN) are left out.

    total, without: the scores by name, of all images and without one part at a time
    limits:         lowest and highest value of some scores; by default 0 and ``highest``
    """
    intervals: dict[str, Any] = {}
    values: dict[str, list[float]] = {}
    for name, score in total.items():
        if score is not None:
            parts = [part for scores in without if (part := scores.get(name)) is not None and math.isfinite(part)]
            pseudo, (low, high) = pseudo_values(score, parts), (limits or {}).get(name, (0.0, highest))
            intervals[f"{name}_interval"] = list(jackknife_interval(score, pseudo, high, low))
            values[name] = [round(value, digits) for value in pseudo]
    return intervals | {"pseudo_values": values}
