"""Small statistics over repeated timings. A statistic of nothing is None, never zero."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def median(values: Sequence[float]) -> float | None:
    """Median, in the unit of the values."""
    return statistics.median(values) if values else None


def largest(values: Iterable[Number | None]) -> Number | None:
    """The largest of what was measured, in the unit of the values; None when nothing was."""
    return max((value for value in values if value is not None), default=None)


def mean_of_last(values: Sequence[float], count: int = 10) -> float | None:
    """Mean of the last `count` values (of all, when there are fewer), in the unit of the values."""
    last = values[-count:]
    return statistics.fmean(last) if last else None


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median of positive values, without unit: the noise of runs that should be equal.

    None for fewer than two values: one run says nothing about noise.
    """
    if len(values) < 2:
        return None
    return (max(values) - min(values)) / statistics.median(values)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval (low, high) of the mean of normally distributed values, in their unit: Student's t with the sample
    deviation. None for fewer than two values."""
    if len(values) < 2:
        return None
    half = t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return middle - half, middle + half


def t_975(degrees: int) -> float:
    """0.975 quantile of Student's t: tabulated up to 4 degrees of freedom, beyond that by the expansion in the normal
    quantile (Abramowitz & Stegun 1964, 26.7.5), good to 0.2 %."""
    if degrees <= len(T_975):
        return T_975[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


T_975 = (12.706, 4.303, 3.182, 2.776)
"""For 1 to 4 degrees of freedom."""
