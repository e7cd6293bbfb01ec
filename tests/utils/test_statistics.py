"""Paired differences against scipy."""

import math
import random

import pytest
from scipy import stats

from frugalvit.utils.statistics import paired_difference, spread


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


def test_the_interval_includes_rounding() -> None:
    """Two counts of 100 images each round with a variance of 1 / 12."""
    ours = paired_difference([50.0, 51.0, 52.0], [49.0, 50.0, 51.0], resolution=1.0)
    half = stats.t.ppf(0.975, 2) * math.sqrt(2 / 12 / 3)
    assert (ours.low, ours.high) == pytest.approx((1 - half, 1 + half))
    varied = [39.6, 41.0, 40.2, 38.9], [39.1, 40.1, 40.0, 38.0]
    assert paired_difference(*varied, resolution=0.1) == paired_difference(*varied)


@pytest.mark.parametrize("seeds", [2, 3])
def test_false_positives_are_rare(seeds: int) -> None:
    """Equal settings on 50 images: "clear" in at most one of twenty comparisons."""
    chance = random.Random(0)

    def scores() -> list[float]:
        return [2.0 * (40 + sum(chance.random() < 0.5 for _ in range(5))) for _ in range(seeds)]

    positives = sum(paired_difference(scores(), scores(), resolution=2.0).clear for _ in range(1000))
    assert positives < 60
