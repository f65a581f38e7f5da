"""The figures of a plan: the bound, step against memory, step against link, and where the seconds of a step go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from offbench import arms
from offbench.errors import UsageError
from offbench.planner import whatif
from offbench.planner.bounds import deferred_s, hidden_at, resident_s
from offbench.planner.chart import Chart, Lane, Series, Strip, draw, timeline
from offbench.planner.choose import Candidate, Setting, at_budget, stream_at
from offbench.planner.gather import Inputs
from offbench.planner.inputs import Links
from offbench.planner.policy import Policy
from offbench.planner.result import Span
from offbench.units import GIB, gib

MAIN, CHUNKED, OVERLAP, STREAM = "#8a6d3b", "#e0662f", "#2a78d6", "#15936a"
ZEROCOPY, BOUND, MEMORY = "#c2508f", "#3a3a38", "#8a5fc0"
"""One colour per schedule, in every figure."""
FORWARD, BACKWARD, UPDATE, WAIT, IN, OUT = "#5b8fd9", "#2f5c9e", "#8a5fc0", "#e9e2d0", "#15936a", "#e0662f"
POINTS = 16
"""Budgets along a line."""
RATES = tuple(8 * 1.25**k for k in range(13))
"""GiB/s one way: from a shared Gen4 link to beyond Gen6's line rate."""


