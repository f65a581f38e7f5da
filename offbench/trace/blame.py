"""Why the compute stream stood still: each instant of a gap is given to one cause.

Note [Which cause an instant is given to]
    The gap ends where its operation starts. What came last held it back, so the walk goes backwards from there:
    - The call that launched it returned within LAUNCH_S of its start: the host came last. All of the gap is `launch`,
      but `profiler` where that says it held the host up, and `host_wait` where that thread waited for the device.
    - Else an operation of another stream that ended within NEAR_S of its start, and after it was launched, is what it
      waited for (traces do not say so, but name the moment). The instants in which that one ran, and the few
      microseconds after it, are its own cause; what lies before its start is asked of it in the same way, and of the
      operation before it on its stream.
    - Else the instants before it was launched are the host's, too. After that, those in which a kernel of another
      stream ran are that kernel's cause, for it held the multiprocessors; a rest up to LAUNCH_S is launch cost, or
      `between` where everything was queued long before; a longer rest stays `unexplained`.
    - A small copy is served after bulk copies of the same way that run while it waits: those instants are
      `behind_bulk`.
    So where two things lasted at once, the instant belongs to the one on the way to the end of the gap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from offbench.trace.events import COLLECTIVES, Mark, Op, Parsed, Wait
from offbench.trace.spans import Span, common, seconds, union, without

Cause = Literal[
    "move_in",
    "slot",
    "tail",
    "update",
    "gather",
    "behind_bulk",
    "host_wait",
    "profiler",
    "launch",
    "between",
    "unexplained",
]

LAUNCH_S = 15e-6
"""From the return of a launch to the start of its kernel on an idle stream, at most; 3 to 12 us on an H200."""
NEAR_S = 100e-6
"""From the end of what a stream waits for to the start of what waited, at most; 4 to 13 us on one H200, to 65 us where
both of a host's two move state."""


class Piece(NamedTuple):
    """Part of a gap, seconds."""

    start: float
    end: float
    cause: Cause


class Blame:
    """Answers for the gaps of one stream, the compute stream, of one device."""

    def __init__(self, ops: Sequence[Op], stream: int, parsed: Parsed, small_bytes: int) -> None:
        """ops: all of the device, sorted by start; parsed: the trace they are from."""
        self._ops = ops
        self._stream = stream
        self._small_bytes = small_bytes
        self._before: list[int | None] = []
        """By operation: the one before it on its stream."""
        last: dict[int, int] = {}
        for i, op in enumerate(ops):
            self._before.append(last.get(op.stream))
            last[op.stream] = i
        self._by_end = sorted(range(len(ops)), key=lambda i: ops[i].end)
        self._ends = [ops[i].end for i in self._by_end]
        self._collective = _by_thread(mark for mark in parsed.marks if mark.name.startswith(COLLECTIVES))
        self._waits = _by_thread(parsed.waits)
        self._overhead = union(parsed.overhead)
        beside = [op for op in ops if op.stream != stream and op.kind == "kernel"]
        causes: tuple[Cause, ...] = ("update", "gather")
        self._beside = {
            cause: union((op.start, op.end) for op in beside if self._cause(op, False) == cause) for cause in causes
        }
        bulk = [op for op in ops if op.nbytes >= small_bytes]
        self._bulk = {way: union((op.start, op.end) for op in bulk if op.way == way) for way in ("in", "out")}

    def pieces(self, number: int, start: float) -> Iterator[Piece]:
        """The gap from `start` to the start of operation `number`, cut into pieces that lie end to end, last first."""
        at, arriving, through = self._ops[number].start, number, False
        while at > start:
            op, before = self._ops[arriving], self._before[arriving]
            idle = max(start, min(at, self._ops[before].end)) if before is not None else start
            through = through or op.way == "in"
            awaited = self._awaited(op, idle)
            if awaited is not None:
                cause = self._cause(self._ops[awaited], through)
                since = max(start, self._ops[awaited].start)
                yield Piece(since, at, cause)
                at, arriving = since, awaited
                continue
            yield from self._alone(op, idle, at)
            at = idle
            if at > start and before is not None:  # the one before it on its stream ran until here
                since = max(start, min(at, self._ops[before].start))
                yield Piece(since, at, self._cause(self._ops[before], through))
                at, arriving = since, before

    def _awaited(self, op: Op, idle: float) -> int | None:
        """The operation of another stream that `op`, which could have run since `idle`, waited for."""
        if op.launched is None or op.start - op.launched <= LAUNCH_S:
            return None
        least = max(idle, op.launched, op.start - NEAR_S)
        for place in range(bisect_right(self._ends, op.start) - 1, -1, -1):
            other = self._ops[self._by_end[place]]
            if other.end <= least:
                return None
            served_first = self._is_small(op) and op.way == other.way
            if other.stream != op.stream and other.start < op.start and not served_first:
                return self._by_end[place]
        return None

    def _alone(self, op: Op, start: float, end: float) -> Iterator[Piece]:
        """A gap in front of an operation that waited for no other."""
        if end <= start:
            return
        if op.launched is None:
            yield Piece(start, end, "unexplained")
            return
        if op.start - op.launched <= LAUNCH_S:
            yield from self._unqueued(op, start, end)
            return
        ready = min(max(start, op.launched), end)
        yield from self._unqueued(op, start, ready)
        left: list[Span] = [(ready, end)]
        holders: list[tuple[Cause, list[Span]]] = list(self._beside.items())
        if self._is_small(op) and op.way is not None:
            holders.insert(0, ("behind_bulk", self._bulk[op.way]))
        for cause, spans in holders:
            held = common(left, spans)
            left = without(left, held)
            yield from (Piece(*span, cause) for span in held)
        short: Cause = "launch" if ready > start else "between"
        rest: Cause = short if seconds(left) <= LAUNCH_S else "unexplained"
        yield from (Piece(*span, rest) for span in left)

    def _unqueued(self, op: Op, start: float, end: float) -> Iterator[Piece]:
        """Time in which the host had not launched `op`: held up by the profiler, waiting for the device, or late."""
        left = union([(start, end)])
        holders: list[tuple[Cause, list[Span]]] = [
            ("profiler", self._overhead),
            ("host_wait", self._waits.get(op.thread or "", [])),
        ]
        for cause, spans in holders:
            held = common(left, spans)
            left = without(left, held)
            yield from (Piece(*span, cause) for span in held)
        yield from (Piece(*span, "launch") for span in left)

    def _cause(self, op: Op, through_move_in: bool) -> Cause:
        """What it means that a stream waits for `op`; through_move_in: a move-in is among what waits for it."""
        if op.way == "in":
            return "move_in"
        if op.way == "out":
            return "slot" if through_move_in else "tail"
        spans = self._collective.get(op.thread or "", [])
        place = bisect_left(spans, (op.launch, float("inf"))) - 1 if op.launch is not None else -1
        marked = place >= 0 and op.launch is not None and op.launch < spans[place][1]
        return "gather" if marked or "nccl" in op.name.lower() else "update"

    def _is_small(self, op: Op) -> bool:
        return op.way is not None and op.nbytes < self._small_bytes


def _by_thread(stretches: Iterable[Mark | Wait]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for stretch in stretches:
        found[stretch.thread].append((stretch.start, stretch.end))
    return {thread: union(spans) for thread, spans in found.items()}
