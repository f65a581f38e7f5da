"""Records to comparable groups: pure functions, no printing.

Rows of one group share hardware, workload, mode, versions and source; whatever differs in one of these is another
group. Inside a group rows differ by arm, its options, and the two axes --numa and --activation-offload. Each row is
set against `none` with the same activation axis (`offbench.baseline`). Failed launches are named and never enter a
statistic.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbench import remarks
from offbench.baseline import NATIVE, Round, baseline, native_none, ratios, steps_by_round
from offbench.condition_table import Conditions
from offbench.condition_table import apart as apart_of
from offbench.config import ArmSpec, RunSpec
from offbench.naming import arm_name, axes
from offbench.planner.ideal import Ideal, policy_ideal, unknown
from offbench.planner.sources import none_rows
from offbench.record import Reserved, RunRecord, SmallCopies, Split, TimeParts
from offbench.stats import largest, mean_interval
from offbench.trace.timeline import difference, less

LEAST_PAIRS = 3
"""Fewer say little: of two pairs the interval is 9 x their distance to each side."""
PLACED = 0.01
"""Share of a rank's pinned memory that makes it remote, or its place unknown."""


@dataclass(frozen=True)
class Spread:
    """One figure over the launches of a row."""

    median: float
    low: float
    high: float
    n: int

    @property
    def relative(self) -> float | None:
        """(high - low) / median; None for a single launch."""
        return (self.high - self.low) / self.median if self.n > 1 else None


@dataclass(frozen=True)
class Row:
    """One arm of a group over its launches. Memory figures are the largest of any launch."""

    arm: str
    label: str | None
    axes: str
    activation_offload: bool
    spec: RunSpec
    launches: int
    """Launches that count."""
    status: str
    tok_s: Spread | None = None
    step_s: Spread | None = None
    x_none: float | None = None
    x_none_interval: tuple[float, float] | None = None
    """95 % interval of the mean ratio to the launch of `none` in the same round, from LEAST_PAIRS such pairs on."""
    pairs: int = 0
    """Launches of this row and of `none` that ran in the same round on the same GPU (`baseline.Round`)."""
    by_round: Mapping[Round, float] = field(default_factory=dict)
    """Step times, s, of the launches."""
    conditions: Conditions = field(default_factory=Conditions)
    """Of the GPU, and losses."""
    loss_apart: float | None = None
    """Root mean square by which the first launch's losses leave those of `none`."""
    same: bool = False
    """The difference from `none` is smaller than the group's noise floor."""
    exposed_s: float | None = None
    """Step time above `none`."""
    floor_s: float | None = None
    bound_by: str | None = None
    ideal_s: float | None = None
    """Step of the same schedule if nothing but its copies, at the rates probed in the launch, and its compute took
    time (`planner.ideal`)."""
    run_peak_bytes: int | None = None
    """Over the whole run, in published rows."""
    first_peak_bytes: int | None = None
    steady_peak_bytes: int | None = None
    pinned_bytes: int | None = None
    rss_bytes: int | None = None
    small_copies: SmallCopies | None = None
    """The largest figures of any launch."""
    reserved: Reserved | None = None
    """Of the launch that reserves most."""
    alloc_retries: int | None = None
    """The most of any launch."""
    auto_budget_bytes: tuple[int, int] | None = None
    """What --state-budget auto came to: the least and the most of any launch."""
    ranks_remote: int | None = None
    """Ranks with 1 % or more of their pinned memory on another socket than their GPU; the most of any launch. None
    where some rank does not know."""
    ranks_pinned: int | None = None
    """Ranks of this host that pin memory."""
    split: Split | None = None
    """Where the traced steps of one launch, the middle one of those with a trace, spent their time."""
    ideal_parts: TimeParts | None = None
    """What the ideal of that launch has and `none` has not, by cause."""
    apart: Split | None = None
    """`split` less that of `none`."""
    gap: TimeParts | None = None
    """That, all phases together, less `ideal_parts`: what the traced steps took beyond the ideal, by cause."""

    @property
    def gap_s(self) -> float | None:
        """Step time above the schedule's own ideal; None without either."""
        return self.step_s.median - self.ideal_s if self.step_s is not None and self.ideal_s is not None else None

    @property
    def x_floor(self) -> float | None:
        """Exposed time over the floor: below 1 some of the copies are hidden; None without either."""
        return self.exposed_s / self.floor_s if self.exposed_s is not None and self.floor_s else None


