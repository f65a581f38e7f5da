"""What one optimizer step of arm stream still owes, and the memory it holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from offbench.offload.chunks import Chunk
from offbench.offload.engine import Work
from offbench.offload.extents import Extent, Range
from offbench.offload.gradients import GradientMemory
from offbench.offload.staged import Staged
from offbench.offload.streams import Event


class Place(NamedTuple):
    """Where a chunk is staged."""

    ranges: list[Range]
    state: Staged

    @property
    def closed(self) -> bool:
        """Whether any of its memory is on its way back to the allocator."""
        return any(one.extent.closed for one in self.ranges)


@dataclass
class FlowStep:
    """From step() to the end of the next backward."""

    waiting: deque[Work]
    """Not updated yet."""
    to_move: deque[Chunk]
    """Not moving in yet."""
    gradients: dict[int, list[GradientMemory]]
    """By chunk that has not been updated yet."""
    gradient_bytes: int
    """Of all their memory."""
    arena: list[Extent]
    """Memory of the arena that is not given back yet."""
    lent: list[Extent]
    """Memory of state that was here before step(), each chunk's its own; it goes back once that is written back."""
    beyond_lead: int = 0
    """Updates that are none of those that step() queues, or leaves to the host's wait after it."""
    retired: bool = False
    """The arena goes back as soon as nothing is staged in it."""
    moved: dict[int, tuple[Place, Event]] = field(default_factory=dict)
    """Chunks moving in ahead of their update: where, and the event behind it."""
    staged: deque[tuple[Chunk, Place]] = field(default_factory=deque)
    """Updated chunks that are not written back yet, oldest first."""
    has_room: bool = False
    """Memory came free into which nothing moves yet."""
    freed_bytes: int = 0
    """Gradient memory that no update needs any more."""
    grown_bytes: int = 0
    """Gradient memory taken over."""
    last_in: Event | None = None
    arrived: list[Extent] = field(default_factory=list)
    """Once everything is queued: extents in the order in which they are written back."""
    backward: set[int] = field(default_factory=set)
    """Chunks whose gradients come next or are there."""
    backward_bytes: int = 0
    """What those gradients take."""

    @property
    def most_bytes(self) -> int:
        """Staging memory it may hold now: the arena's and the gradients', less what gradients have taken back."""
        return sum(extent.nbytes for extent in self.arena) + self.grown_bytes - self.backward_bytes
