"""The engine of synchronous schedules and of overlap: chunks pass through a ring of staging memory, in order.

Note [Who waits for whom]
    stream   waits for           because (see `streams.Why`)
    in       compute             the staging arena is compute-stream memory                    ARENA_READY
    in       out                 an earlier chunk of this step held these staging bytes        SLOT_FREE
    in       out                 the previous step may still be writing these host bytes       HOST_CURRENT
    update   in                  the chunk's state must be on the device                       LOADED
    update   compute             resident state: gradients must be complete and clipped        GRADIENTS_READY
    out      update              only updated state may be written back                        UPDATED
    reader   update              a layer is gathered after its last chunk's update             READ
    compute  out                 the arena returns to compute only when written back           WRITTEN_BACK

A deferred update of staged state needs no wait of its own for the gradients: ARENA_READY is recorded after clipping,
and LOADED follows it. Resident state is there already, so its update waits for compute. Updates of a synchronous
schedule run on the compute stream itself, so READ orders nothing new there.
HOST_CURRENT binds only deferred schedules: the others end each step with WRITTEN_BACK.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offbench.offload.chunks import Chunk, Staging, plan_staging
from offbench.offload.engine import InOrderEngine, Work
from offbench.offload.gradients import one_of_each
from offbench.offload.staged import Staged
from offbench.offload.streams import Event, Stream, Why


@dataclass
class _Step:
    """What one optimizer step still owes."""

    waiting: deque[Work]
    arena: torch.Tensor
    ready: Event
    """Passed when compute has clipped the gradients and is done with the arena's memory."""
    out: dict[int, Event]
    """Write-back events of this step, by chunk."""
    gradients_awaited: bool = False
    """The update stream has waited for `ready`."""


class RingEngine(InOrderEngine):
    """Moves the chunks of one optimizer between `store` and a staging arena on the device.

    Only one step can have work left: the next step() first queues whatever the forward never asked for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole_first = self.schedule.first_step == "whole"
        self._step: _Step | None = None

    def _plan(self) -> None:
        self._moving = [replace(c, nbytes=0) if c.index in self._resident else c for c in self.chunks]
        self._staging = plan_staging(self._moving, self.schedule.slots)
        self._whole = plan_staging(self._moving, None)

    @property
    def staging_bytes(self) -> int:
        """The staging arena."""
        return self._staging.nbytes

    def _begin_step(self, works: Sequence[Work]) -> None:
        if self._whole_first or not self.schedule.copy_streams:
            self._whole_first = False
            self._in_turn(works)
            return
        self._begin(works)
        if self.schedule.deferred:
            self._queue(self._lead(works))
        else:
            self._queue(len(works))
            self._streams.compute().record().synchronize()

    def _waiting(self) -> Sequence[Work]:
        return self._step.waiting if self._step is not None else ()

    def _in_turn(self, works: Sequence[Work]) -> None:
        """Everything in, everything updated, everything out, on the compute stream."""
        compute = self._streams.compute()
        arena = self._allocate(self._whole)
        begin = compute.record()
        moving = [work for work in works if work.chunk.index not in self._resident]
        staged = {work.chunk.index: _slice(arena, self._whole, work.chunk) for work in moving}
        for work in moving:
            self._move_in(compute, work.chunk, staged[work.chunk.index])
        for work in works:
            self._update(compute, work, staged.get(work.chunk.index) or self._kept(work.chunk))
        for work in moving:
            self._move_out(compute, work.chunk, staged[work.chunk.index])
        end = compute.record()
        self.ledger.held(self._whole.nbytes, begin, end)
        self._streams.release([arena], used_by=())
        end.synchronize()

    def _begin(self, works: Sequence[Work]) -> None:
        arena = self._allocate(self._staging)
        ready = self._streams.compute().record()
        if self._staging.nbytes:
            self._streams.side("in").wait(ready, Why.ARENA_READY)
        self._step = _Step(deque(works), arena, ready, {})

    def _queue(self, count: int) -> None:
        """Queue the next `count` chunks, if there are as many; give the arena back after the last one."""
        step = self._step
        if step is None or count <= 0:
            return
        for _ in range(min(count, len(step.waiting))):
            self.check()
            self._queue_chunk(step, step.waiting[0])
            step.waiting.popleft()
        if step.waiting:
            return
        end = self._written_back[max(step.out)] if step.out else step.ready
        self.ledger.held(self._staging.nbytes, step.ready, end)
        if self.schedule.deferred:
            self._streams.release([step.arena], used_by=[self._streams.side("out")])
        else:
            if step.out:
                self._streams.compute().wait(end, Why.WRITTEN_BACK)
            self._streams.release([step.arena], used_by=())
        self._step = None

    def _queue_chunk(self, step: _Step, work: Work) -> None:
        index, deferred = work.chunk.index, self.schedule.deferred
        moves_in, moves_out = self._streams.side("in"), self._streams.side("out")
        updates = self._streams.side("update") if deferred else self._streams.compute()
        if index in self._resident:
            if deferred and not step.gradients_awaited:
                updates.wait(step.ready, Why.GRADIENTS_READY)
                step.gradients_awaited = True
            self._finish_update(updates, work, self._kept(work.chunk))
            return
        staged = _slice(step.arena, self._staging, work.chunk)

        displaced = [j for j in self._staging.displaced(self._moving, index) if j in step.out]
        if displaced:
            moves_in.wait(step.out[displaced[-1]], Why.SLOT_FREE)
        if deferred and index in self._written_back:
            moves_in.wait(self._written_back[index], Why.HOST_CURRENT)
        loaded = self._move_in(moves_in, work.chunk, staged)

        updates.wait(loaded, Why.LOADED)
        self._finish_update(updates, work, staged)

        moves_out.wait(self._updated[index], Why.UPDATED)
        step.out[index] = self._written_back[index] = self._move_out(moves_out, work.chunk, staged)

    def _finish_update(self, updates: Stream, work: Work, staged: Staged) -> None:
        self._updated[work.chunk.index] = self._update(updates, work, staged)
        if self.schedule.deferred:
            # The gradients return to the allocator when the update has run, not when step() returns.
            self._streams.release(one_of_each(work.gradients), used_by=[updates])

    def _allocate(self, staging: Staging) -> torch.Tensor:
        self.staging_peak = max(self.staging_peak, staging.nbytes)
        return self._streams.allocate(staging.nbytes)


def _slice(arena: torch.Tensor, staging: Staging, chunk: Chunk) -> Staged:
    start = staging.starts[chunk.index]
    return Staged.whole(arena[start : start + chunk.nbytes])
