from __future__ import annotations

import pytest
from hypothesis import strategies as st

from offbench.stats import mean_interval, mean_of_last, median, spread, t_975

seconds = st.floats(min_value=1e-3, max_value=1e3)


def test_nothing_has_no_statistic() -> None:
    assert median([]) is None
    assert mean_of_last([]) is None
    assert spread([]) is None
    assert spread([1.0]) is None
    assert mean_interval([1.0]) is None


def test_mean_of_last_drops_the_early_steps() -> None:
    assert mean_of_last([100.0] * 5 + [2.0] * 10) == 2.0
    assert mean_of_last([1.0, 3.0]) == 2.0


def test_spread_is_relative_to_the_median() -> None:
    assert spread([1.9, 2.0, 2.2]) == pytest.approx(0.15)
    assert spread([2.0, 2.0]) == 0.0


def test_the_interval_of_a_mean_is_students() -> None:
    # Five values of mean 10 and sample deviation 1.5811: 10 +- 2.776 x 1.5811 / sqrt(5).
    low, high = mean_interval([8.0, 9.0, 10.0, 11.0, 12.0]) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(8.037, abs=1e-3), pytest.approx(11.963, abs=1e-3))
    assert mean_interval([2.0, 2.0]) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (1000, 1.962)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_975(degrees) == pytest.approx(quantile, rel=2e-3)
