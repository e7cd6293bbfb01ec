"""Means, deviations and paired differences over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

_ROUNDING = 1e-12
"""Differences that vary less than this, relative to the scores, differ by rounding alone: 80.1 - 79.1."""


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
    """Difference of two settings over the same seeds, with a 95 % interval (Student's t).

    Interval and p are NaN with one seed, or if the differences do not vary.
    """

    mean: float
    low: float
    high: float
    p_value: float
    count: int
    error: float = math.nan  # standard error of the mean
    freedom: float = math.nan
    seed_share: float = 1.0  # the part of error² that more seeds reduce; the rest comes from the images

    def __str__(self) -> str:
        if self.count < 2:
            return f"{self.mean:+.2f} (one seed: no interval)"
        if math.isnan(self.p_value):
            return f"{self.mean:+.2f} (the same at every seed: no interval)"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], p = {self.p_value:.3f}"

    @property
    def clear(self) -> bool:
        return self.count > 1 and (self.low > 0 or self.high < 0)

    def at_level(self, alpha: float) -> Self:
        """Return the same difference with an interval that misses the truth with this probability."""
        from scipy import stats

        half = float(stats.t.ppf(1 - alpha / 2, self.freedom)) * self.error
        return replace(self, low=self.mean - half, high=self.mean + half)

    def describe(
        self,
        name: str,
        baseline: str,
        verbs: tuple[str, str] = ("helps", "hurts"),
        unit: str = "points",
        images: int = 0,
    ) -> str:
        """Return the verdict in one sentence; images: the number that all seeds were scored on, 0 if unknown."""
        if self.clear:
            low, high = sorted((abs(self.low), abs(self.high)))
            verb = verbs[self.mean < 0]
            return f"{name} {verb} by {abs(self.mean):.1f} {unit} ({low:.1f} to {high:.1f}) against {baseline}"
        if self.count < 2:
            return f"{name} against {baseline}: one seed cannot tell: use 3 seeds or more"
        if math.isnan(self.p_value):
            return f"{name} against {baseline}: no difference that varies between seeds, so no verdict"
        advice = f"the {f'{images:,} ' if images else ''}images are the limit, not the seeds: score on more images"
        advice = advice if self.seed_share < 0.5 else "use more seeds"
        limit = f"{(self.high - self.low) / 2:.1f} {unit}"
        return f"{name} against {baseline}: no clear difference (one below {limit} would not show here): {advice}"


def holm_levels(p_values: Sequence[float], alpha: float = 0.05) -> list[float]:
    """Return the level of each comparison's interval, so that it excludes zero if and only if Holm's test rejects.

    Sorted by p, the k-th of m is tested at α / (m - k + 1); from the first that fails on, this level stays.
    """
    levels, level, failed = [alpha] * len(p_values), alpha, False
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: (math.isnan(p_values[i]), p_values[i]))):
        level = level if failed else alpha / (len(p_values) - rank)
        levels[index], failed = level, failed or not p_values[index] <= level
    return levels


def crossed_error(values: Any, resolution: float = 0.0) -> tuple[Any, Any, Any]:
    """Return standard error, degrees of freedom and seed share of the mean of values (..., S seeds, G parts of images).

    Both seeds and images are random, and crossed: all seeds see the same images. With the mean squares of a two-way
    analysis of variance, the mean of all S·G values has the variance

        (max(MS_seed, MS_rest) + max(MS_image - MS_rest, 0)) / (S·G)

    The second term is at least the square of one image's worth, the ``resolution``: more seeds never reduce it
    (Agresti and Min 2005). Satterthwaite's degrees of freedom are limited to 2 (S - 1): with three seeds MS_seed is
    often too small. Then at most 5 % of comparisons of equally good settings show a difference, which a test simulates.
    """
    import numpy as np

    seeds, parts = values.shape[-2:]
    mean, by_seed, by_part = values.mean((-2, -1)), values.mean(-1), values.mean(-2)
    seed = parts * ((by_seed - mean[..., None]) ** 2).sum(-1) / (seeds - 1)
    image = seeds * ((by_part - mean[..., None]) ** 2).sum(-1) / max(1, parts - 1)
    rest = values - by_seed[..., None] - by_part[..., None, :] + mean[..., None, None]
    rest = (rest**2).sum((-2, -1)) / ((seeds - 1) * max(1, parts - 1))
    seed, added = np.maximum(seed, rest), np.maximum(image - rest, 0)
    fixed = np.maximum(added, resolution**2 * seeds * parts)
    total = np.maximum(np.maximum(seed + added, fixed), 1e-100)
    freedom = total**2 / np.maximum(seed**2 / (seeds - 1) + image**2 / max(1, parts - 1), 1e-9 * total**2)
    freedom = np.clip(freedom, seeds - 1, 2 * (seeds - 1))
    return np.sqrt(total / (seeds * parts)), freedom, 1 - fixed / total


def mean_interval(mean: float, values: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of a setting's mean score from its pseudo-values (S seeds, G parts)."""
    import numpy as np

    error, freedom, _ = (float(number) for number in crossed_error(np.asarray(values, float)))
    found = Difference(mean, math.nan, math.nan, math.nan, len(values), error, freedom).at_level(0.05)
    return found.low, found.high


def crossed_difference(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], mean: float, resolution: float | None = None
) -> Difference:
    """Return the difference of two settings from their pseudo-values (S seeds, G parts); ``mean`` is the difference.

    resolution: as in ``paired_difference``
    """
    import numpy as np

    values = np.asarray(first, float) - np.asarray(second, float)
    error, freedom, share = (float(number) for number in crossed_error(values, resolution or 0.0))
    return _student_test(mean, len(values), error, freedom, float(np.abs([first, second]).max()), share)


def _student_test(
    mean: float, count: int, error: float, freedom: float, largest: float, seed_share: float
) -> Difference:
    """Return the difference with p and interval; without them if it varies only by rounding."""
    from scipy import stats

    if error <= _ROUNDING * largest:
        return Difference(mean, math.nan, math.nan, math.nan, count)
    p_value = float(2 * stats.t.sf(abs(mean) / error, freedom))
    return Difference(mean, math.nan, math.nan, p_value, count, error, freedom, seed_share).at_level(0.05)


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def paired_difference(first: Sequence[float], second: Sequence[float], resolution: float | None = None) -> Difference:
    """Return first - second, paired by seed, so that variation common to both cancels.

    resolution: what one image is worth, 100 / n for a percentage of n images. The standard error is at least this, also
    if all seeds agree: they are scored on the same images.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    count = len(differences)
    if count < 2:
        return Difference(mean, math.nan, math.nan, math.nan, count)
    fixed = resolution or 0.0
    error = max(statistics.stdev(differences) / math.sqrt(count), fixed)
    share = 1 - (fixed / error) ** 2 if error else 1.0
    return _student_test(mean, count, error, count - 1, max(map(abs, [*first, *second])), share)