@dataclass(frozen=True)
class Group:
    """Rows that may stand in one table."""

    caption: dict[str, Any]
    rows: list[Row]
    noise: float | None
    """Largest relative spread of any row with several launches; None when no row has two."""
    failures: list[str]
    notes: list[str]
    without_ideal: list[str]
    """Why rows have no policy ideal, a line a reason."""


def compare(records: Iterable[RunRecord]) -> list[Group]:
    """Group the records in order of first appearance and set each row against its baseline."""
    groups: dict[str, list[RunRecord]] = {}
    machines: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(json.dumps(_caption(record), sort_keys=True), []).append(record)
        machines.setdefault(_machine(record), []).append(record)
    return [_group(members, machines[_machine(members[0])]) for members in groups.values()]


def _machine(record: RunRecord) -> str:
    """What records share whose phases tell of each other: all of a group's caption but the window and the link, which
    `none` does not use."""
    caption = _caption(record) | {"window": None}
    return json.dumps(caption | {"mode": caption["mode"] | {"emulate_link": None}}, sort_keys=True)


def _caption(record: RunRecord) -> dict[str, Any]:
    """What all rows of a group share, and so its key."""
    workload = record.spec.workload.model_dump(mode="json", exclude={"activation_offload"})
    mode, env = record.spec.mode, record.env
    cuda = mode.device == "cuda"
    return {
        "source": record.source,
        "reference": record.reference,
        "gpu": env.get("gpu") if cuda else None,
        "cpu_model": env.get("cpu_model"),
        "cpus": env.get("cpus"),
        "job": record.job,
        "workload": workload,
        "mode": mode.model_dump(mode="json"),
        "window": record.spec.window.model_dump(mode="json"),
        "torch": env.get("torch"),
        "offbench": env.get("offbench"),
        "commit": env.get("commit"),
        "driver": env.get("driver"),
    }


def _group(records: Sequence[RunRecord], machine: Sequence[RunRecord]) -> Group:
    """machine: these records, and those of other tables whose `none` rows may say how long they compute."""
    by_row = _by_row(records)
    bare = [_with_ideal(_row(members), members, machine) for members in by_row]
    native = native_none(records, machine)
    elsewhere = [_row(members) for members in _by_row(native)]
    known = [*bare, *elsewhere]
    noise = max((s for row in known if row.step_s and (s := row.step_s.relative) is not None), default=None)
    rows = [_against(row, baseline(row, known), noise) for row in bare]
    dates = sorted({record.started_at[:10] for record in records if record.started_at})
    caption = _caption(records[0]) | {
        "dirty": any(record.env.get("dirty") for record in records),
        "dates": dates,
    }
    notes, without = remarks.notes(records, by_row, caption, native), _without_ideal(by_row, machine)
    if any(row.x_none is not None and baseline(row, elsewhere) is not None for row in rows):
        notes.append(NATIVE)
    return Group(caption, rows, noise, remarks.failures(records), notes, without)


