"""Happens-before: proves from (stream, reads, writes, waits) alone that no two conflicting operations can overlap.

Vector clocks, one entry per stream (Lamport 1978; Mattern 1989). An operation happens before another when the later
one's clock has reached the earlier one's number. Two operations conflict when they touch the same bytes and at least
one of them writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from offbench.offload.streams import Access

Clock = dict[str, int]


@dataclass(frozen=True)
class _Done:
    stream: str
    number: int
    label: str
    access: Access
    writes: bool


class HappensBefore:
    """Feed it every operation, record and wait in program order; `violations` lists what the waits do not order."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        self._history: dict[str, list[_Done]] = defaultdict(list)

    def operation(self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """An operation queued on `stream`."""
        clock = self._clocks[stream]
        clock[stream] = number = clock.get(stream, 0) + 1
        for access, writing in [(a, False) for a in reads] + [(a, True) for a in writes]:
            past = self._history[access.space]
            for done in past:
                ordered = clock.get(done.stream, 0) >= done.number
                if not ordered and (writing or done.writes) and access.overlaps(done.access):
                    kind = "writes" if writing else "reads"
                    self.violations.append(
                        f"{label} on {stream} {kind} {access} while {done.label} on {done.stream} may still use it"
                    )
            # A write that everything earlier in its range is ordered before makes that history irrelevant.
            if writing:
                past[:] = [d for d in past if not _covers(access, d.access)]
            past.append(_Done(stream, number, label, access, writing))

    def record(self, stream: str) -> Clock:
        """The clock a waiter on this point of `stream` inherits."""
        return dict(self._clocks[stream])

    def wait(self, stream: str, clock: Clock) -> None:
        """`stream` waits for a recorded point."""
        mine = self._clocks[stream]
        for other, number in clock.items():
            mine[other] = max(mine.get(other, 0), number)

    def forget(self, access: Access) -> None:
        """The memory was given back: what is allocated there next is another piece of memory."""
        past = self._history[access.space]
        past[:] = [d for d in past if not _covers(access, d.access)]


def _covers(outer: Access, inner: Access) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
