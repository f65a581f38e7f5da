"""A plan and its comparisons as lines of text."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from offbench import arms
from offbench.planner.choose import Candidate, Choice
from offbench.planner.gather import Inputs
from offbench.planner.reality import Compared
from offbench.planner.whatif import Outcome, WhatIf
from offbench.units import GIB, gib, show_size
from offbench.workload import presets

COLUMNS = (
    "schedule",
    "budget",
    "step s",
    "x none",
    "tok/s",
    "exposed s",
    "wait in",
    "wait out",
    "small",
    "floor s",
    "state",
    "peak",
    "",
)
WHAT_IF_COLUMNS = (
    "what if",
    "one way",
    "both",
    "state",
    "none s",
    "chunked",
    "overlap",
    "stream, half",
    "least budget",
    "its peak",
)
SPARE, WHAT_IF_SPARE = ("small", "floor s", "wait out", "wait in", "exposed s", "tok/s"), ("state", "one way", "both")
"""Columns that a narrow terminal goes without, the first ones first."""
REALITY_COLUMNS = (
    "row",
    "simulated s",
    "actual s",
    "error",
    "no small waits",
    "small",
    "traced: small",
    "launch",
)
LOSS = "of the forward head and loss {:.3g} s, assumed: their share of its FLOPs; all state must be there before them"
NO_LOSS = "head and loss are taken to take no time, as no model is known: all state must be there before they begin"
HOST = (
    "on one H200 overlap and stream, with small copies by kernels, took up to 0.09 s a step longer than simulated: "
    "docs/plan.md, What is not"
)
TRACED_HOST = "traced, where the profiler slows the host, compute idled for them longer than in none:"
TRACED = (
    "small: simulated, small copies behind bulk ones; traced: what traced steps spent so, and for launches the host "
    "had not made yet, above those of none. Launches are not simulated; the profiler makes them take longer."
)

LATE = ("overlap", "stream")
"""Arms that copy beside forward and backward."""
IN_PLACE = "exposed of zerocopy: also forward slowed by its kernel's multiprocessors, less AdamW, which runs beside it"
INDENT, WIDTH, FOLDED = " " * 11, 110, 20
KERNEL = (
    "Times hold with --fsdp-copies kernel --readbacks kernel, the defaults of offbench run on a GPU: otherwise small "
    "copies wait behind bulk ones, and overlap and stream are far slower (--fsdp-copies stock --readbacks copy "
    "simulates that)."
)


def plan_lines(
    inputs: Inputs, found: Sequence[Candidate], front: Sequence[Candidate], choice: Choice, most: int | None = None
) -> Iterator[str]:
    """Inputs with their origins, the table, the recommendation. most: bytes of GPU memory, where they are given."""
    job, c, links = inputs.job, inputs.compute, inputs.links
    yield from prose("Simulated, not measured: " + job.said)
    usual = arms.ARMS["chunked"].resolve(chunk_bytes=job.chunk_bytes)
    copies = len(job.cut(arms.ARMS["chunked"].schedule(usual).chunk_bytes).chunks)
    pieces = f"chunks of up to {show_size(job.chunk_bytes)} in {usual.pieces} pieces, {copies} copies each way"
    yield from labelled("state", f"{gib(job.layout.nbytes)} GiB a rank, each way and step: {pieces}")
    clip = f", clip {c.clip:.3g}" if c.clip else ""
    yield from labelled(
        "compute", f"forward {c.forward:.3g}, backward {c.backward:.3g}{clip}, update {c.update:.3g} s"
    )
    yield from prose(inputs.compute_from, INDENT)
    yield from prose(LOSS.format(c.loss) if c.loss else NO_LOSS, INDENT)
    ways = f"{gib(links.into)} in, {gib(links.out)} out, {gib(links.both)} both ways"
    yield from labelled("link", f"{ways}, GiB/s a rank while all copy")
    yield from prose(inputs.links_from, INDENT)
    yield from host_lines(inputs)
    yield ""
    marks = ["over" if most and row.simulated.peak_bytes > most else "*   " if row in front else "" for row in found]
    rows = [_row(row, found[0], inputs, mark) for row, mark in zip(found, marks, strict=True)]
    yield from table(COLUMNS, rows, SPARE)
    if most and "over" in marks:
        yield f"over: its peak is more than {gib(most)} GiB (--memory-limit)"
    yield from prose(
        "* no other row is as fast with as little memory; budget, state (when backward ends) and peak in GiB"
    )
    yield from prose(
        "exposed = step - none = wait in + wait out + small; budget: --state-budget, state that stays on the GPU"
    )
    yield from prose(
        "names of stream: --staging, and to --at-loss when the forward ends; without that to what raises no peak"
    )
    if any(row.arm.name == "zerocopy" for row in found):
        yield from prose(IN_PLACE)
    if job.model is None or job.seq_len is None:
        yield "peak: parameters, gradients and state; activations are not in it"
    yield ""
    yield from recommendation(inputs, choice)


def host_lines(inputs: Inputs) -> Iterator[str]:
    """What launches cost is in no figure: said apart, as far as the record's traces tell."""
    yield "  host     launches take no time here"
    seconds = ", ".join(f"{arm} {launch_s:.3f}" for arm, launch_s in inputs.launches.items())
    yield from prose(f"{TRACED_HOST} {seconds} s" if seconds else HOST, INDENT)


