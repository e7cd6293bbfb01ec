"""Means, deviations and paired differences over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation of some runs."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if self.count > 1 else f"{self.mean:.2f}"


@dataclass(frozen=True)
class Difference:
    """Paired difference of two settings over the same seeds, with its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float
    p_value: float
    count: int

    def __str__(self) -> str:
        if self.count < 2:
            return f"{self.mean:+.2f} (one seed: no interval)"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], p = {self.p_value:.3f}"

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.count > 1 and (self.low > 0 or self.high < 0)


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """first - second, seed by seed: what varies from seed to seed for both cancels."""
    from scipy import stats

    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    count = len(differences)
    if count < 2:
        return Difference(mean, math.nan, math.nan, math.nan, count)
    error = statistics.stdev(differences) / math.sqrt(count)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    p_value = float(2 * stats.t.sf(abs(mean) / error, count - 1)) if error > 0 else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p_value, count)
