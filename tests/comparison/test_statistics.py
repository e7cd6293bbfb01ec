"""Paired differences against scipy."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from frugalvit.comparison.statistics import crossed_error, holm_levels, paired_difference, spread
from frugalvit.utils.intervals import jackknife_interval, pseudo_values


def test_paired_difference_equals_scipy() -> None:
    first, second = [39.6, 41.0, 40.2, 38.9], [39.1, 40.1, 40.0, 38.0]
    ours, theirs = paired_difference(first, second), stats.ttest_rel(first, second)
    interval = theirs.confidence_interval(0.95)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high))
    assert ours.clear == (ours.low > 0)


def test_one_seed_has_no_interval() -> None:
    ours = paired_difference([2.0], [1.0])
    assert ours.mean == 1 and math.isnan(ours.low) and not ours.clear and "one seed" in str(ours)


def test_equal_runs() -> None:
    ours = paired_difference([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert ours.mean == 0 and not ours.clear
    assert str(ours) == "+0.00 (the same at every seed: no interval)"
    assert str(spread([1.0])) == "1.00" and spread([1.0, 3.0]).mean == 2


@pytest.mark.parametrize("second", [[80.0, 78.0], [80.1, 78.1]])  # the second only varies in its last bits
def test_equal_differences_have_no_interval(second: list[float]) -> None:
    ours = paired_difference([81.0, 79.0], second)
    assert not ours.clear and math.isnan(ours.p_value) and "no interval" in str(ours)
    few, many = (paired_difference([81.0, 79.0], second, 100 / images) for images in (100, 10_000))
    assert not few.clear and few.low < 0 < few.high
    assert many.clear and many.p_value > 0


def test_the_standard_error_is_at_least_one_image() -> None:
    ours = paired_difference([50.0, 51.0, 52.0], [49.0, 50.0, 51.0], resolution=1.0)
    half = stats.t.ppf(0.975, 2)
    assert (ours.low, ours.high) == pytest.approx((1 - half, 1 + half))
    varied = [39.6, 41.0, 40.2, 38.9], [39.1, 40.1, 40.0, 38.0]
    assert paired_difference(*varied, resolution=0.1).p_value == paired_difference(*varied).p_value


@pytest.mark.parametrize("seeds", [2, 3])
def test_false_positives_are_rare(seeds: int) -> None:
    """Equal settings on 50 images: "clear" in at most one of twenty comparisons."""
    chance = random.Random(0)

    def scores() -> list[float]:
        return [2.0 * (40 + sum(chance.random() < 0.5 for _ in range(5))) for _ in range(seeds)]

    positives = sum(paired_difference(scores(), scores(), resolution=2.0).clear for _ in range(1000))
    assert positives < 60


REGIMES = {
    "nothing but noise": (0.0, 0.0, 1.0),
    "images differ": (1.0, 0.0, 1.0),
    "seeds differ": (0.0, 0.3, 0.5),
    "both differ": (0.5, 0.2, 1.0),
    "all seeds are right on the same images": (2.0, 0.0, 0.1),
}
"""Deviation of what a setting adds to an image and to a seed, and scale of the noise, in logits."""


def simulate_runs(seeds: int, images: int, regime: str, repeats: int) -> np.ndarray:
    """Return whether each run is right on each image, for two settings that are equally good: (repeats, 2, S, n)."""
    by_image, by_seed, noise = REGIMES[regime]
    random = np.random.default_rng(0)
    logits = 0.4 + random.normal(0, 2, (repeats, 1, 1, images)) + random.normal(0, by_image, (repeats, 2, 1, images))
    logits = (
        logits + random.normal(0, by_seed, (repeats, 2, seeds, 1)) + random.normal(0, by_seed, (repeats, 1, seeds, 1))
    )
    return logits + random.logistic(0, noise, (repeats, 2, seeds, images)) > 0


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("images", [6, 20, 60])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_equally_good_settings_rarely_differ(seeds: int, images: int, regime: str) -> None:
    """At most 5 % of the comparisons call a difference; 6.5 % would be three deviations above that."""
    repeats = 2000
    right = simulate_runs(seeds, images, regime, repeats)
    parts = 100 * right.reshape(repeats, 2, seeds, -1, min(images, 20)).mean(3)
    differences = parts[:, 0] - parts[:, 1]
    error, freedom, _ = crossed_error(differences, 100 / images)
    called = 2 * stats.t.sf(np.abs(differences.mean((1, 2))) / error, freedom) < 0.05
    assert called.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_large_difference_is_found(seeds: int) -> None:
    """Ten points between two settings on 400 images show in most comparisons, so the test above is not empty."""
    random = np.random.default_rng(0)
    right = random.random((500, 2, seeds, 20, 20)) < np.array([0.8, 0.6]).reshape(2, 1, 1, 1)
    differences = np.diff(100 * right.mean(-1), axis=1)[:, 0]
    error, freedom, _ = crossed_error(differences)
    called = 2 * stats.t.sf(np.abs(differences.mean((1, 2))) / error, freedom) < 0.05
    assert called.mean() > 0.9


def test_crossed_error_equals_the_textbook() -> None:
    """Without limits it is the two-way analysis of variance with random rows and columns."""
    random = np.random.default_rng(3)
    values = random.normal(size=(4, 6)) + 2 * random.normal(size=(4, 1)) + 2 * random.normal(size=(1, 6))
    mean, rows, columns = values.mean(), values.mean(1), values.mean(0)
    seed = sum(6 * (row - mean) ** 2 for row in rows) / 3
    image = sum(4 * (column - mean) ** 2 for column in columns) / 5
    rest = sum((values[s, i] - rows[s] - columns[i] + mean) ** 2 for s in range(4) for i in range(6)) / 15
    error, _, share = crossed_error(values)
    assert error == pytest.approx(math.sqrt((seed + image - rest) / 24))
    assert share == pytest.approx(seed / (seed + image - rest))


def test_holm_levels_agree_with_holm() -> None:
    assert holm_levels([0.01, 0.04, 0.02]) == pytest.approx([0.05 / 3, 0.05, 0.05 / 2])  # all are rejected
    assert holm_levels([0.03, 0.01, 0.04]) == pytest.approx([0.05 / 2, 0.05 / 3, 0.05 / 2])  # 0.03 fails, so 0.04 does
    assert holm_levels([math.nan, 0.04]) == pytest.approx([0.025, 0.025])
    assert holm_levels([0.04]) == [0.05]


def test_pseudo_values_of_a_mean_are_its_parts() -> None:
    parts = [1.0, 4.0, 7.0]
    without = [(sum(parts) - part) / 2 for part in parts]
    assert pseudo_values(4.0, without) == pytest.approx(parts)
    low, high = jackknife_interval(4.0, parts)
    theirs = stats.t.interval(0.95, 2, 4.0, stats.sem(parts))
    assert (low, high) == pytest.approx((max(0.0, theirs[0]), theirs[1]))
