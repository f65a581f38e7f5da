"""An engine's own steps against the clock: what its schedule, waits and memory cost where the host is never late.

The simulation of `offbench.planner` takes a policy; this runs the engine itself on streams that keep time (`timed`),
called in the order in which a model's hooks call it, but that each read looks ahead and none comes a block early. So
it tells a policy from what its implementation adds, and how long an update may take before the next copy waits for it.
The host takes no time but to look whether what it waits for has come (`LOOK_S`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from offbench.offload import meanwhile
from offbench.offload.budget import leading
from offbench.offload.chunks import Chunk, plan_chunks
from offbench.offload.engine import Engine, Work
from offbench.offload.engines import engine_of
from offbench.offload.schedule import Schedule
from offbench.offload.staged import Staged
from offbench.offload.streams import Why
from offbench.offload.timed import TimedCopier, TimedEvent, TimedOperation, TimedStreams
from offbench.planner.inputs import FP32, Compute, Links, local_numel
from offbench.workload.presets import ModelShape

ATTENTION = 0.32
"""Share of a block's forward that comes before its expert counts are read back. Assumed, as no record has it: 0.22 and
0.42 change the steps replayed in docs/hiding-copies.md by no more than 0.001 s."""
LOOK_S = 1e-4
"""What a look at an event takes the host that waits for it; more than on any machine, so that few are enough. Of a
step's waits each ends up to so much late."""
STEPS = 4
"""Of them the last counts: the first has no write-back beside it, the next ones what that left behind."""


@dataclass(frozen=True)
class Replayed:
    """The last step of a replay, s."""

    step_s: float
    to_head_s: float
    """From the end of the backward before it to when the head may begin: all state must have come in."""
    into_s: float
    """Of that: state came in alone."""
    both_s: float
    """It came in while other state left."""
    out_s: float
    """It only left."""
    idle_s: float
    """The link had nothing to do."""
    staging_bytes: int
    """Most staging memory so far."""


@dataclass(frozen=True)
class _Group:
    """What FSDP2 gathers and reduces at once."""

    positions: tuple[int, ...]
    """Of its parameters, in the optimizer's order."""
    numel: int


class _Looked(TimedEvent):
    """An event that the host waits for: each look at it takes time."""

    def query(self) -> bool:
        """Whether the point has passed."""
        if not super().query():
            self.device.run_until(self.device.side("host").push(LOOK_S))
        return super().query()


