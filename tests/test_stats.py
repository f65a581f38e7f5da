from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbench.stats import bootstrap_interval, mean_of_last, median, spread

seconds = st.floats(min_value=1e-3, max_value=1e3)


def test_nothing_has_no_statistic() -> None:
    assert median([]) is None
    assert mean_of_last([]) is None
    assert spread([]) is None
    assert spread([1.0]) is None
    assert bootstrap_interval([1.0]) is None


def test_mean_of_last_drops_the_early_steps() -> None:
    assert mean_of_last([100.0] * 5 + [2.0] * 10) == 2.0
    assert mean_of_last([1.0, 3.0]) == 2.0


def test_spread_is_relative_to_the_median() -> None:
    assert spread([1.9, 2.0, 2.2]) == pytest.approx(0.15)
    assert spread([2.0, 2.0]) == 0.0


def test_bootstrap_interval_is_reproducible_and_narrows_with_confidence() -> None:
    values = [float(value) for value in range(1, 31)]
    wide = bootstrap_interval(values, confidence=0.99)
    narrow = bootstrap_interval(values, confidence=0.5)
    assert wide == bootstrap_interval(values, confidence=0.99)
    assert wide is not None
    assert narrow is not None
    assert wide[0] < narrow[0] <= statistics.median(values) <= narrow[1] < wide[1]


def test_bootstrap_interval_of_the_mean_is_near_the_normal_one() -> None:
    values = [10.0 + 0.1 * (i % 7) for i in range(140)]
    low, high = bootstrap_interval(values, statistics.fmean) or (0.0, 0.0)
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)


@given(st.lists(seconds, min_size=2, max_size=20))
def test_statistics_stay_within_the_values(values: list[float]) -> None:
    low, high = bootstrap_interval(values, resamples=50) or (0.0, 0.0)
    assert min(values) <= low <= high <= max(values)
    assert (spread(values) or 0.0) >= 0.0
    assert min(values) <= (median(values) or 0.0) <= max(values)
