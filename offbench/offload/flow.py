"""The engine of arm stream: state flows through the memory that gradients leave behind.

Each update ends the life of its gradient, 4 bytes a parameter, just when the next moments, 8 bytes a parameter, need
room. So staging starts as a small arena, filled when the backward ends (`prefetch`) and by step(), and grows into
gradient memory while the forward updates layer by layer; parameters, gradients and staging together stay constant.
Half-way through, gradients have replaced the arena, whose memory activations need by then (`allowance`). Move-in then
never waits for write-back while that memory lasts, has the link to itself, and everything else is written back after
the last move-in: at the end of the forward and in the backward, whose gradients take their memory back layer by layer.

Note [Who waits for whom]
    stream   waits for           because (see `streams.Why`)
    in       compute             the staging arena is compute-stream memory                    ARENA_READY
    in       out                 before step(): see `prefetch`                                 HOST_CURRENT
    in       update              a gradient held these staging bytes                           GRADIENT_FREE
    in       out                 an earlier chunk of this step held these staging bytes        SLOT_FREE
    update   in                  the chunk's state must be on the device                       LOADED
    update   compute             gradients must be complete and clipped                        GRADIENTS_READY
    out      update              only updated state may be written back                        UPDATED
    out      in                  write-back that no memory waits for leaves the link to others LINK_FREE (speed only)
    reader   update              a layer is gathered after its last chunk's update             READ
    compute  out                 staging memory returns to compute only when written back      WRITTEN_BACK

Host bytes that come into the arena, or into gradients' memory, are current without a wait of their own: compute has
waited for the previous step's write-back before it hands those over.
Only memory decides what is written back early: a chunk that finds no room has the oldest updated chunks written back.
No wait is made on the host, and none depends on how far the device has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from offbench.offload.allowance import Allowance
from offbench.offload.chunks import ALIGNMENT, Chunk
from offbench.offload.copies import Copier
from offbench.offload.engine import Engine, Work
from offbench.offload.extents import Extent, Extents, joined
from offbench.offload.flow_step import FlowStep, Place
from offbench.offload.gradients import by_memory, sole_memory
from offbench.offload.hoststore import HostStore
from offbench.offload.prefetch import Prefetch
from offbench.offload.schedule import Schedule
from offbench.offload.staged import Staged, segments
from offbench.offload.streams import Event, Streams, Why

BURST = 1
"""Chunks that one read queues beyond its own: the host has the forward's kernels to launch, and must not stop."""
BURST_BACK = 4
"""Chunks that one read has written back once every update is queued; the first backward asks for the rest."""
TOGETHER_BYTES = 1 << 30
"""Resident state that one kernel updates; the first layer waits for the kernel with its own."""
BURST_AT_LEISURE = 3
"""Chunks queued where the device has work for a while and the host is about to wait for it."""