def _by_row(records: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """The launches of each row, in order of first appearance."""
    found: dict[tuple[ArmSpec, bool, str | None], list[RunRecord]] = {}
    for record in records:
        found.setdefault((record.spec.arm, record.spec.workload.activation_offload, record.label), []).append(record)
    return list(found.values())


def _row(records: Sequence[RunRecord]) -> Row:
    """Statistics over the launches that count; a row of failures alone has no figures."""
    good, spec = [record for record in records if record.status == "ok"], records[0].spec
    auto_budgets = [record.state_budget_bytes for record in good if record.state_budget_bytes is not None]
    remote = [found for record in good if (found := ranks_remote(record)) is not None]
    counts = {status: sum(r.status == status for r in records) for status in dict.fromkeys(r.status for r in records)}
    status = next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {name}" for name, n in counts.items())
    return Row(
        arm=spec.arm.name,
        label=records[0].label,
        axes=axes(spec, records[0].host.numa, auto_budgets),
        activation_offload=spec.workload.activation_offload,
        spec=spec,
        auto_budget_bytes=(min(auto_budgets), max(auto_budgets)) if auto_budgets else None,
        launches=len(good),
        status=status,
        tok_s=_spread(record.tok_s for record in good),
        step_s=_spread(record.step_s for record in good),
        conditions=Conditions.of(good),
        by_round=steps_by_round(good),
        floor_s=largest(record.floor.seconds for record in good),
        bound_by=next((record.floor.bound_by for record in good if record.floor.bound_by), None),
        run_peak_bytes=largest(record.peak.run_bytes for record in good),
        first_peak_bytes=largest(record.peak.first_step_allocated_bytes for record in good),
        steady_peak_bytes=largest(record.peak.steady_allocated_bytes for record in good),
        pinned_bytes=largest(record.host.pinned_requested_bytes for record in good),
        rss_bytes=largest(record.host.rss_bytes for record in good),
        small_copies=_small_copies(good),
        reserved=Reserved.worst(record.reserved for record in good),
        alloc_retries=largest(record.peak.alloc_retries for record in good),
        ranks_remote=max(remote) if len(remote) == len(good) and remote else None,
        ranks_pinned=len(good[0].ranks) if remote else None,
        split=traced.split if (traced := _middle(good)) is not None else None,
    )


def _small_copies(records: Sequence[RunRecord]) -> SmallCopies | None:
    found = [record.small_copies for record in records if record.small_copies is not None]
    figures = {name: largest(getattr(one, name) for one in found) for name in SmallCopies.model_fields}
    return SmallCopies(**figures) if found else None


def _middle(records: Iterable[RunRecord]) -> RunRecord | None:
    """Of those with a trace the one with the median step; of an even number the faster one in the middle."""
    known = [(r.split.total.step_s, i, r) for i, r in enumerate(records) if r.split and r.split.total.step_s]
    return sorted(known)[(len(known) - 1) // 2][2] if known else None


def _with_ideal(row: Row, members: Sequence[RunRecord], machine: Sequence[RunRecord]) -> Row:
    """The median ideal over a row's launches, if each has one, and the parts of that of the launch with the trace."""
    good = [record for record in members if record.status == "ok"]
    found = {id(record): policy_ideal(record, none_rows(machine, record)) for record in good}
    known = [ideal for ideal in found.values() if ideal is not None]
    if not known or len(known) < len(good):
        return row
    traced = _middle(good)
    of_trace: Ideal | None = found[id(traced)] if traced is not None else None
    median = statistics.median(ideal.step_s for ideal in known)
    return replace(row, ideal_s=median, ideal_parts=of_trace.parts if of_trace is not None else None)


def _without_ideal(rows: Iterable[Sequence[RunRecord]], machine: Sequence[RunRecord]) -> list[str]:
    """A line for each reason why rows have no ideal."""
    why: dict[str, list[str]] = {}
    for members in rows:
        for record in members:
            if record.status != "ok" or record.step_s is None or record.source != "measured":
                continue
            reason, name = unknown(record, none_rows(machine, record)), arm_name(record.spec, record.label)
            if reason is not None and name not in why.setdefault(reason, []):
                why[reason].append(name)
    return [f"no ideal for {', '.join(names)}: {reason}" for reason, names in why.items()]


def ranks_remote(record: RunRecord) -> int | None:
    """Ranks whose pinned memory is on another socket than their GPU; None where it was not measured for every rank."""
    remote = 0
    for rank in record.ranks:
        parts = (rank.local_bytes, rank.same_socket_bytes, rank.remote_bytes, rank.unknown_bytes)
        total = sum(part or 0 for part in parts)
        far, unknown = rank.remote_bytes or 0, rank.unknown_bytes or 0
        if not total or (far < PLACED * total <= unknown):  # nothing pinned, or nobody says where
            return None
        remote += far >= PLACED * total
    return remote if record.ranks else None


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known), len(known)) if known else None


def _against(row: Row, base: Row | None, noise: float | None) -> Row:
    if base is None or base.step_s is None or row.step_s is None:
        return row
    ratio = row.step_s.median / base.step_s.median
    pairs = ratios(row.by_round, base.by_round)
    apart = difference(row.split, base.split) if row is not base and row.split and base.split else None
    return replace(
        row,
        x_none=ratio,
        x_none_interval=mean_interval(pairs) if row is not base and len(pairs) >= LEAST_PAIRS else None,
        pairs=len(pairs),
        loss_apart=apart_of(row.conditions.losses, base.conditions.losses) if row is not base else None,
        same=row is not base and noise is not None and abs(ratio - 1) <= noise,
        exposed_s=row.step_s.median - base.step_s.median,
        apart=apart,
        gap=less(apart.total, row.ideal_parts) if apart and row.ideal_parts else None,
    )
