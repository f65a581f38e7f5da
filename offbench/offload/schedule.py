"""The schedule is data: what moves, when, and in what order. The engine executes it, the planner simulates it.

No torch here, so that the command line can describe every arm without loading it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from offbench.errors import ScheduleError


@dataclass(frozen=True)
class Schedule:
    """Order of the work `move a chunk in, update it, move it out` over one optimizer step.

    Raises ScheduleError when the fields contradict each other.
    """

    name: str
    offloaded: bool
    """False: state stays on the device and nothing moves."""
    chunk_bytes: int = 1 << 30
    """Cap of one chunk's state; a parameter that exceeds it, but not `cut_above`, is a chunk alone."""
    whole_bytes: int | None = None
    """Most state of a parameter that moves whole; None: `chunk_bytes`."""
    resident_bytes: int = 0
    """State that stays on the device: the leading chunks, first in the forward, as far as they fit whole."""
    slots: int | None = 2
    """Neighbouring chunks that fit into the staging arena at once; None: all of them."""
    copy_streams: bool = True
    """True: one stream per direction, so copies run both ways beside the updates; False: everything in turn on the
    compute stream, first all moves in, then all updates, then all moves out."""
    deferred: bool = False
    """True: an update runs before its layer's next forward, on a stream of its own; False: inside step()."""
    lead: int = 8
    """Deferred: moving chunks queued by step() itself, and resident ones before them. With write_back backward step()
    queues one chunk where the host waits for the device in every layer (`meanwhile`), the others in those waits."""
    ahead: int = 4
    """Deferred: chunks kept queued in front of the forward, as far as the host gets to it."""
    first_step: Literal["bounded", "whole"] = "bounded"
    """whole: the first step stages all state on the device at once, as upstream did."""

    update: Literal["device", "host_memory"] = "device"
    """host_memory: the update itself reads and writes state in host memory; nothing is staged or copied, and
    `slots` means nothing."""

    write_back: Literal["forward", "backward"] = "forward"
    """backward: updated state stays on the device until the last chunk has moved in, unless memory runs out. Staging
    then grows into the memory of gradients whose updates have run, and `slots` means nothing."""
    staging_bytes: int | None = None
    """write_back backward: staging memory taken when the last backward before step() ends, or by step() itself, at
    least any two neighbours; None: as little as that."""
    loss_bytes: int | None = None
    """write_back backward: most staging memory, gradients' included, held when the forward ends; None: as much as
    raises no peak, by what every forward and backward so far took, or all where memory is not counted."""

    def __post_init__(self) -> None:
        if self.deferred and not self.copy_streams:
            raise ScheduleError(f"{self.name}: deferred updates need copy streams")
        if self.copy_streams and self.offloaded and self.slots is None:
            raise ScheduleError(f"{self.name}: copy streams need a number of slots")
        if self.write_back == "backward" and not (self.deferred and self.first_step == "bounded"):
            raise ScheduleError(f"{self.name}: write-back in backward needs deferred updates and a bounded first step")
        if self.update == "host_memory" and not self.offloaded:
            raise ScheduleError(f"{self.name}: state on the device cannot be updated in host memory")
        if self.update == "host_memory" and (self.write_back == "backward" or self.first_step == "whole"):
            raise ScheduleError(
                f"{self.name}: updates in host memory stage nothing, so nothing is held or written back"
            )
        if self.deferred and self.lead < 1:
            raise ScheduleError(f"{self.name}: step() must queue at least one chunk")

    @property
    def updates(self) -> str:
        """When and where updates run: `synchronous`, `deferred`, or either with `, in host memory`."""
        when = "deferred" if self.deferred else "synchronous"
        return f"{when}, in host memory" if self.update == "host_memory" else when

    @property
    def cut_above(self) -> int | None:
        """A parameter with more state moves and updates in pieces of at most `chunk_bytes`; None: nothing moves."""
        if not self.offloaded:
            return None
        return self.chunk_bytes if self.whole_bytes is None else self.whole_bytes

    def in_pieces(self, pieces: int) -> Schedule:
        """The same windows over chunks cut into so many parts: a part updates while the next one still moves, which
        hides the updates of few slots behind their own copies. Of the parameters only those larger than a whole chunk
        are cut: one that exceeds a part is a part alone, so unequal parameters take more staging memory than whole
        chunks do (Qwen3-30B-A3B over 8 ranks, 2 slots: 2.4 GiB against 1.8)."""
        if pieces == 1:
            return self
        return replace(
            self,
            whole_bytes=self.cut_above,
            chunk_bytes=max(1, self.chunk_bytes // pieces),
            slots=None if self.slots is None else self.slots * pieces,
            lead=self.lead * pieces,
            ahead=self.ahead * pieces,
        )
