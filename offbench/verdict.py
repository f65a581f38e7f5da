"""One line per arm at the end of a run: what it cost, and what to try next."""

from __future__ import annotations

from collections.abc import Iterable

from offbench.compare import Group, Row, compare
from offbench.config import RunSpec
from offbench.naming import arm_name
from offbench.record import RunRecord
from offbench.units import gib

HIDDEN = 0.02
"""An arm within this share of `none` has little left to gain."""
NOTHING = 0.005
"""And within this one nothing."""


def verdicts(records: Iterable[RunRecord], numa_nodes: int = 1) -> list[str]:
    """A line per row of the records, in the order the arms were first launched."""
    return [_line(row, group, numa_nodes) for group in compare(records) for row in group.rows]


def _line(row: Row, group: Group, numa_nodes: int) -> str:
    name = f"{row.arm} ({row.axes})" if row.axes else row.arm
    parts = [row.status]
    if row.step_s is not None:
        parts.append(f"{row.step_s.median:.4g} s a step")
    if row.x_none is not None and row.arm != "none":
        parts.append("same as none" if row.same else f"x none {row.x_none:.2f}")
        parts.append(f"exposed {row.exposed_s:.3f} s")
    if row.floor_s is not None and row.floor_s > 0:
        parts.append(f"floor {row.floor_s:.3g} s" + (f" ({row.bound_by})" if row.bound_by else ""))
    if row.steady_peak_bytes:
        parts.append(f"peak {gib(row.steady_peak_bytes)} GiB")
    failed = group.failures if row.step_s is None else []
    said = arm_name(row.spec, row.label)  # a failed launch may know less than its row, such as what --numa did
    mine = next((line.partition(": ")[2] for line in failed if line.startswith(said + ",")), None)
    if mine:
        parts = [mine.rstrip(".")]
    return f"{name}: {', '.join(parts)}. {next_step(row, numa_nodes)}"


def next_step(row: Row, numa_nodes: int = 1) -> str:
    """What to try after this row."""
    if row.step_s is None:
        return _after_failure(row.status, row.spec)
    if row.arm == "none":
        return "The baseline."
    if row.x_none is None:
        return "Add --arm none to see what it costs."
    if not row.same and row.x_none < 1 - HIDDEN:
        return "Faster than none: noise, or none is short of memory; repeat both with --launches 3."
    if row.same and row.x_none - 1 > HIDDEN:
        return "That is less than launches of one arm differ by; repeat both with more --launches."
    if row.same or row.x_none - 1 <= HIDDEN:
        is_nothing = row.same or row.x_none - 1 <= NOTHING
        exposed = "Nothing is exposed" if is_nothing else f"{row.x_none - 1:.1%} of a step is left to gain"
        if row.arm == "zerocopy":
            return f"{exposed}, and nothing is staged."
        held = "fewer --slots" if (row.spec.arm.slots or 0) > 1 else "--arm chunked"
        return f"{exposed}; {held} would hold less memory."
    if row.arm == "main":
        return "Try --arm chunked: both directions at once, and less memory."
    if not row.spec.arm.numa and numa_nodes > 1:
        return "Try --numa."
    if row.arm == "chunked":
        return "Try --arm overlap: it hides copies behind the next forward."
    if row.arm == "zerocopy":  # its bytes do not pass the copy engines, so small copies need not wait
        return "Try a larger --state-budget, or --arm stream."
    if waits := _small_copies(row.spec):
        return f"Try {waits}."
    if row.spec.workload.activation_offload and _has_engines(row.spec) and row.spec.arm.activation_copies == "copy":
        return "Try --activation-copies kernel: block inputs wait for state on the copy engines."
    if row.arm == "stream":
        return "Try a larger --state-budget."
    slots = row.spec.arm.slots
    return f"Try --slots {2 * slots}." if slots is not None else "Compare with the other arms: offbench arms."


def _small_copies(spec: RunSpec) -> str:
    """The options that keep small copies from waiting behind bulk ones, as far as they are not in use."""
    arm = spec.arm
    if not _has_engines(spec):
        return ""
    unused = [("--fsdp-copies kernel", arm.fsdp_copies == "stock"), ("--readbacks kernel", arm.readbacks == "copy")]
    return " ".join(flag for flag, missing in unused if missing)


def _has_engines(spec: RunSpec) -> bool:
    """Whether copies may wait for each other: on a CPU nothing is copied."""
    return spec.mode.device != "cpu"


def _after_failure(status: str, spec: RunSpec) -> str:
    if status in {"oom", "skipped"}:
        held = (
            "" if spec.arm.name in {"chunked", "overlap", "zerocopy"} else ", or --arm chunked, which holds less state"
        )
        return f"Try fewer --layers or a shorter --seq-len{held}."
    if status == "timeout":
        return "Read the stacks in the record, or allow more with --timeout."
    if status == "interrupted":
        return "Run it again with --resume."
    if status == "invalid":
        return "Its figures do not count; see the record's checks."
    return "Read the logs in the run's folder."
