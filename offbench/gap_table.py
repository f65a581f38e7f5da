"""Columns of a report about traced steps: by cause, what an arm's step has and that of `none` has not."""

from __future__ import annotations

from collections.abc import Sequence

from offbench.compare import Group, Row
from offbench.naming import arm_name
from offbench.record import TimeParts

PARTS = {
    "step_s": "above none s",
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
HEADS = ("arm", "axes", "traced s", *PARTS.values(), "unexplained %", "ideal above none s")


def lines(group: Group) -> list[list[str]]:
    """The cells of the rows that have such figures, as many a line as HEADS."""
    return [_line(row) for row in group.rows if row.gap is not None]


def notes(group: Group) -> list[str]:
    """How to read them; empty where there are none."""
    if not lines(group):
        return []
    read = "last table: steps under the profiler, rank 0, less those of none, by cause (docs/trace.md)"
    found = [f"{read}; it slows the host, so launch is more than in the window"]
    for row in group.rows:
        name, share = arm_name(row.spec, row.label), _unexplained(row)
        if share is not None and abs(share) > UNEXPLAINED:
            found.append(f"{name}: {share:.1%} of the traced step has no known cause")
        if row.gap is not None and row.gap.kernels_digest is None:
            found.append(f"{name}: other kernels than those of none ran on the compute stream; slowed holds them too")
    return found


def _unexplained(row: Row) -> float | None:
    """Share of the row's own traced step."""
    total = row.split.total if row.split is not None else TimeParts()
    return total.unexplained_s / total.step_s if total.step_s and total.unexplained_s is not None else None


def figures(row: Row) -> dict[str, float | None]:
    """For machines: `traced_step_s`, and of what `none` has not `traced_exposed_s` and its parts, `gap_move_in_s` and
    the like; null without a trace of both."""
    total = row.gap.total if row.gap is not None else TimeParts()
    parts = {f"gap_{name}": getattr(total, name) for name in PARTS if name != "step_s"}
    traced = row.split.total.step_s if row.split is not None else None
    return {"traced_step_s": traced, "traced_exposed_s": total.step_s, **parts}


def _line(row: Row) -> list[str]:
    assert row.gap is not None
    assert row.split is not None
    share = _unexplained(row)
    seconds: Sequence[float | None] = (row.split.total.step_s, *(getattr(row.gap.total, name) for name in PARTS))
    ideal = None if row.ideal_s is None or row.gap_s is None or row.exposed_s is None else row.exposed_s - row.gap_s
    return [
        row.label or row.arm,
        row.axes or "-",
        *map(_seconds, seconds),
        "-" if share is None else f"{100 * share:z.2f}",
        _seconds(ideal),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:z.3f}"
