"""The simulation against what was published or measured: the same inputs, simulated beside actual.

Published rows take the published rates and times of their source; measured rows take the phases of the `none` rows
of their own file and the rates probed in their own launch. Small copies wait behind bulk ones as `waiting` says. What
the host's launches cost is not simulated, but shown beside the error where steps were traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from offbench import arms
from offbench.estimate import saved_bytes
from offbench.naming import arm_name
from offbench.offload.schedule import Schedule
from offbench.planner import sources
from offbench.planner.ideal import traced_none
from offbench.planner.inputs import IN_PLACE, Compute, Layout, Links
from offbench.planner.simulate import simulate
from offbench.planner.tasks import SmallCopies
from offbench.record import RunRecord
from offbench.seed import REFERENCE
from offbench.units import GIB
from offbench.workload import presets

CLOSE = 0.05
"""A row further off than this share needs a reason."""
REMOTE = 0.8
"""Share of the local rates that meets every unbound row of prime-rl#4427 within 6 %: inferred, from those rows."""
UNBOUND = (
    "its ranks were not bound, and 3 to 5 of 8 had their buffers on the other socket; the rates are of local ones, "
    f"and at {REMOTE:g} of them"
)
UNKNOWN = "no reason known"
UNSTEADY = "the machine was not steady: its steps took"
LAUNCHES = "the host launched late: in traced steps compute had nothing queued for"
SHARED = "its ranks probe the link at the same moment, and copies of its job met less: both ways they made"
SLOWER = "its copies were slower than its launch probed: both ways, from first to last, they made"
KERNELS = "its updates moved their own state, both ways, at"
BEHIND_STATE = (
    "the inputs of blocks waited behind state on the copy engines, which is not simulated; --activation-copies kernel "
    "moves them past it"
)
LARGE = "state of one parameter moves whole; that it takes staging in one piece is not simulated:"


@dataclass(frozen=True)
class Traced:
    """What the traced steps of a row spent that those of `none` did not, seconds a step. Not those of the window: the
    profiler makes the host slower, so launches take more, and late uploads find an idle stream and wait less."""

    behind_bulk_s: float
    """Compute stood still for small copies behind bulk ones."""
    launch_s: float
    """It had nothing queued yet."""


@dataclass(frozen=True)
class Compared:
    """One row, simulated and actual."""

    name: str
    simulated_s: float
    free_s: float
    """Simulated as if no small copy waited behind a bulk one."""
    actual_s: float
    reason: str | None
    """Why it is further off than CLOSE; None when it is not."""
    small_s: float = 0.0
    """Of the simulated step: small copies waited behind bulk ones."""
    traced: Traced | None = None

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
        schedule = sources.schedule_of(record)
        if record.step_s is None or basis is None or schedule is None:
            skipped.append(f"{name}: left out, {why or 'no row of arm none with phases and rates for the same job'}")
            continue
        compute, links = basis
        layout = sources.layout_of(record, schedule)
        free = simulate(schedule, layout, compute, links).step_s
        simulated = simulate(schedule, layout, compute, links, small_copies_wait=waiting(record))
        step_s, actual_s, traced = simulated.step_s, record.step_s, traced_of(record, records)
        reason = None
        if abs(step_s / actual_s - 1) > CLOSE:
            remote = simulate(schedule, layout, compute, links.scaled(REMOTE), small_copies_wait=waiting(record))
            own = _own_rate(record, schedule, records, links)
            at_own_rate = simulate(schedule, layout, compute, own, small_copies_wait=waiting(record))
            reasons = (
                _unbound(record, remote.step_s),
                _behind_state(record, step_s),
                _launches(record, step_s, traced),
                _unsteady(record, step_s),
                _shared(record, links, own, at_own_rate.step_s, schedule.update == "host_memory"),
                _large(record, schedule, layout, step_s),
            )
            reason = next((one for one in reasons if one), UNKNOWN)
        found.append(Compared(name, step_s, free, actual_s, reason, simulated.waits.small, traced))
    return found, skipped


def waiting(record: RunRecord) -> SmallCopies:
    """Which small copies wait behind bulk ones in that launch: uploads with FSDP2's stock copies, and read-backs where
    there are any.

    Not known of prime-rl#4427: its overlap row, 3.52 s, would take 3.44 s with uploads alone, and 3.98 s if read-backs
    waited as well.
    """
    arm, w = record.spec.arm, record.spec.workload
    readbacks = w.count_readback and arm.readbacks == "copy" and record.source != "published"
    return SmallCopies(arm.fsdp_copies == "stock", readbacks)


def _not_simulated(record: RunRecord) -> str | None:
    if record.status != "ok" or record.step_s is None:
        return f"status {record.status}"
    if record.job is not None or record.spec.workload.model not in presets.PRESETS:
        return "its model is not one of ours"
    if record.spec.arm.name not in arms.ARMS:
        return "its arm is not one of ours"
    return None


def _basis(record: RunRecord, records: Iterable[RunRecord]) -> tuple[Compute, Links] | None:
    """Times and rates a row is simulated from; None where its file has none."""
    if record.source == "published":
        if record.reference != REFERENCE:
            return None
        compute, links = sources.SEED_COMPUTE, sources.SEED_LINKS
        if record.spec.workload.activation_offload:
            compute = with_activations(compute, links, saved_bytes(record.spec))
        return compute, links
    ran = [r for r in records if r.status == "ok" and r.job is None]
    # Rates move between launches, and an emulated link is set up anew in each.
    none, probed = sources.none_rows(ran, record), sources.links_of_records([record])
    return (sources.compute_of_records(none), probed) if none and probed else None


