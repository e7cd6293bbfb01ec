"""Paired differences against scipy."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from frugalvit.training.statistics import paired_difference, spread


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
    assert str(spread([1.0])) == "1.00" and spread([1.0, 3.0]).mean == 2
