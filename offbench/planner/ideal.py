"""The policy ideal of a record: what its own schedule would take with its own compute on the link it had, and what of
that the schedule itself waits for; and the gap, what traced steps took beyond it, by the same causes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbench import arms
from offbench.environment import identity
from offbench.offload.schedule import Schedule
from offbench.planner import sources
from offbench.planner.inputs import FP32, Compute, Layout, Links, uniform
from offbench.planner.result import Simulated
from offbench.planner.simulate import simulate
from offbench.record import RunRecord, Split, TimeParts
from offbench.results_file import read_records
from offbench.trace.timeline import less
from offbench.workload import presets

UNIFORM_LAYERS = 48
"""Equal layers that a trainer's own state is taken to be in where its `job` does not say how many."""
CPU = "on a CPU ranks share cores, and the largest phases of different ranks do not add up to a step"
NO_SCHEDULE = "of a trainer that offbench did not launch only the schedule of a single OffloadedAdamW is known"
FOREIGN = "its arm or its model is not one of ours"
NO_COMPUTE = "no row of none for the same job says how long it computes"
NO_RATES = "its launch has no probed link rates"


@dataclass(frozen=True)
class Ideal:
    """A step that is nothing but its copies, at the rates probed in its launch, and its compute."""

    step_s: float
    parts: TimeParts
    """What it has and the step of `none` has not: `step_s` of them is the sum of the others."""


def policy_ideal(record: RunRecord, none: Sequence[RunRecord] = ()) -> Ideal | None:
    """The ideal of the record's schedule, in which no small copy waits; None where something is not known (`unknown`).

    none: rows of arm `none` for the same job, whose median phases are the compute times. Without them a record's own
    phases serve, as far as they hold no copies: forward, backward and clip of a schedule that is not deferred.
    A trainer that offbench did not launch is taken to have its state in equal layers and to spend no time in its loss.
    """
    found = _inputs(record, none)
    if isinstance(found, str):
        return None
    schedule, layout, compute, links = found
    if links is None or layout is None:
        return Ideal(compute.total, _parts(0.0))
    simulated = simulate(schedule, layout, compute, links)
    return Ideal(simulated.step_s, _beyond_none(simulated, compute, in_place=schedule.update == "host_memory"))


def unknown(record: RunRecord, none: Sequence[RunRecord] = ()) -> str | None:
    """Why a record has no policy ideal; None where it has one."""
    found = _inputs(record, none)
    return found if isinstance(found, str) else None


def set_ideal(record: RunRecord, results: Path) -> None:
    """Put the ideal, its parts and the gap into a record that is about to join this file, by the `none` rows of the
    same machine among those there and itself.

    All of it can be had later from the same records, so whatever fails here must not cost what was measured.
    """
    if record.status != "ok" or record.step_s is None:
        return
    here = identity(record.env, record.spec)
    try:
        known = [*(r for r in read_records([results]).records if identity(r.env, r.spec) == here), record]
        ideal = policy_ideal(record, sources.none_rows(known, record))
        base = traced_none(record, known) if record.spec.arm.name != "none" else None
        parts = traced_gap(record, base, ideal)
    except Exception as error:
        record.warnings.append(f"no policy ideal: {type(error).__name__}: {error}")
        return
    if ideal is not None:
        record.policy_ideal_s, record.policy_ideal_parts = ideal.step_s, ideal.parts
        record.gap_s, record.gap_parts = record.step_s - ideal.step_s, parts


def traced_gap(record: RunRecord, base: Split | None, ideal: Ideal | None) -> TimeParts | None:
    """What the record's traced steps took beyond the ideal, by cause: each part less that of traced steps of `none`
    and less what the ideal has of it. Below zero: the ideal waits there, these steps did not. None without all
    three."""
    if record.split is None or base is None or ideal is None:
        return None
    return less(less(record.split.total, base.total), ideal.parts)


def traced_none(record: RunRecord, records: Iterable[RunRecord]) -> Split | None:
    """The split of a `none` of the same job, the one with the same small copies first; None where none was traced."""
    nones = [r for r in records if r.status == "ok" and r.spec.arm.name == "none" and r.split is not None]
    nones = [r for r in nones if (r.job, r.spec.workload) == (record.job, record.spec.workload)]
    copies = record.spec.arm.fsdp_copies, record.spec.arm.readbacks
    nones.sort(key=lambda r: (r.spec.arm.fsdp_copies, r.spec.arm.readbacks) != copies)
    return nones[0].split if nones else None


def _beyond_none(simulated: Simulated, compute: Compute, in_place: bool) -> TimeParts:
    """By the causes of a trace: an update that moves its own state is waited for as an update."""
    waits, above = simulated.waits, simulated.step_s - compute.total
    beside = waits.total - above
    return _parts(
        above,
        compute_s=waits.slowed,
        update_s=(waits.move_in if in_place else 0.0) - beside,
        move_in_s=0.0 if in_place else waits.move_in,
        slot_s=waits.slot,
        tail_s=waits.write_back,
        behind_bulk_s=waits.small,
    )


def _parts(step_s: float, **seconds: float) -> TimeParts:
    """Parts that add up to the step; those that are not named are zero."""
    zeros = dict.fromkeys((name for name in TimeParts.model_fields if name != "kernels"), 0.0)
    return TimeParts(**(zeros | seconds | {"step_s": step_s}))


def _inputs(
    record: RunRecord, none: Sequence[RunRecord]
) -> tuple[Schedule, Layout | None, Compute, Links | None] | str:
    """What the record's ideal is simulated from, or what is missing; no links and no layout where nothing moves."""
    w, mode, arm = record.spec.workload, record.spec.mode, record.ran
    if mode.device == "cpu":
        return CPU
    schedule = sources.schedule_of(record)
    if schedule is None:
        return NO_SCHEDULE if record.job is not None else FOREIGN
    if record.job is None and (w.model not in presets.PRESETS or arm.name not in arms.ARMS):
        return FOREIGN
    compute = sources.compute_of_records(none) if none else own_compute(record, schedule)
    if compute is None:
        return NO_COMPUTE
    if not schedule.offloaded:
        return schedule, None, compute, None
    links = sources.links_of_records([record])
    if links is None:
        return NO_RATES
    if record.job is None:
        return schedule, sources.layout_of(record, schedule), compute, links
    if not record.local_params:
        return NO_SCHEDULE
    layers = sources.told(record, "layers", UNIFORM_LAYERS)
    return schedule, uniform(2 * FP32 * record.local_params, layers, schedule.chunk_bytes), compute, links


def own_compute(record: RunRecord, schedule: Schedule) -> Compute | None:
    """Compute times of the record's own phases; the update of a schedule that moves state is estimated."""
    phases = record.phases_s
    if schedule.deferred or not phases.forward or not phases.backward:
        return None
    update = phases.step
    if schedule.offloaded:
        update = None if record.local_params is None else sources.update_s(record.local_params)
    if update is None:
        return None
    compute = Compute(phases.forward, phases.backward, update, phases.clip or 0.0)
    return compute.with_loss(sources.loss_share(record))
