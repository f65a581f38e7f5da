"""The figures of one trace, as sums over its device work.

Note [When a small copy waits]
    A copy could start when the host had launched it and the work before it on its stream had ended; from then to its
    start it waited. Launch cost, microseconds, is part of that. `behind bulk` is the part during which bulk copies of
    the same way ran on the same device: the copy engine served those. A stream that waits for an event of another
    stream looks the same: a trace does not say what a stream waits for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offbench.trace.events import Event, Op, Parsed, Wait, Way, parse
from offbench.trace.spans import Span, common, seconds, union, without

SMALL_BYTES = 4 << 20
"""Copies below it are small. FSDP2's tables reach 1.2 MB (one group of 16 experts); bulk copies are longer by far."""


@dataclass(frozen=True)
class StreamUse:
    """What one stream did. Its work may overlap a little; busy_s counts each moment once."""

    device: int
    stream: int
    kernels: int
    copies: int
    """Of any way, on the device included."""
    memsets: int
    kernel_s: float
    copy_s: float
    busy_s: float


@dataclass(frozen=True)
class Bulk:
    """Large copies of one way."""

    count: int
    nbytes: int
    busy_s: float
    """Time during which at least one was under way, summed over devices."""


@dataclass(frozen=True)
class Small:
    """Small copies of one way. Null: nothing to measure, or the trace does not hold the launches."""

    count: int
    nbytes: int
    unlaunched: int
    """Copies whose launch is not in the trace: how long they waited is not known, and not in the figures below."""
    wait_s: float | None
    """All waits, summed."""
    longest_wait_s: float | None
    behind_bulk_s: float | None
    longest_behind_bulk_s: float | None


@dataclass(frozen=True)
class HostWaits:
    """Calls of one kind in which the host waited for the device; the profiler's own at its end included."""

    call: str
    count: int
    total_s: float
    longest_s: float


@dataclass(frozen=True)
class TraceSummary:
    """Where the time went. Seconds and bytes; null is unknown."""

    span_s: float
    """From the start of the first to the end of the last device operation."""
    steps: int | None
    marked: bool
    """Whether the profiler was told of steps. All figures are of what those launched, or else of the whole trace."""
    small_bytes: int
    small_h2d: float | None
    """Small host-to-device copies a step."""
    small_d2h: float | None
    longest_small_wait_s: float | None
    """Of either way."""
    idle_while_small_waits_s: float | None
    """Time with a small copy waiting and no kernel running on its device, summed over devices."""
    bulk_in: Bulk
    bulk_out: Bulk
    small_in: Small
    small_out: Small
    streams: list[StreamUse]
    """By device and stream."""
    host_waits: list[HostWaits]
    """By total, longest first."""


def summarize(
    events: Sequence[Event] | Parsed, steps: int | None = None, small_bytes: int = SMALL_BYTES
) -> TraceSummary:
    """Sum up the events of a Chrome trace (the list under `traceEvents`), or what `parse` made of them.

    What was launched before the first step that the profiler was told of is left out.
    steps: how many training steps it holds; by default what the profiler was told (`prof.step()`), else unknown.
    Raises ValueError when it holds no device work, or an event lacks the fields of its category.
    """
    parsed = events if isinstance(events, Parsed) else parse(events)
    since = parsed.since
    ops = [op for op in parsed.ops if op.queued >= since]
    waits = [wait for wait in parsed.waits if wait.start >= since]
    if not ops:
        raise ValueError("no kernel or copy of a GPU in it; profile with ProfilerActivity.CUDA")
    count = steps or parsed.steps
    waited = {way: [w for w in _waits(parsed.ops, way, small_bytes) if w[0].queued >= since] for way in ("in", "out")}
    bulk = {way: _by_device(_bulk_ops(parsed.ops, way, small_bytes)) for way in ("in", "out")}
    small = {way: _small(ops, way, small_bytes, waited[way], bulk[way]) for way in ("in", "out")}
    longest = [part.longest_wait_s for part in small.values() if part.longest_wait_s is not None]
    return TraceSummary(
        span_s=max(op.end for op in ops) - ops[0].start,
        steps=count,
        marked=parsed.steps is not None,
        small_bytes=small_bytes,
        small_h2d=small["in"].count / count if count else None,
        small_d2h=small["out"].count / count if count else None,
        longest_small_wait_s=max(longest, default=None),
        idle_while_small_waits_s=_idle(parsed.ops, [*waited["in"], *waited["out"]]) if longest else None,
        bulk_in=_bulk(ops, "in", small_bytes),
        bulk_out=_bulk(ops, "out", small_bytes),
        small_in=small["in"],
        small_out=small["out"],
        streams=_streams(ops),
        host_waits=_host_waits(waits),
    )


