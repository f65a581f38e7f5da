"""One step on the compute stream as stretches: forward by units, backward by units, clip, and what step() waits for.

Note [The host's pace]
    Expert counts are read back in the middle of a unit, once everything that does not need them has been launched,
    the gather of the experts included. The host is then half a unit ahead: as the GPU begins a unit, the unit's
    chunks, and `ahead` more, have been asked for.

Note [Small copies]
    With stock FSDP2 the gathers of a unit and of its experts each begin with uploads of pointer tables, in forward and
    in backward, where the unit is computed again. They are served by the copy engine of the bulk copies, which stays
    with a stream that has work ready (torchrec#4303, #4315). An upload waits for the move-in at work and, every other
    time, for the next one, if that is ready by then: the engine may have taken it already. A read-back waits for
    write-backs alike, a chunk's repeats on an emulated link being one copy. The share of one half is inferred from our
    overlap rows: all are met within 5 % with it, and missed by up to -14 % with none of it, and +7 % with all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offbench.planner.inputs import Compute, Layout, Phase
from offbench.planner.policy import Policy


@dataclass(frozen=True)
class SmallCopies:
    """Which of a trainer's own small copies wait behind bulk ones."""

    uploads: bool = False
    """FSDP2's pointer tables, behind move-in: stock FSDP2."""
    readbacks: bool = False
    """Expert counts, behind write-back."""

    @property
    def any(self) -> bool:
        """Whether any waits."""
        return self.uploads or self.readbacks


@dataclass(frozen=True)
class Task:
    """A stretch of the compute stream."""

    seconds: float
    phase: Phase = "step"
    done: float = 1.0
    """Share of the phase that is done when it begins."""
    share: float = 0.0
    """Share of the phase that it is."""
    queue: int = 0
    """Before it, so many chunks have been queued by the CPU since the start."""
    updated: int = 0
    """Begins when so many updates have run since the start."""
    written: int = 0
    """Begins when so many chunks have been written back since the start."""
    uploads: bool = False
    """Begins behind the bulk move-ins that an upload waits for."""
    reads_back: bool = False
    """Begins behind the bulk write-backs that a read-back waits for."""
    backward: bool = False
    """Backward begins with it: the loss has been computed."""
    ready: bool = False
    """Its end is the end of clipping: an optimizer step begins."""


def tasks(
    policy: Policy, layout: Layout, compute: Compute, step: int, kept: int, demanded: int, small: SmallCopies
) -> Iterator[Task]:
    """The stretches of step number `step`.

    kept: leading chunks that never move; demanded: chunks that must be written back before the loss.
    """
    past, here, count = (step - 1) * len(layout.chunks), step * len(layout.chunks), len(layout.chunks)
    done = 0.0
    for unit, share in enumerate(layout.shares):
        last = layout.last_chunk[unit]
        if policy.deferred and step:
            yield Task(0.0, "forward", done, queue=past + min(last + policy.ahead + 1, count), updated=past + last + 1)
        yield from _unit("forward", done, share, compute.forward, small)
        done += share
    yield Task(0.0, "forward", written=max(0, past + demanded))
    yield Task(0.0, "backward", 0.0, queue=here + count if policy.prefetch else 0, backward=True)
    done = 0.0
    for share in layout.shares[::-1]:
        yield from _unit("backward", done, share, compute.backward, small)
        done += share
    yield Task(compute.clip, ready=True)
    if policy.deferred:
        first = max(kept + policy.lead, layout.last_chunk[0] + policy.ahead + 1)
        yield Task(0.0, queue=here + (count if policy.prefetch else min(first, count)))
    else:
        yield Task(0.0, queue=here + count, updated=here + count, written=here + count)


def _unit(phase: Phase, done: float, share: float, seconds: float, small: SmallCopies) -> Iterator[Task]:
    """One unit's work: first half, gather of the experts, read-back of their counts, second half."""
    if not share or not small.any:
        yield Task(share * seconds, phase, done, share)
        return
    half = share / 2
    yield Task(half * seconds, phase, done, half, uploads=small.uploads)
    yield Task(0.0, phase, done + half, uploads=small.uploads)
    yield Task(half * seconds, phase, done + half, half, reads_back=small.readbacks)
