"""Means, deviations and paired differences over seeds; the interval of a share."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

_ROUNDING = 1e-12
"""Differences that vary less than this, relative to the scores, differ by rounding alone: 80.1 - 79.1."""


PARTS = 20
"""Image i is in part i mod 20. Leaving out one part at a time shows how much a score depends on the images."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over runs."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if self.count > 1 else f"{self.mean:.2f}"


@dataclass(frozen=True)
class Difference:
    """Paired difference of two settings over the same seeds, with a 95 % interval (Student's t).

    The interval and p are NaN if the differences do not vary.
    """

    mean: float
    low: float
    high: float
    p_value: float
    count: int

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read a difference of comparison.json, where None stands for NaN."""
        numbers: dict[str, Any] = {name: math.nan if value is None else value for name, value in values.items()}
        return cls(**numbers)

    def __str__(self) -> str:
        if self.count < 2:
            return f"{self.mean:+.2f} (one seed: no interval)"
        if math.isnan(self.p_value):
            return f"{self.mean:+.2f} (the same at every seed: no interval)"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], p = {self.p_value:.3f}"

    @property
    def clear(self) -> bool:
        """True if the interval excludes zero."""
        return self.count > 1 and (self.low > 0 or self.high < 0)


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


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


def jackknife_interval(score: float, values: Sequence[float], highest: float = 100.0) -> tuple[float, float]:
    """Return the 95 % interval of a score between 0 and ``highest`` from its pseudo-values (Tukey 1958)."""
    from scipy import stats

    if len(values) < 2:
        return 0.0, highest
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return max(0.0, score - half), min(highest, score + half)


def paired_difference(first: Sequence[float], second: Sequence[float], resolution: float | None = None) -> Difference:
    """Return first - second, paired by seed, so that variation common to both cancels.

    resolution: the distance between two possible scores, 100 / n for a percentage of n images. Rounding to it has a
    variance of resolution² / 12, so a difference has at least twice that, even if it is the same at every seed.
    """
    from scipy import stats

    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    count = len(differences)
    if count < 2:
        return Difference(mean, math.nan, math.nan, math.nan, count)
    deviation = max(statistics.stdev(differences), (resolution or 0) / math.sqrt(6))
    if deviation <= _ROUNDING * max(map(abs, [*first, *second])):
        return Difference(mean, math.nan, math.nan, math.nan, count)
    error = deviation / math.sqrt(count)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    p_value = float(2 * stats.t.sf(abs(mean) / error, count - 1))
    return Difference(mean, mean - half, mean + half, p_value, count)
