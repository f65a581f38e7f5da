"""Columns of a report about traced steps: by cause, what an arm's step took beyond the ideal of its schedule."""

from __future__ import annotations

from offbench.compare import Group, Row
from offbench.naming import arm_name
from offbench.record import TimeParts

PARTS = {
    "step_s": "above ideal s",
    "move_in_s": "move-in s",
    "slot_s": "slots s",
    "tail_s": "tail s",
    "behind_bulk_s": "behind bulk s",
    "host_wait_s": "host waits s",
    "profiler_s": "profiler s",
    "launch_s": "launch s",
    "compute_s": "slowed s",
    "update_s": "AdamW s",
    "gather_s": "collectives s",
    "between_s": "between s",
    "unexplained_s": "unexplained s",
}
"""Fields of `TimeParts` and their heads; the first is the sum of the others."""
UNEXPLAINED = 0.005
"""Share of the traced step without a known cause that is pointed out."""
HEADS = ("arm", "axes", "traced s", "above none s", "ideal above none s", *PARTS.values(), "unexplained %")


def lines(group: Group) -> list[list[str]]:
    """The cells of the rows that have such figures, as many a line as HEADS."""
    return [_line(row) for row in group.rows if row.gap is not None]


def notes(group: Group) -> list[str]:
    """How to read them; empty where there are none."""
    if not lines(group):
        return []
    read = "last table: steps under the profiler, rank 0, less those of none and less what the schedule's ideal has"
    found = [
        f"{read}, by cause (docs/trace.md); above ideal s = above none s - ideal above none s = the sum of the causes "
        "and is not gap s of the window, since the profiler slows the host: launch is more than there",
        "below zero: the ideal waits there and these steps did not, as when the host comes later than the copy",
    ]
    for row in group.rows:
        name, share = arm_name(row.spec, row.label), _unexplained(row)
        if share is not None and abs(share) > UNEXPLAINED:
            found.append(f"{name}: {share:.1%} of the traced step has no known cause")
        if row.gap is not None and row.apart is not None and row.apart.kernels_digest is None:
            found.append(f"{name}: other kernels than those of none ran on the compute stream; slowed holds them too")
    return found


def _unexplained(row: Row) -> float | None:
    """Share of the row's own traced step."""
    total = row.split.total if row.split is not None else TimeParts()
    return total.unexplained_s / total.step_s if total.step_s and total.unexplained_s is not None else None


def figures(row: Row) -> dict[str, float | None]:
    """For machines: `traced_step_s`; `traced_exposed_s`, what it has and `none` has not; `ideal_exposed_s`, the same
    of the ideal; their difference, `traced_gap_s`, and its parts, `gap_move_in_s` and the like. Null without a trace
    of both, and without an ideal."""
    total = row.gap or TimeParts()
    parts = {f"gap_{name}": getattr(total, name) for name in PARTS if name != "step_s"}
    return {
        "traced_step_s": row.split.total.step_s if row.split is not None else None,
        "traced_exposed_s": row.apart.total.step_s if row.apart is not None else None,
        "ideal_exposed_s": row.ideal_parts.step_s if row.ideal_parts is not None else None,
        "traced_gap_s": total.step_s,
        **parts,
    }


def _line(row: Row) -> list[str]:
    share, found, gap = _unexplained(row), figures(row), row.gap or TimeParts()
    seconds = [found["traced_step_s"], found["traced_exposed_s"], found["ideal_exposed_s"]]
    seconds += [getattr(gap, name) for name in PARTS]
    return [
        row.label or row.arm,
        row.axes or "-",
        *map(_seconds, seconds),
        "-" if share is None else f"{100 * share:z.2f}",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:z.3f}"
