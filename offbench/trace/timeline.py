"""Where the compute stream's time went: running, or idle and why, by phase; and what differs from another trace."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from offbench.record import Split, TimeParts
from offbench.trace.blame import Blame
from offbench.trace.events import OPTIMIZER, Mark, Op, Parsed
from offbench.trace.phases import PHASES, Phase, Stretch, stretches
from offbench.trace.spans import Span, union
from offbench.trace.summary import SMALL_BYTES

Segment = tuple[float, float, str]


def split(parsed: Parsed, small_bytes: int = SMALL_BYTES) -> Split | None:
    """Seconds a step by cause, for the device and stream with the most kernel time, over all marked steps.

    Every part is summed up from its own spans of time; `unexplained_s` is what they leave of the step. None where no
    step is marked or no kernel ran.
    """
    main = _compute_stream(parsed.ops)
    if main is None:
        return None
    device, stream = main
    ops = [op for op in parsed.ops if op.device == device]
    compute = [op for op in ops if op.stream == stream]
    phases = stretches(compute, parsed.marks)
    if not phases or parsed.steps is None:
        return None
    spent: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    whole = dict.fromkeys(PHASES, 0.0)
    for stretch in phases:
        whole[stretch.phase] += stretch.end - stretch.start
    for phase, start, end, cause in _cut(_timeline(ops, stream, parsed, phases, small_bytes), phases):
        spent[phase][cause] += end - start
    computing = _computing(compute, parsed.marks, phases)
    count = Counter(phase for phase, _ in computing)
    parts = {phase: _parts(whole[phase], spent[phase], count[phase], parsed.steps) for phase in PHASES}
    total = {cause: sum(found.get(cause, 0.0) for found in spent.values()) for cause in CAUSES}
    return Split(
        steps=parsed.steps,
        kernels_digest=_digest((name for _, name in computing), parsed.steps),
        total=_parts(sum(whole.values()), total, len(computing), parsed.steps),
        **parts,
    )


def difference(ours: Split, base: Split) -> Split:
    """Each part less that of `base`, the split of `none`: `step_s` of the total is the exposed time, `compute_s` how
    much slower the same kernels were; `kernels_digest` is None where others ran. A part that either lacks is None."""
    same = ours.kernels_digest if ours.kernels_digest == base.kernels_digest else None
    fields = {name: less(getattr(ours, name), getattr(base, name)) for name in ("total", *PHASES)}
    return Split(steps=ours.steps, kernels_digest=same, **fields)


def less(ours: TimeParts, base: TimeParts) -> TimeParts:
    """Each part less that of `base`; None where either lacks it."""
    found = {}
    for name in TimeParts.model_fields:
        left, right = getattr(ours, name), getattr(base, name)
        found[name] = None if left is None or right is None else left - right
    return TimeParts(**found)


def _compute_stream(ops: Iterable[Op]) -> tuple[int, int] | None:
    busy: dict[tuple[int, int], float] = defaultdict(float)
    for op in ops:
        if op.kind == "kernel":
            busy[op.device, op.stream] += op.end - op.start
    return max(busy, key=lambda key: busy[key], default=None)


def _timeline(
    ops: Sequence[Op], stream: int, parsed: Parsed, phases: Sequence[Stretch], small_bytes: int
) -> Iterator[Segment]:
    """Spans of the compute stream with their causes, none over another: what runs there, and gaps between."""
    blame = Blame(ops, stream, parsed, small_bytes)
    updates = _updates(parsed.marks)
    at, end = phases[0].start, phases[-1].end
    for number, op in enumerate(ops):
        if op.stream != stream or op.end <= at:
            continue
        if op.start > at:
            yield from blame.pieces(number, at)
            at = op.start
        yield at, op.end, "update" if _inside(updates, op.launch) else "compute"
        at = op.end
    if at < end:  # the host has queued nothing more when it sets the last stamp
        yield at, end, "launch"


def _updates(marks: Iterable[Mark]) -> list[Span]:
    return union((mark.start, mark.end) for mark in marks if mark.name.startswith(OPTIMIZER))


def _inside(spans: Sequence[Span], moment: float | None) -> bool:
    place = bisect_right(spans, (moment, float("inf"))) - 1 if moment is not None else -1
    return place >= 0 and moment is not None and moment < spans[place][1]


def _cut(segments: Iterable[Segment], phases: Sequence[Stretch]) -> Iterator[tuple[str, float, float, str]]:
    """The same spans cut where a phase ends; what lies outside of all phases is left out."""
    starts = [phase.start for phase in phases]
    for start, end, cause in segments:
        for place in range(max(0, bisect_right(starts, start) - 1), len(phases)):
            stretch = phases[place]
            if stretch.start >= end:
                break
            if min(end, stretch.end) > max(start, stretch.start):
                yield stretch.phase, max(start, stretch.start), min(end, stretch.end), cause


def _computing(compute: Sequence[Op], marks: Sequence[Mark], phases: Sequence[Stretch]) -> list[tuple[Phase, str]]:
    """Phase and name of each operation of the compute stream, AdamW's own left out."""
    updates, starts = _updates(marks), [phase.start for phase in phases]
    return [
        (phases[bisect_right(starts, op.start) - 1].phase, op.name)
        for op in compute
        if phases[0].start <= op.start < phases[-1].end and not _inside(updates, op.launch)
    ]


def _digest(names: Iterable[str], steps: int) -> str:
    listed = sorted(f"{count / steps:g} {name}" for name, count in Counter(names).items())
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]


def _parts(whole: float, spent: dict[str, float], count: int, steps: int) -> TimeParts:
    named = {f"{cause}_s": spent.get(cause, 0.0) / steps for cause in CAUSES}
    left = whole / steps - sum(named.values())
    return TimeParts(step_s=whole / steps, kernels=count / steps, unexplained_s=left, **named)


CAUSES = tuple(
    name.removesuffix("_s") for name in TimeParts.model_fields if name not in ("step_s", "kernels", "unexplained_s")
)
"""What time is given to, as `TimeParts` names it."""