class FlowEngine(Engine):
    """One step can have work left, or memory to give back: the next step() first finishes it."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        store: HostStore,
        schedule: Schedule,
        streams: Streams,
        copier: Copier,
        resident: Mapping[int, torch.Tensor] | None = None,
        debug: bool = False,
    ) -> None:
        self._extents = Extents()
        self._allowance = Allowance(streams, self._extents)
        self._step: FlowStep | None = None
        self.prefetch = Prefetch(self, streams, self._allowance, self._extents)
        super().__init__(chunks, store, schedule, streams, copier, resident, debug)

    def _plan(self) -> None:
        moving = [c for c in self.chunks if c.index not in self._resident and c.nbytes]
        self._segments = {c.index: segments(c, max(1, self.schedule.chunk_bytes // 8)) for c in moving}
        kept = sum(state.numel() for state in self._resident.values())
        self._allowance.plan(self.schedule, [c.nbytes for c in moving], kept)
        self.prefetch.forget()

    @property
    def staging_bytes(self) -> int:
        """The arena and as much of the gradients' memory as may be taken over."""
        arena, at_loss = self._allowance.arena_bytes, self._allowance.at_loss
        grown = arena + sum(chunk.nbytes for chunk in self.chunks) // 2
        return grown if at_loss is None else min(grown, max(arena, at_loss))

    def step(self, works: Sequence[Work]) -> None:
        """Queue one optimizer step: what fits into the arena starts to move in, the first `lead` chunks that move
        are updated, and those that stay before them; the others from the forward's reads."""
        self._finish()
        moving = [work.chunk for work in works if work.chunk.index not in self._resident]
        self.prefetch.keep(moving)
        if not works:
            self.give_back_idle()
            return
        self._allowance.step()
        try:
            for nbytes in self._allowance.arena(self._extents.nbytes, self._allowance.ahead_bytes):
                self.add_extent(nbytes)
        except torch.OutOfMemoryError:  # this step is left out; state that is here already waits for the next one
            self.give_back_idle()
            raise
        moved = self.prefetch.take()
        self._count_step()
        lent = [extent for extent in self._extents.all if extent.closed]
        arena = [extent for extent in self._extents.all if not extent.closed]
        ready = self._streams.compute().record()
        self.prefetch.stepped(moving, [work.chunk for work in works])
        to_move = deque(chunk for chunk in moving if chunk.index not in moved)
        gradients = by_memory(works)
        total = sum({id(memory): memory.nbytes for found in gradients.values() for memory in found}.values())
        self._step = FlowStep(deque(works), to_move, gradients, total, arena, lent, moved=dict(moved))
        self._streams.side("update").wait(ready, Why.GRADIENTS_READY)
        self._move_ahead(self._step)
        self._queue(self._lead(works, there={chunk for chunk, (place, _) in moved.items() if place.closed}))

    def before_read(self, chunks: Sequence[int], look_ahead: bool = True) -> list[Event]:
        """As any engine's; what activations lent goes back as they come."""
        events = super().before_read(chunks, look_ahead)
        if self._step is not None and self._step.lent:
            self._return_lent(self._step)
        return events

    def look_ahead(self, at_leisure: bool = False) -> None:
        """Queue a few updates at a time until `ahead` are queued in front of what the forward has asked for."""
        most = BURST_AT_LEISURE if at_leisure else BURST
        self._queue(min(most, self._up_to(self._furthest + self.schedule.ahead)))
        self._return_state(BURST_BACK)
        self._return_arena()
        self.prefetch.shrink()
        while self._step is not None and self._step.arrived and self._allowance.is_crowded():
            self._give_back(self._step.arrived.pop(0))

    def before_backward(self, chunks: Sequence[int]) -> None:
        """Give back the memory that the gradients of these chunks need."""
        self._queue_all()
        self._allowance.backward()
        if self._step is not None:
            for chunk in set(chunks) - self._step.backward:
                self._step.backward.add(chunk)
                self._step.backward_bytes += self.chunks[chunk].nbytes // 2
            self._make_room(self._step)
        self.prefetch.backward()

    def after_backward(self) -> None:
        """All gradients are there. What the last step holds goes back first: the next one's arena takes its place."""
        self._allowance.backward_ends()
        if self.prefetch.is_due:
            self._finish()
        self.prefetch.backward_ends()

    def drain(self) -> None:
        """Return when nothing is queued or in flight; staging memory is given back."""
        self._finish()
        self.prefetch.drop_all()
        self._wait_for_all()

    def _finish(self) -> None:
        """Queue what the step still owes, and let compute have its memory back."""
        self._queue_all()
        if self._step is not None:
            while self._step.arrived:
                self._give_back(self._step.arrived.pop(0))
            self._step = None

    def add_extent(self, nbytes: int) -> Extent:
        """Take staging memory of that size from compute."""
        memory = self._streams.allocate(nbytes)
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
        is_last = self._furthest >= self.chunks[-1].index
        for extent in [one for one in step.lent if one.idle]:
            if is_last or self._extents.passed(extent) or self._allowance.loan_is_due(step):
                self._give_back(extent)

    def _waiting(self) -> Sequence[Work]:
        return self._step.waiting if self._step is not None else ()

    def _queue(self, count: int) -> None:
        """Queue the next `count` chunks, if there are as many."""
        step = self._step
        while step is not None and count > 0 and step.waiting:
            works = self._kept_together(step, count)
            count -= max(1, len(works))
            if works:
                self._queue_kept(step, works)
            else:
                self._queue_chunk(step, step.waiting.popleft())

    def _kept_together(self, step: FlowStep, most: int) -> list[Work]:
        """Take the next works, up to so many, whose state is resident and which may be updated in one go."""
        found: list[Work] = []
        nbytes = 0
        for work in islice(step.waiting, most):
            nbytes += work.chunk.nbytes
            if work.chunk.index not in self._resident or work.calls is None or (found and nbytes > TOGETHER_BYTES):
                break
            found.append(work)
        for _ in found:
            step.waiting.popleft()
        return found

    def _queue_kept(self, step: FlowStep, works: Sequence[Work]) -> None:
        """Queue updates of resident state: each kernel costs the host as much as a layer of them costs the device."""
        kept = [(work, self._kept(work.chunk)) for work in works]
        updated = self._update_together(self._streams.side("update"), kept)
        for work in works:
            self._updated[work.chunk.index] = updated
            self._recycle(step, work, updated)
        self._go_on(step)

    def _queue_all(self) -> None:
        """Queue what the step still owes: every update, and then all write-back."""
        if self._step is not None:
            self._queue(len(self._step.waiting))
            self._return_state(len(self._step.staged))

    def _return_state(self, most: int) -> None:
        """After the last update: write back what no memory asked for, up to `most` chunks of it."""
        step = self._step
        if step is None or step.waiting or not self._extents.all or step.arrived:
            return
        if step.staged and step.last_in is not None:
            self._streams.side("out").wait(step.last_in, Why.LINK_FREE)
        for _ in range(min(most, len(step.staged))):
            self._write_back(*step.staged.popleft())
        if not step.staged:
            step.arrived = sorted(self._extents.all, key=lambda extent: extent.clear_at)

    def _queue_chunk(self, step: FlowStep, work: Work) -> None:
        if work.chunk.index in self._resident:
            self._finish_update(step, work, self._kept(work.chunk))
        else:
            while work.chunk.index not in step.moved:
                self._make_place(step, work.chunk)
                self._move_ahead(step)
            place, loaded = step.moved.pop(work.chunk.index)
            self._streams.side("update").wait(loaded, Why.LOADED)
            self._finish_update(step, work, place.state)
            self._keep_staged(step, work.chunk, place)
        self._go_on(step)

    def _go_on(self, step: FlowStep) -> None:
        """Something was updated: what that frees holds state, or goes back."""
        self._retire_arena(step)
        self._move_ahead(step)
        self.staging_peak = max(self.staging_peak, self._extents.nbytes)

    def _make_place(self, step: FlowStep, chunk: Chunk) -> None:
        """There is no room for a chunk: write back the oldest updated one, or else take memory anew."""
        if step.staged:
            self._write_back(*step.staged.popleft())
        else:
            sizes = [nbytes for _, nbytes in self._segments[chunk.index]]
            step.arena.append(self.add_extent(sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes)))

    def _keep_staged(self, step: FlowStep, chunk: Chunk, place: Place) -> None:
        """An updated chunk stays until memory asks for it, unless its own memory is to go back."""
        if place.closed:
            self._write_back(chunk, place)
        else:
            step.staged.append((chunk, place))

    def _move_ahead(self, step: FlowStep) -> None:
        """Chunks move in, in order, as far as there is room."""
        while step.to_move and (moved := self.stage(step.to_move[0])) is not None:
            step.moved[step.to_move.popleft().index] = moved
            step.last_in = moved[1]

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

    def _finish_update(self, step: FlowStep, work: Work, staged: Staged) -> None:
        updated = self._update(self._streams.side("update"), work, staged)
        self._updated[work.chunk.index] = updated
        self._recycle(step, work, updated)

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
