"""Keep copies in flight for a while and count what arrived: the inner loop of the measurement ladder.

Each direction has a few pieces queued at any time, so that the link never idles, and the host notes when each piece
has arrived. Only whole gaps between arrivals inside the window count: bytes after the first arrival up to the last,
over the time between the two. Clocks are the host's monotonic one, which all processes of a host share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

Way = Literal["in", "out"]
Arrivals = dict[Way, list[float]]
"""Per direction the times, host clock, at which pieces arrived."""

IN_FLIGHT = 3
"""Pieces queued per direction: enough to cover a late look of the host at 10 ms a piece."""


class Copier(Protocol):
    """Copies pieces of equal size, each direction in order, without waiting."""

    piece_bytes: int

    def submit(self, way: Way) -> Any:
        """Queue one piece; returns its ticket."""

    def arrived(self, ticket: Any) -> bool:
        """Whether that piece has arrived; does not wait."""


def copy_for(
    copier: Copier, ways: Sequence[Way], end: float, clock: Callable[[], float], halfway: Callable[[], None]
) -> Arrivals:
    """Copy in the given directions at once until the clock reaches `end`; then let what is queued arrive.

    `halfway` is called once, under load, at half of the time. Returns when nothing is in flight.
    """
    queued: dict[Way, deque[Any]] = {way: deque() for way in ways}
    arrivals: Arrivals = {way: [] for way in ways}
    middle: float | None = (clock() + end) / 2
    while (now := clock()) < end:
        for way in ways:
            _collect(copier, queued[way], arrivals[way], clock)
            while len(queued[way]) < IN_FLIGHT:
                queued[way].append(copier.submit(way))
        if middle is not None and now >= middle:
            middle = None
            halfway()
    while any(queued.values()):
        for way in ways:
            _collect(copier, queued[way], arrivals[way], clock)
    return arrivals


def copy_bytes(
    copier: Copier, ways: Sequence[Way], nbytes: int, clock: Callable[[], float], halfway: Callable[[], None]
) -> Arrivals:
    """Copy at least `nbytes`, in whole pieces, in each direction at once; `halfway` is called once under load."""
    pieces = -(-nbytes // copier.piece_bytes)
    queued: dict[Way, deque[Any]] = {way: deque() for way in ways}
    sent = dict.fromkeys(ways, 0)
    arrivals: Arrivals = {way: [] for way in ways}
    looked = False
    while any(len(times) < pieces for times in arrivals.values()):
        for way in ways:
            _collect(copier, queued[way], arrivals[way], clock)
            while len(queued[way]) < IN_FLIGHT and sent[way] < pieces:
                queued[way].append(copier.submit(way))
                sent[way] += 1
        if not looked and min(map(len, arrivals.values())) * 2 >= pieces:
            looked = True
            halfway()
    return arrivals


def _collect(copier: Copier, queue: deque[Any], times: list[float], clock: Callable[[], float]) -> None:
    while queue and copier.arrived(queue[0]):
        queue.popleft()
        times.append(clock())


def bytes_between(times: Sequence[float], piece_bytes: int, start: float, end: float) -> float:
    """Bytes that crossed between two moments, from the slope between the first and the last arrival inside.

    The host looks now and then: arrivals of one look share a time, and a late look is made up for by the next. With
    fewer than two distinct arrivals the whole pieces count.
    """
    inside = [at for at in times if start <= at <= end]
    if len(inside) < 2 or inside[-1] == inside[0]:
        return float(len(inside) * piece_bytes)
    return (len(inside) - 1) * piece_bytes / (inside[-1] - inside[0]) * (end - start)