def with_activations(compute: Compute, links: Links, nbytes: float) -> Compute:
    """Compute times with so many bytes of activations moved out in forward and in again in backward, none of it
    hidden. For rows whose table has no `none` with the same copies."""
    return replace(
        compute, forward=compute.forward + nbytes / links.out, backward=compute.backward + nbytes / links.into
    )


def traced_of(record: RunRecord, records: Iterable[RunRecord]) -> Traced | None:
    """The split of a row beside that of `none`, the one with the same small copies first; None without both."""
    base = traced_none(record, records)
    if record.split is None or base is None:
        return None
    ours, theirs = record.split.total, base.total
    if ours.behind_bulk_s is None or ours.launch_s is None or theirs.launch_s is None:
        return None
    return Traced(ours.behind_bulk_s - (theirs.behind_bulk_s or 0.0), ours.launch_s - theirs.launch_s)


def _unbound(record: RunRecord, remote_s: float) -> str | None:
    """Ranks whose buffers were on another socket than their GPU."""
    arm = record.spec.arm
    remote = record.source == "published" and not arm.numa and arm.name != "none"
    return f"{UNBOUND} it takes {remote_s:.3f} s" if remote else None


def _behind_state(record: RunRecord, simulated_s: float) -> str | None:
    """Activations on the copy engines that move state at the same time."""
    at_once = record.spec.workload.activation_offload and record.spec.arm.activation_copies == "copy"
    deferred = (schedule := sources.schedule_of(record)) is not None and schedule.deferred
    late = record.step_s is not None and simulated_s < record.step_s
    return BEHIND_STATE if at_once and deferred and late and record.source == "measured" else None


def _launches(record: RunRecord, simulated_s: float, traced: Traced | None) -> str | None:
    """A host that came too late with launches, by enough in traced steps to cover what the simulation is short of."""
    if traced is None or record.step_s is None or not simulated_s < record.step_s <= simulated_s + traced.launch_s:
        return None
    return (
        f"{LAUNCHES} {traced.launch_s:.3f} s a step longer than in those of none, which is not simulated and covers "
        f"the {record.step_s - simulated_s:.3f} s"
    )


def _own_rate(record: RunRecord, schedule: Schedule, records: Iterable[RunRecord], links: Links) -> Links:
    """The links of a row of several ranks, both ways as fast as copies ran while it trained, where its launch probed
    something else: slower, if its own copies all ran both ways at once and say so, or else the fastest of its job in
    that file, which met less. A row that copies one way after the other says less of both ways than one that does not.
    Of `zerocopy` those at which updates in host memory are as fast as its own were.
    """
    own = _both_ways(record)
    if schedule.update == "host_memory":  # no copy: the share of the link that its kernels had is its own
        return links if own is None else Links.of(max(links.into, own / 2), max(links.out, own / 2), own / IN_PLACE)
    if record.spec.mode.nproc < 2 or record.source == "published":
        return links
    at_once = schedule.copy_streams and not schedule.deferred
    if own is not None and at_once and own < links.both:
        return Links.of(links.into, links.out, own)
    alike = [r for r in records if (r.spec.workload, r.spec.mode) == (record.spec.workload, record.spec.mode)]
    return Links.of(links.into, links.out, max([links.both, *filter(None, map(_both_ways, alike))]))


def _both_ways(record: RunRecord) -> float | None:
    """Bytes of both ways in a second in which any copy ran."""
    moved = record.moved
    nbytes = (moved.in_bytes_per_step or 0) + (moved.out_bytes_per_step or 0)
    return nbytes / moved.copy_busy_s if moved.copy_busy_s else None


def _shared(record: RunRecord, links: Links, own: Links, own_s: float, in_place: bool) -> str | None:
    """Ranks that share a way to host memory, if the row is met at the rate that copies, or updates in host memory,
    really had."""
    if own == links or record.step_s is None or abs(own_s / record.step_s - 1) > CLOSE:
        return None
    if in_place:
        rates = f"{own.in_place / GIB:.1f} GiB/s of a GPU and not {links.in_place / GIB:.1f}"
        return f"{KERNELS} {rates}, at which it takes {own_s:.3f} s"
    rates = f"{own.both / GIB:.1f} GiB/s of a GPU and not {links.both / GIB:.1f}"
    return f"{SHARED if own.both > links.both else SLOWER} {rates}, at which it takes {own_s:.3f} s"


def _large(record: RunRecord, schedule: Schedule, layout: Layout, simulated_s: float) -> str | None:
    """A parameter of before such ones were cut, where staging is of many extents: its moments wait for one of that
    size, by up to a tenth of a step in what was seen."""
    largest = max((chunk.nbytes for chunk in layout.chunks), default=0)
    fits = schedule.cut_above is None or largest <= schedule.cut_above
    if fits or schedule.write_back != "backward" or record.step_s is None:
        return None
    if not 0.9 * record.step_s < simulated_s < record.step_s:
        return None
    return f"{LARGE} up to {largest / GIB:.1f} GiB"


def _unsteady(record: RunRecord, simulated_s: float) -> str | None:
    """Steps further apart than CLOSE, the fastest of which is met: their mean holds what is not the arm's."""
    steps = [step.step_s for step in record.steps if step.step_s is not None]
    if not steps or max(steps) < (1 + CLOSE) * min(steps) or abs(simulated_s / min(steps) - 1) > CLOSE:
        return None
    off = 100 * (simulated_s / min(steps) - 1)
    return f"{UNSTEADY} {min(steps):.3f} to {max(steps):.3f} s, and of the fastest the error is {off:+.1f} %"
