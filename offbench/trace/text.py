"""A trace's summary as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offbench.planner.text import table
from offbench.record import Split, TimeParts
from offbench.trace.phases import PHASES
from offbench.trace.summary import Bulk, Small, TraceSummary
from offbench.units import count, gib, show_size

CAUSES = {
    "compute_s": "computing",
    "update_s": "AdamW",
    "move_in_s": "waits for move-in",
    "slot_s": "waits for slots",
    "tail_s": "tail: waits for write-back",
    "gather_s": "waits for collectives",
    "behind_bulk_s": "small copies behind bulk",
    "host_wait_s": "host waits for the device",
    "profiler_s": "profiler's own buffers",
    "launch_s": "launch-bound",
    "between_s": "between kernels",
    "unexplained_s": "unexplained",
}
"""Rows of the table of causes, in its order."""


def split_lines(ours: Split | None, apart: Split | None, against: Path | None) -> Iterator[str]:
    """A table of causes by phase, and with `apart` a second one of what the other trace does not have."""
    if ours is None or ours.steps is None:
        yield "where the time of a step went: not known, no step is marked (prof.step())"
        yield ""
        return
    yield f"where the compute stream's time went, seconds a step, mean of {count(ours.steps, 'step')}"
    yield ""
    yield from _causes(ours, ours.total.step_s, "computing")
    yield ""
    if apart is None:
        return
    yield f"what {against} does not have"
    yield ""
    yield from _causes(apart, ours.total.step_s, "slowed compute")
    if apart.kernels_digest is None:
        yield f"slowed compute is not only that: other kernels ran ({apart.total.kernels:+.6g} a step)"
    yield ""


def _causes(found: Split, step_s: float | None, compute: str) -> Iterator[str]:
    columns = [found.total, *(getattr(found, phase) for phase in PHASES)]
    rows = [
        (
            compute if name == "compute_s" else label,
            *(_cell(getattr(part, name)) for part in columns),
            _share(found.total, name, step_s),
        )
        for name, label in {"step_s": "step", **CAUSES}.items()
    ]
    yield from table(("", "step", *PHASES, "% of step"), rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:z.4f}"


def _share(total: TimeParts, name: str, step_s: float | None) -> str:
    value = getattr(total, name)
    return f"{100 * value / step_s:z.2f}" if value is not None and step_s else "-"


def summary_lines(found: TraceSummary) -> Iterator[str]:
    """What it holds, a table of streams, the copies of each way, and what waited."""
    steps = "steps not known (--steps)" if found.steps is None else count(found.steps, "step")
    devices = len({use.device for use in found.streams})
    of = "what they launched" if found.marked else "the whole trace"
    yield f"{count(devices, 'GPU')}, {steps}, {found.span_s:.3f} s of device work; all figures of {of}"
    yield ""
    header = ("stream", "kernels", "kernel s", "copies", "copy s", "memsets", "busy s", "busy %")
    rows = [
        (
            f"GPU {use.device} stream {use.stream}",
            str(use.kernels),
            f"{use.kernel_s:.3f}",
            str(use.copies),
            f"{use.copy_s:.3f}",
            str(use.memsets),
            f"{use.busy_s:.3f}",
            f"{100 * use.busy_s / found.span_s:.0f}" if found.span_s else "-",
        )
        for use in found.streams
    ]
    yield from table(header, rows)
    yield ""
    yield from (_bulk("in", found.bulk_in), _bulk("out", found.bulk_out))
    yield from (
        _small("in", found.small_in, found.small_h2d, found),
        _small("out", found.small_out, found.small_d2h, found),
    )
    if found.idle_while_small_waits_s is not None:
        yield f"compute idle while a small copy waited: {found.idle_while_small_waits_s:.3f} s"
    for kind in found.host_waits:
        times = f"{kind.total_s:.3f} s in {count(kind.count, 'call')}, longest {kind.longest_s:.4f} s"
        yield f"host waited in {kind.call}: {times}"


def _bulk(way: str, copies: Bulk) -> str:
    if not copies.count:
        return f"bulk copies {way}: none"
    rate = f", {gib(copies.nbytes / copies.busy_s)} GiB/s" if copies.busy_s else ""
    return f"bulk copies {way}: {copies.count}, {gib(copies.nbytes)} GiB in {copies.busy_s:.3f} s{rate}"


def _small(way: str, copies: Small, a_step: float | None, found: TraceSummary) -> str:
    said = f"small copies {way} (below {show_size(found.small_bytes)}): "
    if not copies.count:
        return said + "none"
    said += str(copies.count) if a_step is None else f"{copies.count}, {a_step:.6g} a step"
    if copies.unlaunched:
        said += f", {copies.unlaunched} launched before the trace began"
    if copies.wait_s is None or copies.longest_wait_s is None:
        return said
    said += f"; waited {copies.wait_s:.3f} s in all, longest {copies.longest_wait_s:.4f} s"
    return f"{said}; behind bulk copies {copies.behind_bulk_s:.3f} s, longest {copies.longest_behind_bulk_s:.4f} s"
