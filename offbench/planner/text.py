"""A plan and its comparisons as lines of text."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from offbench.config import Mode, RunSpec, Workload
from offbench.estimate import estimate
from offbench.planner.choose import Candidate, Choice
from offbench.planner.gather import Inputs
from offbench.planner.reality import Compared
from offbench.units import GIB, gib, show_size
from offbench.workload import presets

COLUMNS = (
    "schedule",
    "step s",
    "x none",
    "tok/s",
    "exposed s",
    "wait in",
    "wait out",
    "floor s",
    "state GiB",
    "GPU GiB",
    "",
)

INDENT, WIDTH = " " * 11, 110
BOUND = (
    "Its time is a lower bound. With FSDP2's stock copies, which queue behind bulk ones, overlap took 17 to 35 % "
    "longer than simulated, on one machine longer than chunked; --fsdp-copies kernel takes them out of that queue."
)


def plan_lines(
    inputs: Inputs, found: Sequence[Candidate], front: Sequence[Candidate], choice: Choice
) -> Iterator[str]:
    """Inputs with their origins, the table, the recommendation."""
    job, c, links = inputs.job, inputs.compute, inputs.links
    yield "Simulated, not measured: " + job.said
    pieces = f"{len(job.layout.chunks)} chunks of up to {show_size(job.chunk_bytes)}"
    yield f"  state    {gib(job.layout.nbytes)} GiB a rank, each way and step, in {pieces}"
    clip = f", clip {c.clip:.3g}" if c.clip else ""
    yield f"  compute  forward {c.forward:.3g}, backward {c.backward:.3g}{clip}, update {c.update:.3g} s"
    yield from prose(inputs.compute_from, INDENT)
    ways = f"{gib(links.into)} in, {gib(links.out)} out, {gib(links.both)} both ways"
    yield f"  link     {ways}, GiB/s a rank while all copy"
    yield from prose(inputs.links_from, INDENT)
    yield ""
    yield from table(COLUMNS, [_row(row, found[0], inputs, row in front) for row in found])
    yield "* no other schedule is as fast with as little state on the GPU"
    yield "exposed = step - none = wait in + wait out; state: the most on the GPU at any time; GPU: estimate of it all"
    yield ""
    yield from recommendation(inputs, choice)


def _row(row: Candidate, none: Candidate, inputs: Inputs, front: bool) -> list[str]:
    s, tokens = row.simulated, inputs.job.tokens_per_step
    whole = gpu_bytes(inputs, row)
    return [
        row.name,
        f"{s.step_s:.3f}",
        f"{s.step_s / none.simulated.step_s:.2f}",
        "-" if tokens is None else rate(tokens / s.step_s),
        f"{s.step_s - none.simulated.step_s:.3f}",
        f"{s.waits.move_in:.3f}",
        f"{s.waits.slot + s.waits.write_back:.3f}",
        f"{row.floor_s:.3f}",
        f"{s.peak_state_bytes / GIB:.1f}",
        "-" if whole is None else f"{whole / GIB:.1f}",
        "*" if front else "",
    ]


def gpu_bytes(inputs: Inputs, row: Candidate) -> int | None:
    """Estimate of a rank's peak on the GPU, as before a launch; None without a preset."""
    job = inputs.job
    if job.model is None or job.seq_len is None:
        return None
    w = Workload(model=job.model, layers=job.layers, seq_len=job.seq_len, micro_batch=job.micro_batch, ep=job.ep)
    return estimate(RunSpec(workload=w, arm=row.arm, mode=Mode(world=job.world, nproc=job.world))).gpu_bytes


def recommendation(inputs: Inputs, choice: Choice) -> Iterator[str]:
    """What to take, why, and the command that measures it."""
    yield from prose(f"Take {choice.candidate.name}: {choice.reason}.")
    if choice.candidate.arm.name == "overlap":
        yield from prose(BOUND)
    if inputs.job.model is None:
        yield f"In your trainer: the schedule of arm {choice.candidate.name} (docs/using-the-optimizer.md)."
    else:
        yield "Measure it: " + run_line(inputs, choice)


def run_line(inputs: Inputs, choice: Choice) -> str:
    """The command that measures the choice beside `none` and `chunked`."""
    job, arm = inputs.job, choice.candidate.arm
    assert job.model is not None
    shape = presets.find(job.model)
    words = ["offbench", "run", "--model", job.model, "--world", str(job.world), "--ep", str(job.ep)]
    words += ["--layers", str(job.layers)] if job.layers != shape.layers else []
    words += ["--seq-len", str(job.seq_len)] if job.seq_len != shape.seq_len else []
    words += ["--micro-batch", str(job.micro_batch)] if job.micro_batch != 1 else []
    for name in dict.fromkeys(("none", "chunked", arm.name)):
        words += ["--arm", name]
    words += ["--slots", str(arm.slots), "--fsdp-copies", "kernel"] if arm.name == "overlap" else []
    words += ["--numa"] if (inputs.sockets or 1) > 1 else []
    return shlex.join(words)


def reality_lines(compared: Sequence[Compared], skipped: Sequence[str]) -> Iterator[str]:
    """Simulated against actual step times, the reasons of what is far off, and the rows that were left out."""
    rows = [[c.name, f"{c.simulated_s:.3f}", f"{c.actual_s:.3f}", f"{100 * c.error:+.1f} %"] for c in compared]
    yield from table(("row", "simulated s", "actual s", "error"), rows)
    reasons = [f"{c.name}: {c.reason}" for c in compared if c.reason]
    for line in (*reasons, *skipped):
        yield from prose(line)


def prose(text: str, indent: str = "") -> list[str]:
    """A sentence in lines of readable length."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def rate(tokens_s: float) -> str:
    """Tokens a second: `58.1k`, or in full below ten thousand."""
    return f"{tokens_s / 1e3:.1f}k" if tokens_s >= 1e4 else f"{tokens_s:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need, the first one to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        first, *rest = line
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
