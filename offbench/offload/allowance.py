"""How much memory arm stream may stage in: at step(), while the forward goes on, and at the loss."""

from __future__ import annotations

from collections.abc import Sequence

from offbench.offload.chunks import least_arena
from offbench.offload.extents import Extents
from offbench.offload.flow_step import FlowStep
from offbench.offload.headroom import Headroom, arena_replaced, arena_retires
from offbench.offload.schedule import Schedule
from offbench.offload.streams import Streams

EXTENT_BYTES = 512 << 20
"""The arena is made of pieces of this size, so that it returns to the allocator bit by bit."""


class Allowance:
    """Sizes of the arena and of what gradients may add to it. All are bytes.

    By the schedule, where it says how much may be staged at the loss; else by what the allocator hands out. On devices
    where nobody counts that, there is no limit.
    """

    def __init__(self, streams: Streams, extents: Extents) -> None:
        self._streams = streams
        self._extents = extents
        self._headroom = Headroom()
        self._kept_bytes = 0
        self.ahead_bytes = 0
        """State that is here before its step(), in memory that activations lent (`prefetch`): no part of the extents
        until then."""
        self._asked: int | None = None
        """At the loss, as the schedule has it."""
        self.at_loss: int | None = None
        """Most staging memory when the forward ends; None: no limit."""
        self.arena_bytes = 0
        """What step() takes, or the end of the backward before it."""
        self._piece_bytes = EXTENT_BYTES
        self.least_bytes = 0
        """An arena must hold so much for every chunk to find a place."""
        self._seen: tuple[int, int] | None = None
        """What the workload had when a backward was last seen to begin, and staging: asking costs the host time."""
        self._crowded: bool | None = None
        """What `is_crowded` last said; None: memory came or went since, or may have."""

    def plan(self, schedule: Schedule, moving: Sequence[int], kept_bytes: int) -> None:
        """Another schedule, or other chunks: those that move have so many bytes, what stays has `kept_bytes`."""
        self.least_bytes = least_arena(moving)
        self.arena_bytes = min(max(schedule.staging_bytes or 0, self.least_bytes), sum(moving))
        self._piece_bytes = max(EXTENT_BYTES, *moving, 0)
        self.at_loss = self._asked = schedule.loss_bytes
        self._kept_bytes = kept_bytes

    @property
    def arena_retires(self) -> bool:
        """Whether gradients can replace the arena before the loss."""
        return arena_retires(self.at_loss, self.arena_bytes)

    def step(self) -> None:
        """step() is about to take its arena. One that is held at the loss is no larger than what may be staged then,
        but for two neighbours."""
        if self._asked is None and (left := self._headroom.step(self._own_bytes())) is not None:
            self.at_loss = left
        if self.at_loss is not None and not self.arena_retires:
            self.arena_bytes = min(self.arena_bytes, max(self.at_loss, self.least_bytes))

    def arena(self, there: int, lent: int) -> list[int]:
        """Sizes of the pieces that this step's arena lacks: `there` bytes of it are there; state in `lent` bytes
        beside it makes it as much smaller as two neighbours allow."""
        left = max(self.arena_bytes - lent, min(self.arena_bytes, self.least_bytes)) - there
        whole = max(0, left // self._piece_bytes - 1)
        return [self._piece_bytes] * whole + [left - whole * self._piece_bytes] if left > 0 else []

    def backward(self) -> None:
        """A module's backward is about to begin."""
        if self._asked is None:
            own = self._own_bytes()
            if own is not None:
                self._seen = own, self.staged_bytes
                self._headroom.backward(own)

    def backward_ends(self) -> None:
        """All of it is over."""
        self._seen = None
        self._headroom.backward_ends()

    def ahead_of_step(self) -> int:
        """Bytes of state that may move in now, with a backward under way, if no gradient is still to come; negative
        where there are too many. 0 where nobody counts, and where the schedule says how much may be staged. After
        `backward` only staging may have taken or given back memory."""
        if self._asked is not None or self._headroom.falling is None:
            return 0
        staged = self.staged_bytes
        own = self._seen[0] if self._seen is not None and self._seen[1] == staged else self._own_bytes()
        return 0 if own is None else self._headroom.falling - own - staged

    def changed(self) -> None:
        """Memory came from the allocator or goes back to it, or may have."""
        self._crowded = None

    def retires_now(self, step: FlowStep) -> bool:
        """Whether gradients have left as much as the arena has: state leaves it half-way through the updates, so that
        activations find its memory. It is compute's own, as that of gradients, with FSDP2, is not."""
        arena = max(self.arena_bytes, self.least_bytes)
        return self.arena_retires and arena_replaced(step.freed_bytes, step.gradient_bytes, step.grown_bytes, arena)

    def grows(self, step: FlowStep, nbytes: int) -> bool:
        """Whether so much more memory may hold state now.

        Activations grow with the forward, as what gradients leave behind does: of that, staging may have the share
        that takes it to the most it may hold at the loss. Taking all there is until then would raise a peak in the
        middle of the forward. A batch longer than all before has more activations by then than staging was measured
        for: what they take, gradients leave behind for them.
        """
        if self.at_loss is not None:
            most = max(0, self.at_loss - (0 if self.arena_retires else self.arena_bytes))
            if (step.grown_bytes + nbytes) * step.gradient_bytes > most * step.freed_bytes:
                return False
        if self._crowded is None:
            self._crowded = self.is_crowded()
        return not self._crowded

    def is_crowded(self, spare: int | None = None) -> bool:
        """Whether staging now adds more than its arena, or `spare`, to the most that the workload ever took by itself,
        unless the schedule says how much it may."""
        if self._asked is not None or self._headroom.peak is None:
            return False
        own = self._own_bytes()
        most = self._headroom.peak + (self.arena_bytes if spare is None else spare)
        return own is not None and own + self.staged_bytes > most

    def loan_is_due(self, step: FlowStep) -> bool:
        """Whether all staging but the arena no longer fits under what any layer but the loss's ever began with."""
        own, falling = self._own_bytes(), self._headroom.falling
        if own is None or falling is None:
            return False
        return own + self.staged_bytes - sum(extent.nbytes for extent in step.arena) > falling

    @property
    def staged_bytes(self) -> int:
        """All staging memory there is."""
        return self._extents.nbytes + self.ahead_bytes

    def _own_bytes(self) -> int | None:
        """What the workload itself has on the device; None where nobody counts."""
        allocated = self._streams.allocated()
        return None if allocated is None else allocated - self.staged_bytes - self._kept_bytes