class _Untouched:
    """Host memory that nobody touches."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = [torch.empty(chunk.home_bytes, dtype=torch.uint8) for chunk in chunks]

    def chunk(self, index: int) -> torch.Tensor:
        return self._chunks[index]


class Replay:
    """One model, schedule, GPU and link.

    compute: times of `none`. update: seconds of AdamW over all state where it runs beside the forward; None: as in
    `compute`. host_waits: whether the host waits for expert counts by `meanwhile.wait`. Only schedules that are
    deferred and stage state; no parameter is cut into pieces.
    """

    def __init__(
        self,
        shape: ModelShape,
        schedule: Schedule,
        compute: Compute,
        links: Links,
        *,
        world: int = 8,
        ep: int = 8,
        layers: int | None = None,
        update: float | None = None,
        host_waits: bool = True,
    ) -> None:
        self._compute, self._host_waits = compute, host_waits
        self._layers = shape.layers if layers is None else layers
        self._streams = TimedStreams(links)
        sizes, self._groups = _groups(shape, self._layers, world, ep)
        self._numel = sizes
        self._chunks = plan_chunks([FP32 * size for size in sizes], schedule.chunk_bytes)
        self._chunk_of = {position: chunk.index for chunk in self._chunks for position in chunk.members}
        self._per_byte = (compute.update if update is None else update) / sum(chunk.nbytes for chunk in self._chunks)
        kept = leading(self._chunks, schedule.resident_bytes)
        resident = {chunk.index: self._streams.allocate(chunk.nbytes) for chunk in self._chunks if chunk.index in kept}
        store: Any = _Untouched(self._chunks)
        self._engine: Engine = engine_of(schedule)(
            (), store, schedule, self._streams, TimedCopier(self._streams), resident
        )
        self._engine.extend(self._chunks, schedule)

    def run(self, steps: int = STEPS) -> Replayed:
        """So many steps, each from the end of a backward to the next one's."""
        withdraw = meanwhile.offer(self._engine.queue_more) if self._host_waits else None
        try:
            began, head = self._steps(steps)
        finally:
            if withdraw is not None:
                withdraw()
        parts = {(into, out): 0.0 for into in (False, True) for out in (False, True)}
        for start, end, into, out in self._streams.spans:
            parts[into, out] += max(0.0, min(end, head) - max(start, began))
        return Replayed(
            step_s=self._streams.now - began,
            to_head_s=head - began,
            into_s=parts[True, False],
            both_s=parts[True, True],
            out_s=parts[False, True],
            idle_s=parts[False, False],
            staging_bytes=self._engine.staging_peak,
        )

    def _steps(self, count: int) -> tuple[float, float]:
        """Returns when the last one began, and when its head might."""
        began, head = 0.0, 0.0
        self._backward()
        for _ in range(count):
            began = self._streams.now
            clipped = self._streams.compute().push(self._compute.clip)
            self._engine.step(list(self._works()))
            self._wait(clipped)
            head = self._forward()
            self._backward()
        return began, head

    def _forward(self) -> float:
        """Returns when the head may begin."""
        embedding, *halves, last = self._groups
        block = (self._compute.forward - self._compute.loss) / self._layers
        compute = self._streams.compute()
        self._read(embedding)
        for attention, experts in zip(halves[::2], halves[1::2], strict=True):
            self._read(attention)
            counted = compute.push(ATTENTION * block)
            self._wait(counted)
            self._read(experts)
            compute.push((1 - ATTENTION) * block)
        self._read(last)
        ready = compute.push(0.0)
        self._streams.run_until(compute.push(self._compute.loss))
        assert ready.ended is not None
        return ready.ended

    def _backward(self) -> None:
        embedding, *halves, last = self._groups
        compute, block = self._streams.compute(), self._compute.backward / self._layers
        self._engine.before_backward(self._chunks_of(last))
        for attention, experts in zip(halves[-2::-2], halves[::-2], strict=True):
            self._engine.before_backward(self._chunks_of(experts))
            self._engine.before_backward(self._chunks_of(attention))
            self._streams.run_until(compute.push(block))
        self._engine.before_backward(self._chunks_of(embedding))
        self._engine.after_backward()

    def _works(self) -> Iterator[Work]:
        """Each group's gradients share their memory, as FSDP2's do."""
        gradients: dict[int, torch.Tensor] = {}
        for group in self._groups:
            flat, sizes = torch.empty(group.numel), [self._numel[position] for position in group.positions]
            gradients |= dict(zip(group.positions, torch.split(flat, sizes), strict=True))
        for chunk in self._chunks:
            seconds = chunk.nbytes * self._per_byte

            def update(state: Staged, seconds: float = seconds) -> None:
                self._streams.work = seconds

            yield Work(chunk, update, [gradients.pop(position) for position in chunk.members], [])

    def _read(self, group: _Group) -> None:
        for event in self._engine.before_read(self._chunks_of(group)):
            self._streams.compute().wait(event, Why.READ)

    def _chunks_of(self, group: _Group) -> list[int]:
        return sorted({self._chunk_of[position] for position in group.positions})

    def _wait(self, operation: TimedOperation) -> None:
        """The host waits for the model."""
        if self._host_waits:
            meanwhile.wait(_Looked(operation, self._streams))
        else:
            TimedEvent(operation, self._streams).synchronize()


def _groups(shape: ModelShape, layers: int, world: int, ep: int) -> tuple[list[int], list[_Group]]:
    """Values of each parameter that rank 0 holds, in order, and the groups: embedding, then of each block what is not
    experts, and experts, then norm and head."""
    embedding, *rest = shape.other_tensors()
    block = list(shape.layer_tensors())
    halves = [[one for one in block if one[0].startswith("experts.") == experts] for experts in (False, True)]
    tensors = [[embedding], *(half for _ in range(layers) for half in halves), rest]
    numel = [[local_numel(*tensor, world, ep) for tensor in group] for group in tensors]
    starts = accumulate((len(group) for group in numel), initial=0)
    groups = [_Group(tuple(range(at, at + len(sizes))), sum(sizes)) for at, sizes in zip(starts, numel, strict=False)]
    return [size for sizes in numel for size in sizes], groups
