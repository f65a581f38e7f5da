"""Who may move now: the rules of staging memory, on counters that say how far each queue is.

Chunks are numbered on over the steps, since every queue is first in, first out: chunk k of step s is number
s * chunks + k.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from offbench.offload.chunks import Chunk, ends, least_arena, plan_staging
from offbench.offload.schedule import Schedule
from offbench.planner.inputs import Layout
from offbench.planner.policy import Policy, grows, staging_room, written_in_forward


@dataclass
class Progress:
    """How far a simulation is."""

    count: int
    """Chunks of a step."""
    queued: int = 0
    """Chunks queued by the CPU."""
    loaded: int = 0
    updated: int = 0
    written: int = 0
    backwards: int = 0
    """Backward passes that have begun."""
    begun: int = 0
    """Steps whose gradients are clipped: their updates may run."""
    moving_in: bool = False
    """Memory of the next chunk to be loaded is taken already."""


class Room(Protocol):
    """The staging memory of one policy."""

    nbytes: int | None
    """Its size, where it is fixed."""
    forced: tuple[int, int]
    """Leading chunks written back before the loss may run, and before backward begins."""

    def may_move_in(self, at: Progress) -> bool:
        """Whether memory and host copy let the next queued chunk move in."""

    def may_move_out(self, at: Progress) -> bool:
        """Whether the next updated chunk is written back now."""

    def held(self, at: Progress) -> float:
        """Bytes taken on the GPU, resident state not counted."""

    def freed(self, at: Progress) -> float:
        """Bytes of state updated since the last backward: their gradients are gone."""


def make_room(policy: Policy, layout: Layout, moving: Sequence[Chunk]) -> Room:
    """The room of a policy. moving: the layout's chunks, resident ones with no bytes."""
    if (policy.staging_bytes is None and policy.write_back == "forward") or not policy.copy_streams:
        return Ring(policy, layout, moving)
    return Arena(policy, policy.staging_bytes or 0, layout, moving)


def resident(layout: Layout, schedule: Schedule) -> int:
    """How many leading chunks never move: those that fit whole into `resident_bytes`."""
    return sum(1 for end in ends(layout.chunks) if end <= schedule.resident_bytes)


class Ring:
    """The ring of `slots` neighbouring chunks, taken at step() and given back after its last write-back."""

    forced: tuple[int, int]

    def __init__(self, policy: Policy, layout: Layout, moving: Sequence[Chunk]) -> None:
        staging = plan_staging(moving, policy.slots if policy.copy_streams else None)
        self.nbytes: int | None = staging.nbytes
        self.forced = (0, len(moving))
        self._arena = staging.nbytes
        self._displaced = [len(staging.displaced(moving, index)) for index in range(len(moving))]
        self._states = Sums([chunk.nbytes for chunk in layout.chunks])

    def may_move_in(self, at: Progress) -> bool:
        number = at.loaded
        if number // at.count >= at.begun:
            return False
        start = number - number % at.count
        slot_free = start + self._displaced[number % at.count]
        freed = 0 if slot_free == start else slot_free
        return at.written >= max(freed, number - at.count + 1)

    def may_move_out(self, at: Progress) -> bool:
        return True

    def held(self, at: Progress) -> float:
        # A step takes a new arena while the write-back of the last one may still hold the old.
        return float(self._arena * (at.begun - at.written // at.count))

    def freed(self, at: Progress) -> float:
        return self._states.since_step(at)


class Arena:
    """Staging by bytes: a chunk's memory is taken as it begins to move in and free when it is written back.

    Without prefetch these are the rules of `offload.flow_memory`: staging grows into gradients, at the pace that takes
    it to `loss_bytes`, and what no memory waits for is written back after the last move-in.
    """

    nbytes: int | None = None

    def __init__(self, policy: Policy, staging_bytes: int, layout: Layout, moving: Sequence[Chunk]) -> None:
        sizes = [chunk.nbytes for chunk in moving]
        self._prefetch = policy.prefetch
        self._total = sum(sizes)
        least = least_arena(sizes)
        self._staging = staging_bytes if policy.prefetch else min(self._total, max(staging_bytes, least))
        self._policy = policy = replace(policy, staging_bytes=self._staging)
        self._growth = grows(policy, layout.nbytes, layout.gradients)
        self.forced = written_in_forward(policy, sizes, self._growth, layout.nbytes - self._total)
        self._count = len(sizes)
        self._moves, self._states = Sums(sizes), Sums([chunk.nbytes for chunk in layout.chunks])

    def may_move_in(self, at: Progress) -> bool:
        return self._is_due(at) and self._fits(at)

    def may_move_out(self, at: Progress) -> bool:
        step, chunk = divmod(at.written, at.count)
        if at.backwards >= step + 2 or chunk < self.forced[1]:
            return True
        if not self._prefetch and at.loaded >= (step + 1) * at.count:
            return True
        return at.loaded < at.queued and self._is_due(at) and not self._fits(at)

    def held(self, at: Progress) -> float:
        staged = self._moves.upto(at.loaded + at.moving_in) - self._moves.upto(at.written)
        if self._prefetch or at.backwards != at.begun:
            return staged
        # From step() on the memory is set aside; what is written back by then returns when the next backward begins.
        return max(staged, min(self._total, self._room(self.freed(at))))

    def freed(self, at: Progress) -> float:
        return self._states.since_step(at)

    def _is_due(self, at: Progress) -> bool:
        number = at.loaded
        begun = at.backwards if self._prefetch else at.begun
        return number // at.count < begun and at.written >= number - at.count + 1

    def _fits(self, at: Progress) -> bool:
        step = at.loaded // at.count
        freed = max(0.0, self._states.upto(at.updated) - self._states.upto(step * at.count))
        before = self._moves.upto(at.loaded) - self._moves.upto(at.written)
        after = self._moves.upto(at.loaded + 1) - self._moves.upto(at.written)
        # A chunk larger than all staging moves alone.
        return before == 0 or after <= self._room(freed)

    def _room(self, freed: float) -> float:
        return staging_room(self._policy, self._growth, freed, self._states.upto(self._count))


class Sums:
    """Bytes of all chunks before a number."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._total = sizes, sum(sizes)
        self._upto = [0.0]

    def upto(self, number: int) -> float:
        # Asked for far more often than all else here: looked up, in a table that grows by a step at a time.
        while number >= len(self._upto):
            self._upto += itertools.accumulate(self._sizes, initial=self._upto.pop())
        return self._upto[number]

    def since_step(self, at: Progress) -> float:
        """Bytes updated in the newest step; all of them when a backward is on its way."""
        return max(0.0, self.upto(at.updated) - max(0, at.begun - 1) * self._total)
