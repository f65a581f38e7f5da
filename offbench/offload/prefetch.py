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
             (in the backward; after it compute has waited for that, and hands over the arena)
    compute  in                  memory of a dropped copy returns when nothing is written into it  WRITTEN_BACK
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offbench.offload.allowance import Allowance
from offbench.offload.chunks import Chunk
from offbench.offload.engine import Engine
from offbench.offload.extents import Extents
from offbench.offload.flow_step import Place
from offbench.offload.staged import Staged
from offbench.offload.streams import Event, Streams, Why


class Ahead(NamedTuple):
    """A chunk's state that is on its way, or there, before its step()."""

    chunk: Chunk
    memory: torch.Tensor
    """uint8 [bytes of the chunk]."""
    begin: Event
    """Passed when compute has handed the memory over."""
    loaded: Event
    state: Staged
    is_lent: bool
    """Activations want the memory back; else it is part of the arena."""


def taken_over(found: Sequence[Ahead], extents: Extents) -> dict[int, tuple[Place, Event]]:
    """By chunk, where its state is and the event behind it, with its memory among the extents. What was lent is
    closed: it goes back as soon as the state is updated and written back."""
    places = {}
    for chunk, memory, begin, loaded, state, is_lent in found:
        extent = extents.add(memory, Why.ARENA_READY, begin)
        ranges = extents.take([chunk.nbytes])
        assert ranges is not None
        if is_lent:
            extents.close(extent)
        places[chunk.index] = (Place(ranges, state), loaded)
    return places


class Prefetch:
    """Moves state in before step() asks for it, as far as no peak of the workload is raised."""

    def __init__(self, engine: Engine, streams: Streams, allowance: Allowance) -> None:
        self._engine: Engine = weakref.proxy(engine)  # which has this one: in a cycle pinned memory would live on
        self._streams = streams
        self._allowance = allowance
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
        """Those that were not there yet when they were last looked for."""

    def backward(self, ended: bool = False) -> None:
        """A module's backward is about to begin, or all of it has `ended`: move in what there is room for. Everything
        that the previous step writes back must be queued."""
        if self.is_due and (waiting := self._candidates[len(self._held) :]):
            room = self._allowance.ahead_of_step()
            if room >= waiting[0].nbytes:  # else gradients need not be looked at
                room -= 0 if ended else self._coming()
            self._fill(room, is_lent=True)
            if ended:
                self._fill(self._allowance.arena_bytes, is_lent=False)
            self._engine.staging_peak = max(self._engine.staging_peak, self._allowance.staged_bytes)
        if ended:
            self._passes += 1

    @property
    def is_due(self) -> bool:
        """Whether the present backward is taken to be the last one before step()."""
        return self._passes + 1 == self._usual

    def take(self, moving: Sequence[Chunk]) -> list[Ahead]:
        """step() is about to move these chunks: those of them whose state is here already; the rest is dropped."""
        wanted = {chunk.index for chunk in moving}
        taken = [one for one in self._held if one.chunk.index in wanted]
        for one in self._held:
            if one.chunk.index not in wanted:
                self._drop(one)
        self._held = []
        self._allowance.ahead_bytes = self._allowance.early_bytes = 0
        return taken

    def stepped(self, moving: Sequence[Chunk], updated: Sequence[Chunk]) -> None:
        """step() has begun: what it moves, and all that it updates."""
        self._usual, self._passes = self._passes, 0
        self._candidates = [] if self._refused else list(moving)
        self._gradients |= {chunk.index: chunk.nbytes // 2 for chunk in updated}
        self._missing = dict(self._gradients)

    def shrink(self) -> None:
        """Drop copies, the last first, while a pass that was not expected needs their memory."""
        while self._held and self._passes >= (self._usual or 0) and self._allowance.is_crowded(spare=0):
            self._drop(self._held.pop())

    def drop_all(self) -> None:
        """Host state may change: forget all copies, and return when none is under way."""
        held = list(self._held)
        self.take(())
        for one in held:
            one.loaded.synchronize()

    def forget(self) -> None:
        """Chunks are no longer what they were: nothing moves in before the next step() has told which do."""
        self._candidates, self._gradients = [], {}

    def _coming(self) -> int:
        """Bytes of gradients that are not there yet."""
        there = self._engine.has_gradients
        found = next((chunk for chunk in self._gradients if chunk not in self._missing), None)
        if found is not None and not there(found):  # a backward that failed is done once more
            self._missing = dict(self._gradients)
        self._missing = {chunk: nbytes for chunk, nbytes in self._missing.items() if not there(chunk)}
        return sum(self._missing.values())

    def _fill(self, room: int, is_lent: bool) -> None:
        for chunk in self._candidates[len(self._held) :]:
            if chunk.nbytes > room or not self._begin(chunk, is_lent):
                return
            room -= chunk.nbytes

    def _begin(self, chunk: Chunk, is_lent: bool) -> bool:
        try:
            memory = self._streams.allocate(chunk.nbytes)
        except torch.OutOfMemoryError:
            self._refused, self._candidates = True, []
            return False
        begin = self._streams.compute().record()
        state = Staged.whole(memory)
        loaded = self._engine.move_in_early(chunk, state, begin, is_finished=not is_lent)
        self._held.append(Ahead(chunk, memory, begin, loaded, state, is_lent))
        self._account(self._held[-1], chunk.nbytes)
        return True

    def _account(self, one: Ahead, nbytes: int) -> None:
        if one.is_lent:
            self._allowance.ahead_bytes += nbytes
        else:
            self._allowance.early_bytes += nbytes

    def _drop(self, one: Ahead) -> None:
        compute = self._streams.compute()
        compute.wait(one.loaded, Why.WRITTEN_BACK)
        self._engine.ledger.dropped(one.chunk.nbytes, one.loaded)
        self._engine.ledger.held(one.chunk.nbytes, one.begin, compute.record())
        self._streams.release([one.memory], used_by=())
        self._account(one, -one.chunk.nbytes)
