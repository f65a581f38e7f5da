"""Arithmetic of time spans: sorted, disjoint (start, end) pairs, in seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as sorted, disjoint spans; empty ones are dropped."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def common(spans: list[Span], others: list[Span]) -> list[Span]:
    """Moments in both; each of the two is sorted and disjoint."""
    found: list[Span] = []
    for start, end in spans:
        first = max(0, bisect_right(others, (start, start)) - 1)
        for i in range(first, len(others)):
            if others[i][0] >= end:
                break
            found.append((max(start, others[i][0]), min(end, others[i][1])))
    return union(found)


def without(spans: list[Span], others: list[Span]) -> list[Span]:
    """Moments in `spans` but not in `others`; each of the two is sorted and disjoint."""
    left: list[Span] = []
    for start, end in spans:
        at = start
        for busy in common([(start, end)], others):
            left.append((at, busy[0]))
            at = busy[1]
        left.append((at, end))
    return union(left)


def seconds(spans: Iterable[Span]) -> float:
    """Their length; they are disjoint."""
    return sum(end - start for start, end in spans)
