"""Small statistics over repeated timings. A statistic of nothing is None, never zero."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
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


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval (low, high) of `statistic`, in its unit (Efron & Tibshirani 1993, chapter 13).

    The same values and seed give the same interval. None for fewer than two values.
    """
    if len(values) < 2:
        return None
    draw = random.Random(seed)
    found = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(resamples))
    skipped = (1 - confidence) / 2
    low = round(skipped * (resamples - 1))
    return found[low], found[resamples - 1 - low]
