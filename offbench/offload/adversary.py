"""Streams that do their worst: on CPU, every queued operation runs as late, or as early, as the waits allow.

A dropped wait, a stale slot or an event of the wrong chunk then changes values, on any machine and every time. Used by
the tests and by `debug` runs; the engine cannot tell it from a device.

- A *lazy* stream runs an operation only when somebody waits for it; an *eager* one as soon as its own waits allow.
- With a seed, each stream is lazy or eager at random from one operation to the next.
- Memory is poisoned: NaN is written into allocated memory by the compute stream, as earlier work there could, and into
  released memory as soon as its declared users have passed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offbench.offload.order import Clock, HappensBefore
from offbench.offload.streams import Access, Event, Stream, Why

Pace = Literal["lazy", "eager", "random", "immediate"]


class AdversarialEvent:
    """A point of an adversarial stream."""

    def __init__(self, stream: AdversarialStream, clock: Clock) -> None:
        self.passed = False
        self.stream = stream
        self.clock = clock

    def synchronize(self) -> None:
        """Run what must run before this point."""
        self.stream.run_until(self)

    def query(self) -> bool:
        """Whether the point has passed."""
        return self.passed


@dataclass(frozen=True)
class _Operation:
    do: Callable[[], None]


@dataclass(frozen=True)
class _Wait:
    event: AdversarialEvent


class AdversarialStream:
    """A FIFO whose operations run when `AdversarialStreams` decides."""

    def __init__(self, name: str, owner: AdversarialStreams, pace: Pace) -> None:
        self.name = name
        self.pace = pace
        self._owner = owner
        self._queue: deque[_Operation | _Wait | AdversarialEvent] = deque()

    def run(self, do: Callable[[], None], reads: Sequence[Access] = (), writes: Sequence[Access] = ()) -> None:
        """Queue an operation."""
        self._owner.order.operation(self.name, getattr(do, "__name__", "operation"), reads, writes)
        self._push(_Operation(do))

    def record(self) -> AdversarialEvent:
        """Mark the current end of the queue."""
        event = AdversarialEvent(self, self._owner.order.record(self.name))
        self._push(event)
        return event

    def wait(self, event: Event, why: Why) -> None:
        """Hold back what follows, unless the test has dropped this wait."""
        assert isinstance(event, AdversarialEvent)
        self._owner.waits.add(why)
        if why is self._owner.drop:
            return
        if self._owner.swap is not None and why is self._owner.swap[0]:
            event = self._owner.swap[1](event)
        self.after(event)

    def after(self, event: AdversarialEvent) -> None:
        """Hold back what follows; no test can drop this one."""
        self._owner.order.wait(self.name, event.clock)
        self._push(_Wait(event))

    def _push(self, item: _Operation | _Wait | AdversarialEvent) -> None:
        self._queue.append(item)
        if self.pace == "immediate":
            self.run_all()
        self._owner.play()

    @property
    def idle(self) -> bool:
        """Whether everything queued has run."""
        return not self._queue

    def run_until(self, event: AdversarialEvent) -> None:
        """Run this queue, and what it waits for, up to and with `event`."""
        while not event.passed:
            self._next(force=True)

    def run_some(self) -> None:
        """Run as far as the pace and unmet waits allow, without forcing another stream."""
        while self._queue and self._may_run() and self._next(force=False):
            pass

    def run_all(self) -> None:
        """Run everything queued."""
        while self._queue:
            self._next(force=True)

    def _may_run(self) -> bool:
        if self.pace == "random":
            return self._owner.random.random() < 0.5
        return self.pace == "eager"

    def _next(self, force: bool) -> bool:
        head = self._queue[0]
        if isinstance(head, _Wait) and not head.event.passed:
            if not force:
                return False
            head.event.stream.run_until(head.event)
        # Forcing another stream can have run this one's head already.
        if not self._queue or self._queue[0] is not head:
            return True
        self._queue.popleft()
        if isinstance(head, AdversarialEvent):
            head.passed = True
        elif isinstance(head, _Operation):
            head.do()
        if force:  # what has just been forced may be all that an eager stream was waiting for
            self._owner.play()
        return True


class AdversarialStreams:
    """Streams whose operations run in the least convenient order.

    paces: pace by stream name; streams not named are lazy. The compute stream is `immediate` by default, since on CPU
    the model's own work runs when it is called; a test that queues the model's work too may make it lazy or eager.
    drop: leave out every wait made for this reason. swap: replace the event of such waits (a wrong event).
    `order.violations` holds what the happens-before checker found.
    """

    def __init__(
        self,
        paces: Mapping[str, Pace] | None = None,
        seed: int = 0,
        drop: Why | None = None,
        swap: tuple[Why, Callable[[AdversarialEvent], AdversarialEvent]] | None = None,
    ) -> None:
        self.order = HappensBefore()
        self.random = random.Random(seed)
        self.drop = drop
        self.swap = swap
        self.waits: set[Why] = set()
        self._paces: Mapping[str, Pace] = {"compute": "immediate", **(paces or {})}
        self._streams: dict[str, AdversarialStream] = {}
        self._playing = False
        self._next_owners: list[AdversarialStream] = []
        self._released = 0

    def compute(self) -> AdversarialStream:
        """The stream the model runs on."""
        return self.side("compute")

    def side(self, name: str) -> AdversarialStream:
        """The stream of that name."""
        if name not in self._streams:
            self._streams[name] = AdversarialStream(name, self, self._paces.get(name, "lazy"))
        return self._streams[name]

    def foreign(self, stream: Any) -> AdversarialStream:
        """FSDP's streams do nothing on CPU: what they would run is run at once, as compute's work is."""
        return self.compute()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 memory [nbytes] that earlier work of the compute stream still writes to."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.compute().run(lambda: _poison([memory]), writes=[self.access(memory)])
        return memory

    def release(self, tensors: Sequence[torch.Tensor], used_by: Sequence[Stream]) -> None:
        """Poison the memory as soon as what is queued on `used_by` now has run."""
        kept = list(tensors)
        accesses = [self.access(tensor) for tensor in kept]
        reuser = self.compute()
        if used_by:
            self._released += 1
            reuser = AdversarialStream(f"next owner {self._released}", self, "eager")
            self._next_owners.append(reuser)
        for stream in used_by:
            assert isinstance(stream, AdversarialStream)
            reuser.after(stream.record())
        reuser.run(lambda: _poison(kept), writes=accesses)
        for access in accesses:
            self.order.forget(access)

    def access(self, tensor: torch.Tensor) -> Access:
        """The bytes of a contiguous tensor in its storage."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        space = f"memory at {tensor.untyped_storage().data_ptr():#x}"
        return Access(space, start, start + int(tensor.numel()) * tensor.element_size())

    def accesses(self, tensors: Iterable[torch.Tensor]) -> Sequence[Access]:
        """Those of all of them."""
        return [self.access(tensor) for tensor in tensors]

    def allocated(self) -> int | None:
        """Nobody counts."""
        return None

    def play(self) -> None:
        """Let every stream run as far as its pace allows."""
        if self._playing:
            return
        self._playing = True
        try:
            streams = [*self._streams.values(), *self._next_owners]
            self.random.shuffle(streams)
            # Twice round, so that an operation freed by a later stream's progress runs in the same turn.
            for stream in streams + streams:
                stream.run_some()
            self._next_owners = [stream for stream in self._next_owners if not stream.idle]
        finally:
            self._playing = False

    def run_all(self) -> None:
        """Run everything queued anywhere."""
        for stream in [*self._streams.values(), *self._next_owners]:
            stream.run_all()


def _poison(tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(0xFF if tensor.dtype == torch.uint8 else float("nan"))  # four bytes 0xFF are a float32 NaN
