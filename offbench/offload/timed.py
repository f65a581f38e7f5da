"""Streams that only keep time: a device whose copies and updates take as long as rates say, and move nothing.

An engine on them queues what it queues on a GPU, so when each copy runs follows from its own waits and memory, not
from a model of them. Memory is made and never touched, so state of any size costs address space alone. Calls of the
host take no time. Copies of both directions share a link (`Links.now`), and nothing else shares anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offbench.offload.copies import Copier
from offbench.offload.streams import Access, Event, Stream, Why
from offbench.planner.inputs import Links

DIRECTIONS = ("in", "out")
"""Streams whose operations are copies, measured in bytes; those of all others in seconds."""
NONE_LEFT = 1e-9
"""Of an operation: this share of it is nothing."""


@dataclass(eq=False)
class TimedOperation:
    """One operation of a stream, or, with no work, a point of it."""

    stream: str
    work: float
    """Bytes of a copy, seconds of anything else."""
    after: list[TimedOperation]
    """What must have ended before it begins, beside the one before it."""
    left: float = 0.0
    ended: float | None = None


@dataclass
class TimedEvent:
    """A point of a timed stream; None: its beginning."""

    operation: TimedOperation | None
    device: TimedStreams = field(repr=False)

    def synchronize(self) -> None:
        """Let time pass until it has."""
        if self.operation is not None:
            self.device.run_until(self.operation)

    def query(self) -> bool:
        """Whether the point has passed."""
        return self.operation is None or self.operation.ended is not None


class TimedStream:
    """A FIFO of operations."""

    def __init__(self, name: str, device: TimedStreams) -> None:
        self.name = name
        self.queue: list[TimedOperation] = []
        self.done = 0
        """Operations that have ended."""
        self._device = device
        self._waits: list[TimedOperation] = []

    def run(self, do: Callable[[], None], reads: Sequence[Access] = (), writes: Sequence[Access] = ()) -> None:
        """Queue what `do` asks for (`TimedCopier`, `TimedStreams.work`)."""
        self._device.work = 0.0
        do()
        self.push(self._device.work)

    def push(self, work: float) -> TimedOperation:
        """Queue an operation of so much work."""
        made = TimedOperation(self.name, work, self._waits, work)
        self._waits = []
        self.queue.append(made)
        return made

    def record(self) -> TimedEvent:
        """Mark the current end of the queue."""
        if self._waits:
            self.push(0.0)
        return TimedEvent(self.queue[-1] if self.queue else None, self._device)

    def wait(self, event: Event, why: Why) -> None:
        """Hold back everything queued from now on until `event` has passed."""
        assert isinstance(event, TimedEvent)
        if event.operation is not None:
            self._waits.append(event.operation)

    @property
    def next(self) -> TimedOperation | None:
        """The operation that runs, if what it waits for has ended."""
        if self.done == len(self.queue) or any(one.ended is None for one in self.queue[self.done].after):
            return None
        return self.queue[self.done]


class TimedStreams:
    """The streams of such a device, as an engine asks for them."""

    def __init__(self, links: Links) -> None:
        self.device = torch.device("cpu")
        self.now = 0.0
        self.work = 0.0
        """Of the operation that is being queued."""
        self.spans: list[tuple[float, float, bool, bool]] = []
        """(from, to, whether state came in, whether it left) since time began."""
        self._links = links
        self._streams: dict[str, TimedStream] = {}

    def compute(self) -> TimedStream:
        """The model's."""
        return self.side("compute")

    def side(self, name: str) -> TimedStream:
        """The side stream of that name."""
        return self._streams.setdefault(name, TimedStream(name, self))

    def foreign(self, stream: Any) -> TimedStream:
        """A stream somebody else made, by its name."""
        return self.side(str(stream))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that nobody touches."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, tensors: Sequence[torch.Tensor], used_by: Sequence[Stream]) -> None:
        """Nothing is written, so nothing can be written too late."""

    def accesses(self, tensors: Iterable[torch.Tensor]) -> Sequence[Access]:
        """Nobody wants to know."""
        return ()

    def allocated(self) -> int | None:
        """Nobody counts."""
        return None

    def run_until(self, last: TimedOperation) -> None:
        """Let time pass until that operation has ended. Raises RuntimeError where nothing can run any more."""
        while True:
            running = self._start()
            if last.ended is not None:
                return
            if not running:
                raise RuntimeError(f"deadlock: what {last.stream} waits for never runs")
            into, out = (any(one.stream == way for one in running) for way in DIRECTIONS)
            speed = dict(zip(DIRECTIONS, self._links.now(into, out), strict=True))
            passed = min(one.left / speed.get(one.stream, 1.0) for one in running)
            self._span(passed, into, out)
            for one in running:
                one.left -= passed * speed.get(one.stream, 1.0)
                if one.left <= NONE_LEFT * one.work:
                    self._end(one)

    def _span(self, passed: float, into: bool, out: bool) -> None:
        """Time passes in which the link does the same all along; a span goes on while it does."""
        start = self.spans.pop()[0] if self.spans and self.spans[-1][2:] == (into, out) else self.now
        self.now += passed
        self.spans.append((start, self.now, into, out))

    def _start(self) -> list[TimedOperation]:
        """What runs now; points without work end at once, and let others begin."""
        while True:
            found = [one for stream in self._streams.values() if (one := stream.next) is not None]
            points = [one for one in found if not one.work]
            if not points:
                return found
            for one in points:
                self._end(one)

    def _end(self, operation: TimedOperation) -> None:
        operation.ended, operation.left = self.now, 0.0
        self._streams[operation.stream].done += 1


class TimedCopier(Copier):
    """Copies nothing, and says how much."""

    def __init__(self, device: TimedStreams) -> None:
        super().__init__()
        self._device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add to the operation that is being queued."""
        assert target.numel() == source.numel()
        self._device.work += target.numel()
