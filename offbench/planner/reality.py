"""The simulation against what was published or measured: the same inputs, simulated beside actual.

Published rows take the published rates and times of their source; measured rows take the phases of the `none` rows
of their own file and the rates probed in its launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbench import arms
from offbench.naming import arm_name
from offbench.planner import sources
from offbench.planner.inputs import Compute, Links, of_model
from offbench.planner.simulate import simulate
from offbench.record import RunRecord
from offbench.seed import REFERENCE
from offbench.workload import presets

CLOSE = 0.05
"""A row further off than this share needs a reason."""
QUEUE = (
    "FSDP2's own small copies queue behind bulk ones on the same copy engine and compute waits for them; no flat-rate "
    "model has that (--fsdp-copies kernel)"
)
UNBOUND = (
    "its ranks were not bound, and 3 to 5 of 8 had their buffers on the other socket; the rates are of local ones"
)
UNKNOWN = "no reason known"


@dataclass(frozen=True)
class Compared:
    """One row, simulated and actual."""

    name: str
    simulated_s: float
    actual_s: float
    reason: str | None
    """Why it is further off than CLOSE; None when it is not."""

    @property
    def error(self) -> float:
        """(simulated - actual) / actual."""
        return (self.simulated_s - self.actual_s) / self.actual_s


def against(records: Sequence[RunRecord]) -> tuple[list[Compared], list[str]]:
    """Every row that can be simulated, and a line for each one that cannot."""
    found, skipped = [], []
    for record in records:
        name = arm_name(record.spec, record.label)
        basis = None if (why := _not_simulated(record)) else _basis(record, records)
        if record.step_s is None or basis is None:
            skipped.append(f"{name}: left out, {why or 'no row of arm none with phases and rates for the same job'}")
            continue
        compute, links = basis
        w, world = record.spec.workload, record.spec.mode.world
        cap = record.spec.arm.chunk_bytes or presets.find(w.model).chunk_bytes
        layout = of_model(presets.find(w.model), world, w.ep, w.layers, cap)
        schedule = arms.find(record.spec.arm.name)[0].schedule(record.spec.arm)
        simulated = simulate(schedule, layout, compute, links).step_s
        off = abs(simulated / record.step_s - 1) > CLOSE
        found.append(Compared(name, simulated, record.step_s, _reason(record) if off else None))
    return found, skipped


def _not_simulated(record: RunRecord) -> str | None:
    if record.status != "ok" or record.step_s is None:
        return f"status {record.status}"
    if record.job is not None or record.spec.workload.model not in presets.PRESETS:
        return "its model is not one of ours"
    if record.spec.workload.activation_offload:
        return "copies of activations are not simulated"
    if record.spec.workload.grad_accum > 1:
        return "accumulated gradients are not simulated"
    if record.spec.arm.name not in arms.ARMS:
        return "its arm is not one of ours"
    return None


def _basis(record: RunRecord, records: Iterable[RunRecord]) -> tuple[Compute, Links] | None:
    """Times and rates a row is simulated from; None where its file has none."""
    if record.source == "published":
        return (sources.SEED_COMPUTE, sources.SEED_LINKS) if record.reference == REFERENCE else None
    w, mode = record.spec.workload, record.spec.mode
    alike = [r for r in records if r.status == "ok" and (r.spec.workload, r.spec.mode) == (w, mode)]
    none, links = sources.baseline(alike, like=record), sources.links_of_records(alike)
    return (sources.compute_of_records(none), links) if none and links else None


def _reason(record: RunRecord) -> str:
    arm = record.spec.arm
    reasons = [QUEUE] if arm.name == "overlap" and arm.fsdp_copies == "stock" else []
    if record.source == "published" and not arm.numa and arm.name != "none":
        reasons.append(UNBOUND)
    return "; ".join(reasons) or UNKNOWN
