"""State that moves in before step(): during the backward, into memory that activations have left, and after it.

Where activations make the peak, memory is free from early in the backward on. The first chunks that the next step()
will update move in there, so that they are on the GPU when it begins. The arena that step() would take is free as soon
as the backward ends: the next chunks move in there while gradients are clipped, so that the link is busy from then on.

It is a copy made early: until step() takes it, the host's bytes are what counts. Whatever may change them (a drain
and what follows it), and a chunk that gets no gradient, drops the copy, and nothing is written back. With gradient
accumulation only the last backward before step() moves state in, taken to be the one that was the last before the
previous step(): after an earlier one activations come once more. If they do all the same, copies give way (`shrink`).

Note [Who waits for whom]
    in       compute             the memory is compute-stream memory                           ARENA_READY
    in       out                 the previous step may still be writing these host bytes       HOST_CURRENT
             (in lent memory; compute has waited for that before it hands over the arena)
    compute  in                  memory of a dropped copy returns when nothing is written into it  WRITTEN_BACK
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch

from offbench.offload.allowance import Allowance
from offbench.offload.chunks import Chunk
from offbench.offload.extents import Extents
from offbench.offload.flow_step import Place
from offbench.offload.staged import Staged
from offbench.offload.streams import Event, Streams, Why

if TYPE_CHECKING:
    from offbench.offload.flow_memory import FlowMemory


class Lent(NamedTuple):
    """Memory that activations have left and want back."""

    memory: torch.Tensor
    """uint8 [bytes of the chunk in it]."""
    begin: Event
    """Passed when compute has handed it over."""
    state: Staged


class Ahead(NamedTuple):
    """A chunk's state that is on its way, or there, before its step()."""

    chunk: Chunk
    where: Lent | Place
    """A place is one in the arena."""
    loaded: Event


