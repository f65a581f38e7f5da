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

Note [Who waits on the host]
    A stream that waits with a kernel behind it slows every copy beside a busy model (docs/hiding-copies.md). So where
    the host waits in every layer (`meanwhile`), an update is queued once its state has come in, and LOADED has passed
    by then; until then the host makes room for the copies that come next. Where it does not wait, for the first update
    of a step and for what a read needs, the update's stream waits. So what is queued when depends on the device; what
    waits for what does not.

Host bytes that come into the arena, or into gradients' memory, are current without a wait of their own: compute has
waited for the previous step's write-back before it hands those over. So are those that an update reaches where they
are, since there was no device memory for them.
Only memory decides what is written back early: a chunk that finds no room has the oldest updated chunks written back.
The engine never holds the host.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch

from offbench.offload.engine import Work
from offbench.offload.flow_memory import FlowMemory
from offbench.offload.flow_step import FlowStep
from offbench.offload.gradients import by_memory
from offbench.offload.staged import Staged
from offbench.offload.streams import Event, Why
from offbench.units import gib

BURST = 1
"""Chunks that one read queues beyond its own: the host has the forward's kernels to launch, and must not stop."""
BURST_BACK = 4
"""Chunks that one read has written back once every update is queued; the last one has the rest."""
TOGETHER_BYTES = 1 << 30
"""Resident state that one kernel updates; the first layer waits for the kernel with its own."""
BURST_AT_LEISURE = 3
"""Chunks queued where the device has work for a while and the host is about to wait for it."""
BURST_HERE = 2
"""Chunks whose state has come in that one read queues where the host waits elsewhere."""
COMING = 0.125
"""Share of the state that moves which is to be on its way in while some still waits for room: with less, updated state
is written back. Chosen by replays (`replay`) of Qwen3-30B-A3B: less leaves the link idle, more changes little."""


