"""Steps and phases of a trace, as stamps on the compute stream mark them.

A stamp passes when the work queued before it has ended, or when the host sets it, whichever is later. `offbench run
--profile` makes its own visible: each is a tiny kernel, launched inside a mark that names it. Without them, what the
host did when is read from torch's own marks: `ProfilerStep#` around a step, `Optimizer.step#` around step(). Backward
is what another thread than the step's launches, autograd's own; forward is all before it, clip what lies between the
last backward and step(). What the compute stream waits for at the end of step() then counts where it goes on, in the
next step's forward; after the last step it is not seen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from offbench.trace.events import OPTIMIZER, STAMP, STEP, Mark, Op

Phase = Literal["forward", "backward", "clip", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)


ENDS = {"begin": "forward", "end": "step"}
"""What lies before a stamp that is named after no phase."""


class Stretch(NamedTuple):
    """Time of the compute stream between two stamps, seconds."""

    start: float
    end: float
    phase: Phase


def launched_order(ops: Sequence[Op]) -> list[Op]:
    """Ops of one stream in the order in which the host queued them; one without known launch where it started."""
    return sorted(ops, key=lambda op: op.queued)


def stretches(ops: Sequence[Op], marks: Sequence[Mark]) -> list[Stretch]:
    """Phases of all marked steps, in order and without a gap between them: each step ends where the next one starts.

    ops: those of the compute stream. Empty when no step is marked.
    """
    if stamped := list(_stamped(ops, marks)):
        return stamped
    steps = [mark for mark in marks if STEP.fullmatch(mark.name)]
    optimizers = [mark for mark in marks if mark.name.startswith(OPTIMIZER)]
    if not steps:
        return []
    queued = launched_order(ops)
    launches = [op.queued for op in queued]
    ended = [0.0, *accumulate((op.end for op in queued), max)]
    stamps: list[tuple[float, Phase]] = []
    for number, step in enumerate(steps):
        until = steps[number + 1].start if number + 1 < len(steps) else step.end
        mine = queued[bisect_left(launches, step.start) : bisect_left(launches, until)]
        inside = [mark for mark in optimizers if step.start <= mark.start < until]
        for at, phase in _turns(mine, step, inside[0] if inside else None):
            stamps.append((max(at, ended[bisect_left(launches, at)]), phase))
    last = steps[-1].end
    edges = list(accumulate([*(at for at, _ in stamps), max(last, ended[bisect_left(launches, last)])], max))
    return [Stretch(edges[i], edges[i + 1], phase) for i, (_, phase) in enumerate(stamps)]


def _stamped(ops: Sequence[Op], marks: Sequence[Mark]) -> Iterator[Stretch]:
    """Stretches between the stamps that the stream itself shows."""
    queued = launched_order(ops)
    launches = [op.queued for op in queued]
    before: float | None = None
    for mark in marks:
        if not mark.name.startswith(STAMP):
            continue
        inside = queued[bisect_left(launches, mark.start) : bisect_left(launches, mark.end)]
        at = next((op.start for op in inside if op.thread == mark.thread), None)
        if at is None:
            continue
        name = mark.name.removeprefix(STAMP)
        phase: Phase | None = next((phase for phase in PHASES if phase == ENDS.get(name, name)), None)
        if before is not None and phase is not None:
            yield Stretch(before, at, phase)
        before = at


def _turns(ops: Sequence[Op], step: Mark, optimizer: Mark | None) -> Iterator[tuple[float, Phase]]:
    """When the host turned to each phase of one step; under gradient accumulation forward and backward alternate."""
    yield step.start, "forward"
    before = [op for op in ops if optimizer is None or op.queued < optimizer.start]
    backward = [op.thread is not None and op.thread != step.thread for op in before]
    last = max((i for i, is_backward in enumerate(backward) if is_backward), default=None)
    for i in range(1, len(before)):
        if backward[i] != backward[i - 1]:
            phase: Phase = "backward" if backward[i] else "clip" if last is not None and i > last else "forward"
            yield before[i - 1].launched or before[i - 1].start, phase
    if optimizer is not None:
        yield optimizer.start, "step"
