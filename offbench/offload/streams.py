"""Streams and events: the only place that creates them.

The engine orders its work through three calls: `run` queues an operation on a stream, `record` marks a point of a
stream, `wait` holds a stream back until such a point has passed. `DeviceStreams` maps them to the device's own
streams (on CPU these are no-ops and everything runs at once, in program order). The tests use
`offbench.offload.adversary.AdversarialStreams`, which runs every queued operation as late, or as far out of order, as
the declared waits allow. No engine code knows which of the two it runs on.

Every operation names what it reads and writes, so that `HappensBefore` can prove an order, and every wait says why it
exists, so that a test can take exactly that one away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch


class Why(StrEnum):
    """The reason of each wait the engine makes: who waits for what."""

    ARENA_READY = "move-in waits until compute has clipped the gradients and no longer uses the staging memory"
    SLOT_FREE = "move-in waits until the chunk that held these staging bytes is written back"
    GRADIENT_FREE = "move-in waits until the updates have run whose gradients held these staging bytes"
    HOST_CURRENT = "move-in waits until the previous step's write-back of the same host bytes has ended"
    GRADIENTS_READY = "deferred update waits until compute has clipped the gradients"
    LOADED = "update waits until its chunk is on the device"
    UPDATED = "write-back waits until its chunk is updated"
    LINK_FREE = "write-back waits until the step's last move-in has arrived: one way at a time is faster"
    READ = "a reader of parameters waits until the last chunk that holds them is updated"
    WRITTEN_BACK = (
        "compute waits until staging memory is written back, or never came to be used, before it uses it again"
    )


class Access(NamedTuple):
    """A range of bytes of one piece of memory, read or written by an operation."""

    space: str
    start: int
    stop: int

    def overlaps(self, other: Access) -> bool:
        """Whether the two ranges share a byte."""
        return self.space == other.space and self.start < other.stop and other.start < self.stop


class Event(Protocol):
    """A point of a stream."""

    def synchronize(self) -> None:
        """Make the host wait until the point has passed."""

    def query(self) -> bool:
        """Whether the point has passed."""


class Stream(Protocol):
    """A FIFO of operations."""

    name: str

    def run(self, do: Callable[[], None], reads: Sequence[Access] = (), writes: Sequence[Access] = ()) -> None:
        """Queue an operation that reads and writes the given ranges."""

    def record(self) -> Event:
        """Mark the current end of the queue."""

    def wait(self, event: Event, why: Why) -> None:
        """Hold back everything queued from now on until `event` has passed."""


class Streams(Protocol):
    """A device's streams and the memory that travels between them."""

    def compute(self) -> Stream:
        """The caller's current stream: forward, backward and clipping run there."""

    def side(self, name: str) -> Stream:
        """The side stream of that name, made at its first use and kept."""

    def foreign(self, stream: Any) -> Stream:
        """A stream somebody else made (FSDP's all-gather stream)."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 device memory [nbytes]; earlier work of the compute stream may still be using it."""

    def release(self, tensors: Sequence[torch.Tensor], used_by: Sequence[Stream]) -> None:
        """Give memory back once what is queued on `used_by` now has run; with none, in compute-stream order."""

    def accesses(self, tensors: Iterable[torch.Tensor]) -> Sequence[Access]:
        """The bytes of contiguous tensors, as `Stream.run` wants them named; none, and no tensor is looked at, where
        nobody wants to know."""

    def allocated(self) -> int | None:
        """Bytes of live tensors on the device; None where nobody counts them."""


class DeviceEvent:
    """An event of the device, with timing so that copies can be placed on the step's time line."""

    def __init__(self, module: ModuleType, stream: Any, timing: bool) -> None:
        self.raw = module.Event(enable_timing=True) if timing else module.Event()
        self.raw.record(stream)

    def synchronize(self) -> None:
        """Make the host wait for the event, and for nothing else."""
        self.raw.synchronize()

    def query(self) -> bool:
        """Whether the event has passed."""
        return bool(self.raw.query())


class DeviceStream:
    """A stream of the device; `raw` None stands for the caller's current stream."""

    def __init__(self, name: str, module: ModuleType, raw: Any, timing: bool) -> None:
        self.name = name
        self._module = module
        self._raw = raw
        self._timing = timing
        self._switch: Any = getattr(module, "set_stream", None)  # the CPU's has none

    def _stream(self) -> Any:
        return self._raw if self._raw is not None else self._module.current_stream()

    def run(self, do: Callable[[], None], reads: Sequence[Access] = (), writes: Sequence[Access] = ()) -> None:
        """Queue an operation; on CPU it runs at once."""
        if self._raw is None:
            do()
            return
        before = self._module.current_stream() if self._switch is not None else None
        if before is None or before.device_index != self._raw.device_index:
            with self._module.stream(self._raw):
                do()
            return
        self._switch(self._raw)  # as the context does, for a part of what that costs the host
        try:
            do()
        finally:
            self._switch(before)

    def record(self) -> DeviceEvent:
        """Mark the current end of the queue."""
        return DeviceEvent(self._module, self._stream(), self._timing)

    def wait(self, event: Event, why: Why) -> None:
        """Hold back everything queued from now on until `event` has passed."""
        assert isinstance(event, DeviceEvent)
        self._stream().wait_event(event.raw)

    def keep(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that this stream uses the tensor's memory."""
        tensor.record_stream(self._stream())


class DeviceStreams:
    """Streams of a torch device, reached through `torch.get_device_module`, so of any accelerator, or of the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._timing = device.type != "cpu"
        self._compute = DeviceStream("compute", self._module, None, self._timing)
        self._side: dict[str, DeviceStream] = {}
        self._foreign: DeviceStream | None = None
        """The one asked for last: FSDP gathers on the same stream again and again."""

    def compute(self) -> DeviceStream:
        """The caller's current stream."""
        return self._compute

    def side(self, name: str) -> DeviceStream:
        """The side stream of that name. Made once: new streams each step strand the allocator's pools."""
        if name not in self._side:
            self._side[name] = DeviceStream(name, self._module, self._module.Stream(), self._timing)
        return self._side[name]

    def raw(self) -> dict[str, Any]:
        """The device's own side streams by name, those made so far."""
        return {name: stream._raw for name, stream in self._side.items()}

    def foreign(self, stream: Any) -> DeviceStream:
        """Wrap a stream somebody else made."""
        if self._foreign is None or self._foreign._raw is not stream:
            self._foreign = DeviceStream("foreign", self._module, stream, self._timing)
        return self._foreign

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 memory [nbytes] from the caching allocator's pool of the current stream."""
        with trainable():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def release(self, tensors: Sequence[torch.Tensor], used_by: Sequence[Stream]) -> None:
        """Mark the tensors as used by side streams; the caller then drops its references."""
        if self.device.type == "cpu":  # nothing is ever in flight there, and record_stream raises
            return
        for stream in used_by:
            assert isinstance(stream, DeviceStream)
            for tensor in tensors:
                stream.keep(tensor)

    def allocated(self) -> int | None:
        """What the caching allocator has handed out."""
        if self.device.type == "cpu":
            return None
        # memory_allocated gives the same figure, but flattens all statistics first; this is asked for at every layer
        return int(self._module.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"])

    def accesses(self, tensors: Iterable[torch.Tensor]) -> Sequence[Access]:
        """None: the device orders by events alone, and they would be named for every copy and update of every step."""
        return ()


_NOTHING: AbstractContextManager[None] = nullcontext()


def trainable() -> AbstractContextManager[None]:
    """To make memory in that training writes to later, where an evaluation may be what queues an update."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
