"""The policy ideal of a record: what its own schedule would take with its own compute on the link it had."""

from __future__ import annotations

from collections.abc import Sequence

from offbench import arms
from offbench.planner import sources
from offbench.planner.inputs import Compute, of_model
from offbench.planner.simulate import simulate
from offbench.record import RunRecord
from offbench.workload import presets


def policy_ideal(record: RunRecord, none: Sequence[RunRecord] = ()) -> float | None:
    """Seconds of a step of the record's schedule, if nothing but its copies, at the rates probed in its launch, and
    its compute took time; no small copy waits.

    none: rows of arm `none` for the same job, whose median phases are the compute times. Without them a record's own
    phases serve, as far as they hold no copies: forward, backward and clip of a schedule that is not deferred.
    None where the record is of a trainer that offbench did not launch, has no rates (unless nothing moves), no phases,
    or an arm or model that is not one of ours; and on a CPU, where ranks share cores and the largest of each phase
    over ranks do not add up to a step.
    """
    w, arm = record.spec.workload, record.ran
    if (
        record.spec.mode.device == "cpu"
        or record.job is not None
        or w.model not in presets.PRESETS
        or arm.name not in arms.ARMS
    ):
        return None
    schedule = sources.schedule_of(record)
    compute = sources.compute_of_records(none) if none else own_compute(record, schedule.deferred)
    if compute is None:
        return None
    if not schedule.offloaded:
        return compute.total
    links = sources.links_of_records([record])
    if links is None:
        return None
    layout = of_model(presets.find(w.model), record.spec.mode.world, w.ep, w.layers, schedule.chunk_bytes)
    return simulate(schedule, layout, compute, links).step_s


def own_compute(record: RunRecord, deferred: bool) -> Compute | None:
    """Compute times of the record's own phases; the update of an arm that moves state is estimated from its size."""
    phases, moves = record.phases_s, record.spec.arm.name != "none"
    if deferred or not phases.forward or not phases.backward:
        return None
    update = phases.step
    if moves:
        update = None if record.local_params is None else sources.update_s(record.local_params)
    return None if update is None else Compute(phases.forward, phases.backward, update, phases.clip or 0.0)