class Prefetch:
    """Moves state in before step() asks for it, as far as no peak of the workload is raised."""

    def __init__(self, engine: FlowMemory, streams: Streams, allowance: Allowance, extents: Extents) -> None:
        self._engine: FlowMemory = weakref.proxy(engine)  # which has this one: in a cycle pinned memory would live on
        self._streams = streams
        self._allowance = allowance
        self._extents = extents
        self._usual: int | None = None
        """Backwards before the last step(); None: there was none."""
        self._passes = 0
        """Backwards that have ended since."""
        self._held: list[Ahead] = []
        """The first of `_candidates`."""
        self._refused = False
        """The allocator had no memory in one piece, though there was enough: it is not asked again."""
        self._candidates: list[Chunk] = []
        """What the last step() moved, in order: what the next one will, too, or nothing is known."""
        self._gradients: dict[int, int] = {}
        """Bytes of gradients by chunk that some step() has updated."""
        self._missing: dict[int, int] = {}
        """Those that were not there yet when all of them were last looked for."""
        self._come: int | None = None
        """One that was."""

    def backward(self) -> None:
        """A module's backward is about to begin: move in what there is room for. Everything that the previous step
        writes back must be queued."""
        if self.is_due and (waiting := self._waiting()):
            room = self._allowance.ahead_of_step()
            if room >= waiting[0].nbytes:  # else gradients need not be looked at
                self._borrow(room - self._coming(room - waiting[0].nbytes))

    def backward_ends(self) -> None:
        """All of it is over, and all gradients are there. The previous step must be finished if this is the last."""
        if self.is_due:
            self._borrow(self._allowance.ahead_of_step())
            self._fill_arena()
        self._passes += 1

    @property
    def is_due(self) -> bool:
        """Whether the present backward is taken to be the last one before step()."""
        return self._passes + 1 == self._usual

    def keep(self, moving: Sequence[Chunk]) -> None:
        """step() is about to move these chunks: copies of others are dropped."""
        wanted = {chunk.index for chunk in moving}
        for one in self._held:
            if one.chunk.index not in wanted:
                self._drop(one)
        self._held = [one for one in self._held if one.chunk.index in wanted]

    def take(self) -> dict[int, tuple[Place, Event]]:
        """By chunk, where the state is that is here before its step(), all of it among the extents now, and the event
        behind it. What was lent is closed: it goes back as soon as the state is updated and written back."""
        taken = {}
        for one in self._held:
            place = one.where if isinstance(one.where, Place) else self._taken_over(one.where)
            taken[one.chunk.index] = (place, one.loaded)
        self._held = []
        self._allowance.ahead_bytes = 0
        return taken

    def stepped(self, moving: Sequence[Chunk], updated: Sequence[Chunk]) -> None:
        """step() has begun: what it moves, and all that it updates."""
        self._usual, self._passes = self._passes, 0
        self._candidates = [] if self._refused else list(moving)
        self._gradients |= {chunk.index: chunk.nbytes // 2 for chunk in updated}
        self._missing, self._come = dict(self._gradients), None

    def shrink(self) -> None:
        """Drop copies, the last first, while a pass that was not expected needs their memory."""
        while self._held and self._passes >= (self._usual or 0) and self._allowance.is_crowded(spare=0):
            self._drop(self._held.pop())
            self._engine.give_back_idle()

    def drop_all(self) -> None:
        """Host state may change: forget all copies, and return when none is under way."""
        held = self._held
        self.keep(())
        self._engine.give_back_idle()
        for one in held:
            one.loaded.synchronize()

    def forget(self) -> None:
        """Chunks are no longer what they were: nothing moves in before the next step() has told which do."""
        self._candidates, self._gradients = [], {}

    def _coming(self, most: float = inf) -> int:
        """Bytes of gradients that are not there yet; where they are more than `most`, a figure above that. Then not
        all are looked at, which takes time at every module's backward."""
        there = self._engine.has_gradients
        if self._come is not None and not there(self._come):  # a backward that failed is done once more
            self._missing = dict(self._gradients)
        missing: dict[int, int] = {}
        total = 0
        for chunk, nbytes in self._missing.items():  # in the forward's order: those that come last
            if not there(chunk):
                missing[chunk] = nbytes
                total += nbytes
                if total > most:
                    return total
        self._missing = missing
        self._come = next((chunk for chunk in self._gradients if chunk not in missing), None)
        return total

    def _waiting(self) -> list[Chunk]:
        return self._candidates[len(self._held) :]

    def _borrow(self, room: int) -> None:
        """Move in what fits into so many bytes that activations have left."""
        for chunk in self._waiting():
            if chunk.nbytes > room:
                break
            room -= chunk.nbytes
            try:
                memory = self._streams.allocate(chunk.nbytes)
            except torch.OutOfMemoryError:
                self._refused, self._candidates = True, []
                break
            lent = Lent(memory, self._streams.compute().record(), Staged.whole(memory))
            self._held.append(Ahead(chunk, lent, self._engine.move_in_early(chunk, lent.state, lent.begin)))
            self._allowance.ahead_bytes += chunk.nbytes
        self._note()

    def _fill_arena(self) -> None:
        """Take the arena that step() would take, in pieces as large, and move in what finds a place."""
        if not self._waiting():
            return
        try:
            for nbytes in self._allowance.arena(there=0, lent=self._allowance.ahead_bytes):
                self._engine.add_extent(nbytes)
        except torch.OutOfMemoryError:  # step() will ask for the rest
            self._refused = True
        for chunk in self._waiting():
            if (staged := self._engine.stage(chunk)) is None:
                break
            self._held.append(Ahead(chunk, *staged))
        self._note()

    def _note(self) -> None:
        self._engine.staging_peak = max(self._engine.staging_peak, self._allowance.staged_bytes)

    def _taken_over(self, lent: Lent) -> Place:
        return Place([self._extents.lend(lent.memory, Why.ARENA_READY, lent.begin)], lent.state)

    def _drop(self, one: Ahead) -> None:
        self._engine.ledger.dropped(one.chunk.nbytes, one.loaded)
        compute = self._streams.compute()
        compute.wait(one.loaded, Why.WRITTEN_BACK)
        ended = compute.record()
        if isinstance(one.where, Place):
            for range_ in one.where.ranges:
                self._extents.give(range_, Why.ARENA_READY, ended)
        else:
            self._engine.ledger.held(one.chunk.nbytes, one.where.begin, ended)
            self._streams.release([one.where.memory], used_by=())
            self._allowance.ahead_bytes -= one.chunk.nbytes