def _row(row: Candidate, none: Candidate, inputs: Inputs, mark: str) -> list[str]:
    s, tokens = row.simulated, inputs.job.tokens_per_step
    return [
        row.name,
        "-" if row.arm.state_budget is None else gib(row.budget),
        f"{s.step_s:.3f}",
        f"{s.step_s / none.simulated.step_s:.2f}",
        "-" if tokens is None else rate(tokens / s.step_s),
        f"{max(0.0, s.step_s - none.simulated.step_s):.3f}",
        f"{s.waits.move_in:.3f}",
        f"{s.waits.slot + s.waits.write_back:.3f}",
        f"{s.waits.small:.3f}",
        f"{row.floor_s:.3f}",
        gib(s.state_at_backward_end_bytes),
        gib(s.peak_bytes),
        mark,
    ]


def recommendation(inputs: Inputs, choice: Choice) -> Iterator[str]:
    """What to take, why, and the command that measures it."""
    if not choice.fits:
        yield from prose(f"{choice.reason[0].upper()}{choice.reason[1:]}. More ranks (--world) hold less each.")
        return
    yield from prose(f"Take {choice.candidate.name}: {choice.reason}.")
    if choice.candidate.arm.name in LATE and not inputs.small.any:
        yield from prose(KERNEL)
    if unproven := arms.ARMS[choice.candidate.arm.name].unproven:
        yield from prose(f"{choice.candidate.arm.name} is {unproven}.")
    if inputs.job.model is None:
        budget = f" with {gib(choice.candidate.budget)} GiB of state on the GPU" if choice.candidate.budget else ""
        yield f"In your trainer: the schedule of arm {choice.candidate.name}{budget} (docs/using-the-optimizer.md)."
    else:
        yield "Measure it: " + run_line(inputs, choice)


def run_line(inputs: Inputs, choice: Choice) -> str:
    """The command that measures the choice beside `none`, and `chunked` where --slots leaves that as it is."""
    job, arm = inputs.job, choice.candidate.arm
    assert job.model is not None
    shape = presets.find(job.model)
    words = ["offbench", "run", "--model", job.model, "--world", str(job.world), "--ep", str(job.ep)]
    words += ["--layers", str(job.layers)] if job.layers != shape.layers else []
    words += ["--seq-len", str(job.seq_len)] if job.seq_len != shape.seq_len else []
    words += ["--micro-batch", str(job.micro_batch)] if job.micro_batch != 1 else []
    usual = arms.ARMS[arm.name].defaults
    slots = ["--slots", str(arm.slots)] if arm.slots != usual.get("slots") else []
    for name in dict.fromkeys(("none", arm.name) if slots else ("none", "chunked", arm.name)):
        words += ["--arm", name]
    words += ["--grad-accum", str(job.grad_accum)] if job.grad_accum != 1 else []
    words += slots
    words += ["--state-budget", show_size(arm.resident_bytes)] if arm.resident_bytes else []
    for flag, nbytes in (("--staging", arm.staging_bytes), ("--at-loss", arm.loss_bytes)):
        words += [flag, show_size(nbytes)] if nbytes is not None else []
    words += ["--fsdp-copies", "stock"] if inputs.small.uploads else []
    words += ["--readbacks", "copy"] if inputs.small.readbacks else []
    words += ["--numa"] if (inputs.sockets or 1) > 1 else []
    words += ["--emulate-link", f"{inputs.emulated / GIB:g}GiB/s"] if inputs.emulated else []
    return shlex.join(words)


