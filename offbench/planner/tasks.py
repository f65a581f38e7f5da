"""One step on the compute stream as stretches: forward by units, backward by units, clip, and what step() waits for.

Note [The host's pace]
    Expert counts are read back in the middle of a unit, once everything that does not need them has been launched. The
    host waits for them, then launches the rest of the unit and the next one up to its own counts, and on the way asks
    for the next one's chunks and `ahead` more. Launches are taken to cost nothing: chunks are queued as soon as the
    counts are there, half a unit before the GPU begins the unit that they are asked for with.

Note [Small copies]
    With stock FSDP2 the gather of a unit begins with the upload of a pointer table, in forward and in backward, where
    the unit is computed again. The copy engine that serves it serves bulk copies, too, and stays with their stream for
    as long as that has a copy that may start (torchrec#4303, #4315). So an upload waits until every move-in queued so
    far has ended, or one of them waits itself, and a read-back waits for write-backs alike. That is what a trace of
    overlap on an H200 shows (emulated link, two steps): beside bulk copies 26 of 27 such uploads, of 9.5 kB, whose
    stream was busy when they were launched, and all 35 read-backs were served when their engine had run dry; 8 of 9
    launched to an idle stream were served at once, which is not modelled, as launches cost nothing here; nor do the
    experts' own tables wait, 552 bytes: none of 43 did.
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
    """Before it, but behind its read-back, so many chunks have been queued by the CPU since the start."""
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

    def asked_for(unit: int) -> int:
        """Chunks that the host has queued once it has come to a unit's experts."""
        return past + min(layout.last_chunk[unit] + policy.ahead + 1, count)

    done = 0.0
    for unit, share in enumerate(layout.shares):
        following = 0
        if policy.deferred and step:
            following = asked_for(min(unit + 1, len(layout.shares) - 1))
            yield Task(0.0, "forward", done, queue=asked_for(unit), updated=past + layout.last_chunk[unit] + 1)
        yield from _unit("forward", done, share, compute.forward - compute.loss, small, following)
        done += share
    yield Task(compute.loss, "loss", 1.0, written=max(0, past + demanded))
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


def _unit(
    phase: Phase, done: float, share: float, seconds: float, small: SmallCopies, queue: int = 0
) -> Iterator[Task]:
    """One unit's work: the part before its expert counts, and the part behind them, as which begins the host queues
    what comes next."""
    if not share:
        return
    half = share / 2
    yield Task(half * seconds, phase, done, half, uploads=small.uploads)
    yield Task(half * seconds, phase, done + half, half, queue=queue, reads_back=small.readbacks)