class FlowEngine(FlowMemory):
    """One step can have work left, or memory to give back: the next step() first finishes it."""

    def step(self, works: Sequence[Work]) -> None:
        """Queue one optimizer step: what fits into the arena starts to move in, the first `lead` chunks that move
        are updated, and those that stay before them; the others from the forward's reads. Where the host waits for the
        device, that is when updates are queued, and here only the first."""
        self.check()
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
        lent_to = {chunk for chunk, (place, _) in moved.items() if place.closed}
        lead = self._lead(works, lent_to)
        self._step.beyond_lead = len(works) - lead
        waits_often, self._waited_reads = self._has_waited("step") and self._waited_reads > 1, 0
        self._queue(1 if waits_often and not lent_to else lead)

    def before_read(self, chunks: Sequence[int], look_ahead: bool = True) -> list[Event]:
        """As any engine's; what activations lent goes back as they come, with the last read all that is updated."""
        events = super().before_read(chunks, look_ahead)
        if self._is_last_read:
            self._return_state(len(self.chunks))
        if self._step is not None and self._step.lent:
            self._return_lent(self._step)
        return events

    def look_ahead(self, at_leisure: bool = False) -> None:
        """Queue a few updates at a time until `ahead` are queued in front of what the forward has asked for."""
        if self._has_waited("ahead"):
            self._waited_reads += 1
            for _ in range(BURST_HERE):
                if (step := self._step) is not None and self._has_come(step) and self._is_near(step.waiting[0]):
                    self._queue(1)
        elif self._waiting():  # in a backward nothing is
            most = self._burst(BURST_AT_LEISURE if at_leisure else BURST)
            self._queue(min(most, self._up_to(self._furthest + self.schedule.ahead)))
        self._return_arena()
        self._return_state(BURST_BACK)
        self.prefetch.shrink()
        while self._step is not None and self._step.arrived and self._allowance.is_crowded():
            self._give_back(self._step.arrived.pop(0))

    def queue_more(self) -> bool:
        """As any engine's, but as little as can be in one go, since what the host waits for may come meanwhile: an
        update, or a copy in or out. Resident state a kernel at a time, first what step() left of its lead, and behind
        the last update write-back. An update whose state is still coming is left for later."""
        step = self._step
        if step is None or not (step.waiting or step.staged):
            return False
        self.check()
        if not step.waiting:
            self._return_state(1)
        elif works := self._kept_together(step, len(step.waiting)):
            self._allowance.changed()
            self._queue_kept(step, works, goes_on=False)
        elif step.has_room and self._move_one(step):
            pass
        elif len(step.waiting) <= step.beyond_lead and not self._is_near(step.waiting[0]):
            return False
        elif self._is_here(step):
            self._allowance.changed()
            self._queue_chunk(step, goes_on=False)
        else:
            self._keep_coming(step)
        return True

    def _is_here(self, step: FlowStep) -> bool:
        """Whether the next update waits for no copy, or for one that only queueing it brings about."""
        chunk = step.waiting[0].chunk.index
        if chunk in step.moved:
            return self._has_come(step)
        return chunk in self._resident or not step.staged

    def _has_come(self, step: FlowStep) -> bool:
        """Whether the next update's state was copied in, and the copy has ended."""
        moved = step.moved.get(step.waiting[0].chunk.index) if step.waiting else None
        return moved is not None and moved[1].query()

    def _keep_coming(self, step: FlowStep) -> None:
        """Make room for what moves in next, by a chunk, while copies are still on their way."""
        if not (step.to_move and step.staged):
            return
        places = [place for place, loaded in step.moved.values() if not loaded.query()]
        if sum(one.stop - one.start for place in places for one in place.ranges) < COMING * self._moving_bytes:
            self._write_back(*step.staged.popleft())
            step.has_room = True

    def _burst(self, chunks: int) -> int:
        """How many updates so many chunks are, all pieces of a parameter as one chunk: a layer of large parameters is
        not to be queued more slowly than it is used up."""
        if not self._has_pieces:
            return chunks
        count = 0
        for work in self._waiting():
            chunks -= work.chunk.home == work.chunk.index
            if chunks < 0:
                break
            count += 1
        return count

    def before_backward(self, chunks: Sequence[int]) -> None:
        """Give back the memory that the gradients of these chunks need."""
        self._queue_all()
        self._allowance.backward()
        if (step := self._step) is not None:
            for chunk in chunks:
                if chunk not in step.backward:
                    step.backward.add(chunk)
                    step.backward_bytes += self.chunks[chunk].so_far // 2
            self._make_room(step)
        self.prefetch.backward()

    def after_backward(self) -> None:
        """All gradients are there. What the last step holds goes back first: the next one's arena takes its place."""
        self._allowance.backward_ends()
        if self.prefetch.is_due:
            self._finish()
        self.prefetch.backward_ends()

    def drain(self) -> None:
        """Return when nothing is queued or in flight; staging memory is given back."""
        self.check()
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

    def _waiting(self) -> Sequence[Work]:
        return self._step.waiting if self._step is not None else ()

    def _queue(self, count: int) -> None:
        """Queue the next `count` chunks, if there are as many."""
        step = self._step
        self._allowance.changed()
        while step is not None and count > 0 and step.waiting:
            self.check()
            works = self._kept_together(step, count)
            count -= max(1, len(works))
            if works:
                self._queue_kept(step, works)
            else:
                self._queue_chunk(step)

    def _kept_together(self, step: FlowStep, most: int) -> list[Work]:
        """The next works, up to so many, whose state is resident and which may be updated in one go."""
        found: list[Work] = []
        nbytes = 0
        for work in islice(step.waiting, most):
            nbytes += work.chunk.nbytes
            if work.chunk.index not in self._resident or work.calls is None or (found and nbytes > TOGETHER_BYTES):
                break
            found.append(work)
        return found

    def _queue_kept(self, step: FlowStep, works: Sequence[Work], goes_on: bool = True) -> None:
        """Queue updates of resident state, the next ones: each kernel costs the host as much as a layer of them costs
        the device."""
        kept = [(work, self._kept(work.chunk)) for work in works]
        updated = self._update_together(self._streams.side("update"), kept)
        for work in works:
            step.waiting.popleft()
            self._updated[work.chunk.index] = updated
            self._recycle(step, work, updated)
        step.has_room = True
        if goes_on:
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

    def _queue_chunk(self, step: FlowStep, goes_on: bool = True) -> None:
        """Queue the next update and, if it `goes_on`, what moves into the room it makes; else that is left for later.
        Without memory for its state it stays the next one."""
        work = step.waiting[0]
        if work.chunk.index in self._resident:
            self._finish_update(step, work, self._kept(work.chunk))
        else:
            if step.has_room:
                self._go_on(step)
            while work.chunk.index not in step.moved and self._make_place(step, work.chunk):
                self._move_ahead(step)
            if moved := step.moved.get(work.chunk.index):
                place, loaded = moved
                self._streams.side("update").wait(loaded, Why.LOADED)
                self._finish_update(step, work, place.state)
                del step.moved[work.chunk.index]
                self._keep_staged(step, work.chunk, place)
            else:
                self._update_at_home(step, work)
        step.has_room = True
        if goes_on:
            self._go_on(step)

    def _update_at_home(self, step: FlowStep, work: Work) -> None:
        """The forward left no memory for a chunk's state: the update reaches it in host memory, slowly."""
        chunk, updates = step.to_move.popleft(), self._streams.side("update")
        assert chunk is work.chunk, "chunks move in the order of their updates"
        warnings.warn(
            f"no device memory for {gib(chunk.nbytes)} GiB of optimizer state: updated in host memory, which is slow; "
            "lower the state budget or loss_bytes",
            UserWarning,
            stacklevel=2,
        )
        begin = updates.record() if self.ledger.keep else None
        self._finish_update(step, work, Staged.at_home(chunk, self._store.visible(chunk.home)))
        self._written_back[chunk.index] = end = self._updated[chunk.index]  # until then nothing else may read it there
        self.ledger.copied("in", chunk.nbytes, begin, end)
        self.ledger.copied("out", chunk.nbytes, begin, end)

    def _go_on(self, step: FlowStep) -> None:
        """Something was updated: what that frees holds state, or goes back."""
        self._retire_arena(step)
        self._move_ahead(step)
        step.has_room = False
        self.staging_peak = max(self.staging_peak, self._extents.nbytes)

    def _move_one(self, step: FlowStep) -> bool:
        """As `_go_on`, but one chunk only. Returns whether there was one that found room."""
        self._retire_arena(step)
        step.has_room = self._move_next(step)
        self.staging_peak = max(self.staging_peak, self._extents.nbytes)
        return step.has_room

    def _finish_update(self, step: FlowStep, work: Work, staged: Staged) -> None:
        updated = self._update(self._streams.side("update"), work, staged)
        step.waiting.popleft()
        self._updated[work.chunk.index] = updated
        self._recycle(step, work, updated)