def what_if_lines(planned: Outcome, others: Sequence[tuple[WhatIf, Outcome]], target: float) -> Iterator[str]:
    """A row for the plan as it is and one for each what-if, then what each assumes."""
    yield "What if"
    yield from table(
        WHAT_IF_COLUMNS,
        [_what_if_row(planned), *(_what_if_row(found, what.exact) for what, found in others)],
        WHAT_IF_SPARE,
    )
    yield from prose(
        "x none of chunked, overlap with 4 slots, and stream with half of the state as its budget; rates in GiB/s"
    )
    yield from prose(
        f"least budget: GiB of state with which stream stays within {target:g} x none, and the GPU's peak with it"
    )
    for what, _ in others:
        yield from prose(f"{what.name}: {what.assumes(planned.inputs)}.")


def _what_if_row(found: Outcome, exact: bool = True) -> list[str]:
    none, links, least = found.none.simulated.step_s, found.inputs.links, found.least
    return [
        found.name if exact else f"{found.name} (inexact)",
        gib(min(links.into, links.out)),
        gib(min(links.both, links.into + links.out)),
        gib(found.inputs.job.layout.nbytes),
        f"{none:.3f}",
        *(f"{row.simulated.step_s / none:.2f}" for row in (found.chunked, found.overlap, found.stream)),
        "none does" if least is None else gib(least.budget),
        "-" if least is None else gib(least.simulated.peak_bytes),
    ]


def reality_lines(compared: Sequence[Compared], skipped: Sequence[str]) -> Iterator[str]:
    """Simulated against actual step times, the reasons of what is far off, and the rows that were left out."""
    rows = [_reality_row(c) for c in compared]
    # The last columns are there if any row has something in them.
    shown = [at for at in range(len(REALITY_COLUMNS)) if at < 5 or any(row[at] not in {"-", "0.000"} for row in rows)]
    head, *lines = ([row[at] for at in shown] for row in (REALITY_COLUMNS, *rows))
    yield from table(head, lines)
    if any(c.traced for c in compared):
        yield from prose(TRACED)
    reasons = [f"{c.name}: {c.reason}" for c in compared if c.reason]
    for line in (*reasons, *skipped):
        yield from prose(line)


def _reality_row(c: Compared) -> list[str]:
    seconds = (c.free_s, c.small_s, *((c.traced.behind_bulk_s, c.traced.launch_s) if c.traced else (None, None)))
    shown = ["-" if value is None else f"{value:z.3f}" for value in seconds]
    return [c.name, f"{c.simulated_s:.3f}", f"{c.actual_s:.3f}", f"{100 * c.error:+z.1f} %", *shown]


def prose(text: str, indent: str = "") -> list[str]:
    """A sentence in lines of readable length."""
    width = min(WIDTH, terminal() or WIDTH)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def labelled(label: str, text: str) -> list[str]:
    """A sentence with its subject in the margin."""
    first, *rest = prose(text, INDENT)
    return [f"  {label}".ljust(len(INDENT)) + first.lstrip(), *rest]


def terminal() -> int | None:
    """Columns of the terminal that is written to; None where it is none, and lines are as long as they need."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def rate(tokens_s: float) -> str:
    """Tokens a second: `58.1k`, or in full below ten thousand."""
    return f"{tokens_s / 1e3:.1f}k" if tokens_s >= 1e4 else f"{tokens_s:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str] = ()) -> Iterator[str]:
    """Columns as wide as they need, the first one to the left, the others to the right. Those of `spare` are
    left out, in turn, where a terminal is too narrow, and named; then the first column is folded."""
    every = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    kept, gone = list(range(len(header))), list[str]()  # by place: two columns may have one name
    while (most := terminal()) and sum(every[i] + 2 for i in kept) - 2 > most and len(gone) < len(spare):
        gone.append(spare[len(gone)])
        kept.remove(header.index(gone[-1]))
    widest, *widths = (every[i] for i in kept)
    if most := terminal():
        widest = min(widest, max(FOLDED, most - sum(widths) - 2 * len(widths)))
    for line in (header, *rows):
        first, *rest = (line[i] for i in kept)
        first, *more = textwrap.wrap(first, widest, subsequent_indent="  ") or [""]
        cells = [first.ljust(widest), *(cell.rjust(width) for cell, width in zip(rest, widths, strict=True))]
        yield "  ".join(cells).rstrip()
        yield from more
    if gone:
        yield from prose(f"in a wider terminal: {', '.join(name for name in header if name in gone)}")