def write(folder: Path, inputs: Inputs) -> Iterator[Path]:
    """Write every figure into the folder and name it. Raises UsageError when that is not possible."""
    at = whatif.setting(inputs)
    notes = describe(inputs)
    figures: dict[str, Callable[[], str]] = {
        "bound.svg": lambda: draw(bound(at, notes)),
        "memory.svg": lambda: draw(memory(at, notes)),
        "link.svg": lambda: draw(link(at, notes)),
        "timeline.svg": lambda: steps(at, notes),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, make in figures.items():
            (folder / name).write_text(make())
            yield folder / name
    except OSError as error:
        raise UsageError(f"cannot write figures to {folder}: {error.strerror}; choose another --plot") from error


def describe(inputs: Inputs) -> tuple[str, ...]:
    """Two lines that say that nothing here is measured, and what went in."""
    c, links, job = inputs.compute, inputs.links, inputs.job
    name = job.model or "state in equal layers"
    return (
        f"Simulated, not measured: {name}, {job.world} ranks, {gib(job.layout.nbytes)} GiB of state a rank; "
        f"forward {c.forward:.3g}, backward {c.backward:.3g},",
        f"update {c.update:.3g} s; link {gib(links.into)} GiB/s in, {gib(links.out)} out, {gib(links.both)} both ways",
    )


def budgets(at: Setting) -> list[int]:
    """From nothing to all of the state."""
    return [at.nbytes * k // (POINTS - 1) for k in range(POINTS)]


def bound(at: Setting, notes: tuple[str, ...]) -> Chart:
    """Step, in steps of none, against the state on the GPU when backward ends."""
    total = at.compute.total
    streams = [stream_at(at, budget, fastest=True) for budget in budgets(at)]
    kept = [at_budget(at, "overlap", budget, 4) for budget in budgets(at)]

    def points(found: list[Candidate]) -> tuple[tuple[float, float], ...]:
        return tuple((c.simulated.state_at_backward_end_bytes / GIB, c.simulated.step_s / total) for c in found)

    nbytes, grads = at.nbytes, at.layout.gradients
    held = sorted({0.0, hidden_at(nbytes, at.compute, at.links), float(nbytes)})
    grid = [nbytes * k / 32 for k in range(33)]
    form = tuple((b / GIB, deferred_s(nbytes, b, at.compute, at.links) / total) for b in held)
    staging = max(row.arm.staging_bytes or 0 for row in streams)
    tight = tuple((b / GIB, resident_s(nbytes, b, staging, grads, at.compute, at.links) / total) for b in grid)
    return Chart(
        "What state on the GPU buys: the bound, and two schedules",
        notes,
        "GiB of state on the GPU when backward ends",
        "step, in steps of none",
        (
            Series("overlap", points(kept), OVERLAP, dots=True),
            Series("stream", points(streams), STREAM, dots=True),
            Series("memory bound", tight, MEMORY, dashed=True),
            Series("bound", form, BOUND, dashed=True),
        ),
        y_from=0.9,
    )


def memory(at: Setting, notes: tuple[str, ...]) -> Chart:
    """Step, in steps of none, against the peak of the whole GPU."""
    every = budgets(at)
    made = {
        ("main", MAIN): [at_budget(at, "main", b) for b in every],
        ("chunked", CHUNKED): [at_budget(at, "chunked", b) for b in every],
        ("overlap", OVERLAP): [at_budget(at, "overlap", b, 4) for b in every],
        ("stream", STREAM): [stream_at(at, b) for b in every],
    }
    if at.in_place:
        made["zerocopy", ZEROCOPY] = [at_budget(at, "zerocopy", b) for b in every]
    none = at_budget(at, "none", 0).simulated
    lines = [
        Series(
            name,
            tuple((c.simulated.peak_bytes / GIB, c.simulated.step_s / none.step_s) for c in found),
            colour,
            dots=True,
        )
        for (name, colour), found in made.items()
    ]
    lines.append(Series("none", ((none.peak_bytes / GIB, 1.0),), BOUND, dots=True))
    return Chart(
        "Step time against peak memory, as the budget grows from left to right",
        notes,
        "peak GiB of the GPU, estimated",
        "step, in steps of none",
        tuple(lines),
        y_from=0.8,
    )


def link(at: Setting, notes: tuple[str, ...]) -> Chart:
    """Step against the link's rate; both ways in the proportion of the plan's link."""
    none, half = at.compute.total, at.nbytes // 2
    duplex = min(2.0, at.links.both / at.links.into)
    colours = {
        "main": MAIN,
        "chunked": CHUNKED,
        "overlap": OVERLAP,
        "stream, half": STREAM,
        "zerocopy, half": ZEROCOPY,
    }
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in colours}
    for rate in RATES:
        there = replace(at, links=Links(rate * GIB, rate * GIB, duplex * rate * GIB))
        found = (
            at_budget(there, "main", 0),
            at_budget(there, "chunked", 0),
            at_budget(there, "overlap", 0, 4),
            stream_at(there, half),
            at_budget(there, "zerocopy", half),
        )
        for name, row in zip(lines, found, strict=True):
            lines[name].append((rate, row.simulated.step_s / none))
    return Chart(
        f"Step time against the link (half: {gib(half)} GiB of state stay on the GPU)",
        (notes[0], f"update {at.compute.update:.3g} s; both ways {duplex:.2f} x one way"),
        "GiB/s one way, a rank, while all copy",
        "step, in steps of none",
        tuple(Series(name, tuple(points), colours[name]) for name, points in lines.items()),
        y_from=0.5,
        y_to=4.0,
    )


def steps(at: Setting, notes: tuple[str, ...]) -> str:
    """What the GPU and the link do over one steady step of each schedule."""
    half = at.nbytes // 2
    shown = [*(at_budget(at, name, 0) for name in ("main", "chunked", "overlap")), stream_at(at, half)]
    strips = []
    for row in shown:
        policy = Policy.of(arms.ARMS[row.arm.name].schedule(row.arm))
        spans: list[Span] = []
        found = at.simulate(policy, spans)
        extra = f", {gib(row.budget)} GiB on the GPU" if row.budget else ""
        heading = f"{policy.name}{extra}: {found.step_s:.2f} s, {found.step_s / at.compute.total:.2f} x none"
        strips.append(Strip(heading, lanes(spans)))
    legend = (
        ("forward, loss", FORWARD),
        ("backward, clip", BACKWARD),
        ("update", UPDATE),
        ("waits", WAIT),
        ("copy in", IN),
        ("copy out", OUT),
    )
    return timeline("One steady step, from the start of its forward", notes, strips, legend)


def lanes(spans: list[Span]) -> tuple[Lane, ...]:
    """Compute, move-in and write-back of a step."""
    colours = {"forward": FORWARD, "loss": FORWARD, "backward": BACKWARD, "step": BACKWARD, "update": UPDATE}
    compute = [(s.start, s.end, colours.get(s.compute, WAIT)) for s in spans]
    moving_in = [(s.start, s.end, IN) for s in spans if s.moving_in]
    moving_out = [(s.start, s.end, OUT) for s in spans if s.moving_out]
    return Lane("compute", merged(compute)), Lane("in", merged(moving_in)), Lane("out", merged(moving_out))


def merged(spans: list[tuple[float, float, str]]) -> tuple[tuple[float, float, str], ...]:
    """Neighbours of one colour as one."""
    joined: list[tuple[float, float, str]] = []
    for start, end, colour in spans:
        if joined and joined[-1][2] == colour and abs(start - joined[-1][1]) < 1e-9:
            joined[-1] = (joined[-1][0], end, colour)
        else:
            joined.append((start, end, colour))
    return tuple(joined)
