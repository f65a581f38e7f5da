"""What a reader must know before trusting a table: launches that do not count, rates that disagree, losses that leave
those of `none`. Pure functions, no printing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from offbench.naming import arm_name
from offbench.record import RunRecord
from offbench.stats import largest

RATE_TOLERANCE = 0.01
"""tok/s and tokens / step time of one row must agree this closely."""
LONG_WAIT = 1e-3
"""Seconds; with nothing in its way a small copy's wait came to 0.3 ms at most (docs/trace.md)."""
LOSS_TOLERANCE = 1e-3
"""Largest relative difference of a step's loss from that of `none` before it is flagged, where `none` ran once."""
LOSS_BAND = 3
"""Where it ran more often: how many times the difference between its own launches, which two or three of them show
too small."""


def failures(records: Sequence[RunRecord]) -> list[str]:
    """One line for each launch that does not count."""
    return [
        f"{arm_name(record.spec, record.label)}, launch {record.launch}: {record.status}"
        + (f" in {record.phase}" if record.phase else "")
        + (f": {record.reason}" if record.reason else "")
        for record in records
        if record.status != "ok"
    ]


def notes(
    records: Sequence[RunRecord],
    rows: Iterable[Sequence[RunRecord]],
    caption: dict[str, Any],
    native: Sequence[RunRecord] = (),
) -> list[str]:
    """What a reader must know before trusting the table. native: launches of `none` that are not in it, but that its
    rows are set against."""
    found = [note for record in records if (note := rate_note(record)) is not None]
    kinds = {record.adamw for record in records if record.status == "ok" and record.adamw}
    if len(kinds) > 1:
        found.append(f"AdamW implementations differ between arms ({', '.join(sorted(kinds))}): not only copies differ")
    if caption["dirty"]:
        found.append("rows come from an uncommitted tree: compare with care")
    for members in rows:
        found += _waiting(members) + _flushed(members)
        found += [note for record in members for note in _loss_notes(record, [*records, *native])]
    found += [f"{arm_name(r.spec, r.label)}, launch {r.launch}: {w}" for r in records for w in r.warnings]
    return found


def _waiting(members: Sequence[RunRecord]) -> list[str]:
    """A line when a small copy of some launch waited long: bulk copies, most likely, were served before it."""
    found = [record.small_copies for record in members if record.status == "ok" and record.small_copies is not None]
    worst = max(found, key=lambda one: one.longest_wait_s or 0.0, default=None)
    if worst is None or (worst.longest_wait_s or 0.0) <= LONG_WAIT:
        return []
    name = arm_name(members[0].spec, members[0].label)
    return [
        f"{name}: a small copy waited {worst.longest_wait_s:.3f} s; a step makes {worst.uploads_per_step} uploads, "
        f"{worst.readbacks_per_step} read-backs and {worst.by_kernel_per_step} of both by kernels"
    ]


def _flushed(members: Sequence[RunRecord]) -> list[str]:
    """A line when memory was so tight that the allocator gave its cache back inside the window."""
    most = largest(record.peak.alloc_retries for record in members if record.status == "ok")
    if not most:
        return []
    name = arm_name(members[0].spec, members[0].label)
    return [
        f"{name}: {most} times in the window the allocator was out of memory, gave its cache back and tried again; "
        "the device stands still for that, and step times hold it"
    ]


def rate_note(record: RunRecord) -> str | None:
    """A line when tok/s and tokens / step time of one record disagree by more than 1 %."""
    tokens = record.tokens_per_step or record.spec.tokens_per_step
    if record.status != "ok" or record.step_s is None or record.tok_s is None:
        return None
    computed = tokens / record.step_s
    if abs(computed / record.tok_s - 1) <= RATE_TOLERANCE:
        return None
    return (
        f"{arm_name(record.spec, record.label)}, launch {record.launch}: {record.tok_s:.0f} tok/s is written, "
        f"{tokens} tokens in {record.step_s:.4g} s make {computed:.0f}: one of them is wrong"
    )


def _loss_notes(record: RunRecord, records: Sequence[RunRecord]) -> list[str]:
    """A line when some step's loss leaves that of `none` (same seed, same data) by more than launches of `none` leave
    each other."""
    base = [
        other
        for other in records
        if other.spec.arm.name == "none"
        and other.status == "ok"
        and other.spec.workload.activation_offload == record.spec.workload.activation_offload
    ]
    if not base or record.status != "ok" or record.spec.arm.name == "none":
        return []
    band = max((_loss_distance(other, base[0]) for other in base[1:]), default=None)
    worst = _loss_distance(record, base[0])
    if worst <= (LOSS_TOLERANCE if band is None else LOSS_BAND * band):
        return []
    beside = "" if band is None else f", launches of none differ by {100 * band:.2g}%"
    name = f"{arm_name(record.spec)}, launch {record.launch}"
    return [f"{name}: losses leave those of none by up to {100 * worst:.2g}%{beside}: it does not train the same"]


def _loss_distance(one: RunRecord, other: RunRecord) -> float:
    """Largest relative difference of a step's loss; 0 where no step has both."""
    pairs = [
        (mine.loss, theirs.loss)
        for mine, theirs in zip(one.steps, other.steps, strict=False)
        if mine.loss is not None and theirs.loss is not None
    ]
    return max((abs(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in pairs), default=0.0)
