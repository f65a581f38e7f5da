"""What a torch.profiler trace says about the device and the calls that made the host wait.

Events are those of the Chrome trace format as kineto writes them: complete ones (`ph` X) with `ts` and `dur` in
microseconds; device work has the category kernel, gpu_memcpy or gpu_memset, its device and stream in `args`, and the
`correlation` of the runtime or driver call that launched it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Event = Mapping[str, Any]
Way = Literal["in", "out"]
Kind = Literal["kernel", "copy", "memset"]

DEVICE: dict[str, Kind] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}
CALLS = ("cuda_runtime", "cuda_driver")
WAITS = re.compile(r"(cuda|cu|hip)([A-Z]\w*Synchronize|Memcpy(?!\w*Async))")
"""Calls that return only when the device has come so far."""
STEP = re.compile(r"ProfilerStep#\d+")
OPTIMIZER = "Optimizer.step#"
"""torch's own mark around every optimizer's step()."""
STAMP = "offbench::"
"""Marks of `offbench run --profile` around the stamps it sets on the compute stream; `begin`, a phase's end, `end`."""
COLLECTIVES = ("FSDP::all_gather", "FSDP::post_backward_reduce", "nccl:")
"""Marks of FSDP2 and c10d around collectives and the copies into and out of their buffers."""


class Op(NamedTuple):
    """A kernel, copy or memset on the device. Times are seconds since the trace's first event."""

    start: float
    end: float
    device: int
    stream: int
    kind: Kind
    way: Way | None
    """in: host to device; out: device to host; None: neither."""
    nbytes: int
    launch: float | None
    """When the host began the call that queued it; None: the trace does not hold that call."""
    launched: float | None = None
    """When that call returned."""
    thread: str | None = None
    """Which host thread made it."""
    name: str = ""

    @property
    def queued(self) -> float:
        """When the host launched it; where the trace does not say, when it ran."""
        return self.start if self.launch is None else self.launch


class Wait(NamedTuple):
    """A call in which a host thread waited for the device."""

    name: str
    start: float
    end: float
    thread: str


class Mark(NamedTuple):
    """A named stretch of a host thread, as `record_function` sets it."""

    start: float
    end: float
    thread: str
    name: str


class Parsed(NamedTuple):
    """The parts of a trace that count here. Ops and marks are sorted by start."""

    ops: list[Op]
    waits: list[Wait]
    steps: int | None
    """Steps the profiler was told of; None: it was not."""
    marks: list[Mark]
    """Of steps, stamps, optimizers and collectives."""
    overhead: list[tuple[float, float]]
    """When the profiler itself held a host thread up, as far as it says; sorted."""

    @property
    def since(self) -> float:
        """When the first step that the profiler was told of began; it was told of none: the trace's beginning."""
        return min((mark.start for mark in self.marks if STEP.fullmatch(mark.name)), default=float("-inf"))


def parse(events: Sequence[Event]) -> Parsed:
    """Pick out what counts. Raises ValueError, with the event's number, for one without the fields of its category."""
    complete = [(i, e) for i, e in enumerate(events) if isinstance(e, Mapping) and e.get("ph") == "X"]
    calls = [(i, e) for i, e in complete if e.get("cat") in CALLS]
    device = [(i, e) for i, e in complete if e.get("cat") in DEVICE]
    first = min((_time(i, e)[0] for i, e in (*calls, *device)), default=0.0)
    launches: dict[int, tuple[float, float, str]] = {}
    waits = []
    for i, event in calls:
        start, end = _time(i, event)
        correlation = _args(event).get("correlation")
        if isinstance(correlation, int):
            launches.setdefault(correlation, ((start - first) / 1e6, (end - first) / 1e6, str(event.get("tid"))))
        if WAITS.match(str(event.get("name"))):
            waits.append(Wait(str(event["name"]), (start - first) / 1e6, (end - first) / 1e6, str(event.get("tid"))))
    ops = sorted((_op(i, event, first, launches) for i, event in device), key=lambda op: op[:2])
    marked = [(i, e) for i, e in complete if e.get("cat") == "user_annotation" and _counts(e)]
    marks = sorted(_mark(i, e, first) for i, e in marked)
    steps = {mark.name for mark in marks if STEP.fullmatch(mark.name)}
    spans = [_time(i, event) for i, event in complete if event.get("cat") == "overhead"]
    overhead = sorted(((start - first) / 1e6, (end - first) / 1e6) for start, end in spans)
    return Parsed(ops, waits, len(steps) or None, marks, overhead)


def _op(number: int, event: Event, first: float, launches: Mapping[int, tuple[float, float, str]]) -> Op:
    start, end = _time(number, event)
    args, kind, name = _args(event), DEVICE[event["cat"]], str(event.get("name"))
    device, stream, nbytes = args.get("device"), args.get("stream"), args.get("bytes", 0)
    if not isinstance(device, int) or not isinstance(stream, int) or not isinstance(nbytes, int):
        raise ValueError(f"event {number}, a {kind}, does not say its device, stream or bytes")
    way: Way | None = None
    if kind == "copy":
        way = "in" if "HtoD" in name else "out" if "DtoH" in name else None
    launch, launched, thread = launches.get(args.get("correlation", -1), (None, None, None))
    begin, done = (start - first) / 1e6, (end - first) / 1e6
    return Op(begin, done, device, stream, kind, way, nbytes, launch, launched, thread, name)


def _counts(event: Event) -> bool:
    name = str(event.get("name"))
    return STEP.fullmatch(name) is not None or name.startswith((OPTIMIZER, STAMP, *COLLECTIVES))


def _mark(number: int, event: Event, first: float) -> Mark:
    start, end = _time(number, event)
    return Mark((start - first) / 1e6, (end - first) / 1e6, str(event.get("tid")), str(event["name"]))


def _args(event: Event) -> Event:
    args = event.get("args")
    return args if isinstance(args, Mapping) else {}


def _time(number: int, event: Event) -> tuple[float, float]:
    start, length = event.get("ts"), event.get("dur")
    if (
        isinstance(start, int | float)
        and isinstance(length, int | float)
        and math.isfinite(start + length)
        and length >= 0
    ):
        return start, start + length
    raise ValueError(f"event {number}, a {event['cat']}, has no time: ts {start}, dur {length}")
