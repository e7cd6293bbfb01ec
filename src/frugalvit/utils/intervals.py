"""95 % intervals of scores: of a share of images, and by the jackknife."""

import math
import statistics
from collections.abc import Sequence

PARTS = 20
"""Image i is in part i mod 20. Leaving out one part at a time shows how much a score depends on the images."""


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy measured on ``count`` images, in percent (Wilson 1927).

    It stays within 0 and 100, also if all or none are right.
    """
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