def _waits(ops: Sequence[Op], way: Way, small_bytes: int) -> list[tuple[Op, Span]]:
    """Small copies whose launch is known, and from when to when each waited."""
    ended: dict[tuple[int, int], float] = {}
    found = []
    for op in ops:
        before = ended.get((op.device, op.stream), -math.inf)
        if op.way == way and op.nbytes < small_bytes and op.launch is not None:
            found.append((op, (min(max(op.launch, before), op.start), op.start)))
        ended[op.device, op.stream] = max(before, op.end)
    return found


def _small(
    ops: Sequence[Op],
    way: Way,
    small_bytes: int,
    waited: Sequence[tuple[Op, Span]],
    bulk: Mapping[int, list[Span]],
) -> Small:
    """bulk: when bulk copies of that way ran, by device."""
    copies = [op for op in ops if op.way == way and op.nbytes < small_bytes]
    waits = [end - start for _, (start, end) in waited]
    behind = [seconds(common([span], bulk.get(op.device, []))) for op, span in waited]
    return Small(
        count=len(copies),
        nbytes=sum(op.nbytes for op in copies),
        unlaunched=len(copies) - len(waited),
        wait_s=sum(waits) if waits else None,
        longest_wait_s=max(waits, default=None),
        behind_bulk_s=sum(behind) if behind else None,
        longest_behind_bulk_s=max(behind, default=None),
    )


def _bulk_ops(ops: Sequence[Op], way: Way, small_bytes: int) -> list[Op]:
    return [op for op in ops if op.way == way and op.nbytes >= small_bytes]


def _bulk(ops: Sequence[Op], way: Way, small_bytes: int) -> Bulk:
    copies = _bulk_ops(ops, way, small_bytes)
    busy = sum(seconds(spans) for spans in _by_device(copies).values())
    return Bulk(len(copies), sum(op.nbytes for op in copies), busy)


def _by_device(ops: Iterable[Op]) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = defaultdict(list)
    for op in ops:
        spans[op.device].append((op.start, op.end))
    return {device: union(found) for device, found in spans.items()}


def _idle(ops: Sequence[Op], waited: Sequence[tuple[Op, Span]]) -> float:
    kernels = _by_device(op for op in ops if op.kind == "kernel")
    waiting: dict[int, list[Span]] = defaultdict(list)
    for op, span in waited:
        waiting[op.device].append(span)
    return sum(seconds(without(union(spans), kernels.get(device, []))) for device, spans in waiting.items())


def _streams(ops: Sequence[Op]) -> list[StreamUse]:
    of: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for op in ops:
        of[op.device, op.stream].append(op)
    return [_stream(device, stream, of[device, stream]) for device, stream in sorted(of)]


def _stream(device: int, stream: int, ops: Sequence[Op]) -> StreamUse:
    kinds = [op.kind for op in ops]

    def busy(*chosen: str) -> float:
        return seconds(union((op.start, op.end) for op in ops if op.kind in chosen))

    return StreamUse(
        device=device,
        stream=stream,
        kernels=kinds.count("kernel"),
        copies=kinds.count("copy"),
        memsets=kinds.count("memset"),
        kernel_s=busy("kernel"),
        copy_s=busy("copy"),
        busy_s=busy("kernel", "copy", "memset"),
    )


def _host_waits(waits: Sequence[Wait]) -> list[HostWaits]:
    of: dict[str, list[float]] = defaultdict(list)
    for wait in waits:
        of[wait.name].append(wait.end - wait.start)
    found = [HostWaits(call, len(times), sum(times), max(times)) for call, times in of.items()]
    return sorted(found, key=lambda kind: (-kind.total_s, kind.call))
