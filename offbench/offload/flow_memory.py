"""The staging memory of arm stream: where state finds a place, and when memory goes back to whom it came from.

Memory of three kinds holds state: the arena, which compute hands over; gradients whose update has run; and what
activations lent (`prefetch`). `flow` says in which order chunks are updated, and who waits for whom.
"""

from __future__ import annotations

from collections import deque

import torch

from offbench.offload.allowance import Allowance
from offbench.offload.chunks import ALIGNMENT, Chunk
from offbench.offload.engine import Engine, Work
from offbench.offload.extents import Extent, Extents, joined
from offbench.offload.flow_step import FlowStep, Place
from offbench.offload.gradients import sole_memory
from offbench.offload.prefetch import Prefetch
from offbench.offload.staged import Staged, segments
from offbench.offload.streams import Event, Why
from offbench.offload.zerocopy.support import is_reachable


class FlowMemory(Engine):
    """What an engine needs whose staging memory comes and goes during a step."""

    def _set_up(self) -> None:
        self._extents = Extents()
        self._allowance = Allowance(self._streams, self._extents)
        self._step: FlowStep | None = None
        self._waited_reads = 0
        """Reads of this step's forward before which the host had waited since the one before."""
        self.prefetch = Prefetch(self, self._streams, self._allowance, self._extents)

    def _plan(self) -> None:
        moving = [c for c in self.chunks if c.index not in self._resident and c.nbytes]
        self._segments = {c.index: segments(c, max(1, self.schedule.chunk_bytes // 8)) for c in moving}
        self._moving_bytes = sum(chunk.nbytes for chunk in moving)
        self._has_pieces = any(chunk.piece is not None for chunk in moving)
        kept = sum(state.numel() for state in self._resident.values())
        self._allowance.plan(self.schedule, [c.nbytes for c in moving], kept)
        self.prefetch.forget()

    @property
    def staging_bytes(self) -> int:
        """The arena and as much of the gradients' memory as may be taken over."""
        arena, at_loss = self._allowance.arena_bytes, self._allowance.at_loss
        grown = arena + sum(chunk.nbytes for chunk in self.chunks) // 2
        return grown if at_loss is None else min(grown, max(arena, at_loss))

    @property
    def _is_last_read(self) -> bool:
        """Whether the forward has asked for all chunks: the loss is next."""
        return bool(self.chunks) and self._furthest >= self.chunks[-1].index

    def add_extent(self, nbytes: int) -> Extent:
        """Take staging memory of that size from compute."""
        memory = self._streams.allocate(nbytes)
        self._allowance.changed()
        return self._extents.add(memory, Why.ARENA_READY, self._streams.compute().record())

    def _retire_arena(self, step: FlowStep) -> None:
        """Take nothing more out of the arena, once gradients can replace it, and write back what is updated in it."""
        if step.retired or not self._allowance.retires_now(step):
            return
        step.retired = True
        for extent in step.arena:
            self._extents.close(extent)
        staged, step.staged = step.staged, deque()
        for chunk, place in staged:
            self._keep_staged(step, chunk, place)

    def _return_arena(self) -> None:
        """Give back what of a retired arena is written back by now."""
        step = self._step
        if step is None or step.arrived:
            return
        for extent in [one for one in step.arena if one.closed and one.idle and self._extents.passed(one)]:
            self._give_back(extent)

    def _return_lent(self, step: FlowStep) -> None:
        """Give back what of the state that was here before step() is written back by now. Activations lent its memory:
        a forward that needs it waits for it, and so does its last gather, for the loss must find none."""
        is_due: bool | None = None  # not asked since memory went back
        for extent in [one for one in step.lent if one.idle]:
            if not (self._is_last_read or self._extents.passed(extent)):
                is_due = self._allowance.loan_is_due(step) if is_due is None else is_due
                if not is_due:
                    continue
            self._give_back(extent)
            is_due = None

    def _make_place(self, step: FlowStep, chunk: Chunk) -> bool:
        """There is no room for a chunk: write back the oldest updated one, or else take memory anew. False: there is
        none, but the device reaches the state in host memory."""
        if step.staged:
            self._write_back(*step.staged.popleft())
            return True
        sizes = [nbytes for _, nbytes in self._segments[chunk.index]]
        try:
            step.arena.append(self.add_extent(sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes)))
        except torch.OutOfMemoryError:
            if not is_reachable(self._store):
                raise
            return False
        return True

    def _keep_staged(self, step: FlowStep, chunk: Chunk, place: Place) -> None:
        """An updated chunk stays until memory asks for it, unless its own memory is to go back."""
        if place.closed:
            self._write_back(chunk, place)
        else:
            step.staged.append((chunk, place))

    def _move_ahead(self, step: FlowStep) -> None:
        """Chunks move in, in order, as far as there is room."""
        while self._move_next(step):
            pass

    def _move_next(self, step: FlowStep) -> bool:
        """The next chunk moves in, if there is one and it finds room."""
        if not step.to_move or (moved := self.stage(step.to_move[0])) is None:
            return False
        step.moved[step.to_move.popleft().index] = moved
        step.last_in = moved[1]
        return True

    def stage(self, chunk: Chunk) -> tuple[Place, Event] | None:
        """Queue the copies of a chunk into staging memory that is there: where, and the event behind them; None, and
        nothing queued, where it finds no room. The previous step must be finished."""
        ranges = self._extents.take(nbytes for _, nbytes in self._segments[chunk.index])
        if ranges is None:
            return None
        moves_in = self._streams.side("in")
        for why, event in self._extents.guards(ranges):
            moves_in.wait(event, why)
        place = Place(ranges, Staged(joined(self._segments[chunk.index], ranges)))
        return place, self._move_in(moves_in, chunk, place.state)

    def _write_back(self, chunk: Chunk, place: Place) -> None:
        moves_out = self._streams.side("out")
        moves_out.wait(self._updated[chunk.index], Why.UPDATED)
        event = self._move_out(moves_out, chunk, place.state)
        self._written_back[chunk.index] = event
        for range_ in place.ranges:
            self._extents.give(range_, Why.SLOT_FREE, event)

    def _recycle(self, step: FlowStep, work: Work, updated: Event) -> None:
        """Gradient memory that nobody reads any more becomes staging memory, or returns to the allocator."""
        work.gradients = []
        for shared in step.gradients.pop(work.chunk.index):
            shared.pending.discard(work.chunk.index)
            if shared.pending:
                continue
            nbytes = shared.nbytes
            step.freed_bytes += nbytes
            memory = sole_memory(shared.tensors) if self._wanted(step, nbytes) else None
            if memory is None:
                self._streams.release(shared.tensors[:1], used_by=[self._streams.side("update")])
                self._allowance.changed()
                continue
            step.grown_bytes += memory.numel()
            self._extents.add(memory, Why.GRADIENT_FREE, updated)

    def _wanted(self, step: FlowStep, nbytes: int) -> bool:
        """Whether gradient memory of that size is to hold state, which some chunk must still need."""
        return bool(step.to_move) and nbytes >= self.schedule.chunk_bytes // 8 and self._allowance.grows(step, nbytes)

    def _make_room(self, step: FlowStep) -> None:
        """Give back as much memory as the gradients that come next need, and whatever is written back already."""
        while step.arrived and (self._extents.nbytes > step.most_bytes or self._extents.passed(step.arrived[0])):
            self._give_back(step.arrived.pop(0))

    def give_back_idle(self) -> None:
        """Let compute have all staging memory that holds nothing."""
        for extent in [one for one in self._extents.all if one.idle]:
            self._give_back(extent)

    def _give_back(self, extent: Extent) -> None:
        compute = self._streams.compute()
        for _, event in self._extents.remove(extent):
            compute.wait(event, Why.WRITTEN_BACK)
        self.ledger.held(extent.nbytes, extent.begin, compute.record())
        self._streams.release([extent.memory], used_by=())
        step = self._step
        for held in (step.arena, step.lent, step.arrived) if step is not None else ():
            if extent in held:
                held.remove(extent)
