"""What `offbench topo` does once the command line is parsed. No torch, no CUDA context in this process."""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from rich.console import Console

from offbench import hardware
from offbench.errors import UsageError
from offbench.floor import Floor
from offbench.ladder.findings import explain, layout, learn, visible
from offbench.ladder.plan import Crew, Outcome, Rung, climb, estimate_s, plan
from offbench.machine_floor import CHUNK_BYTES, dram_floor, floor_json, floors
from offbench.progress import Display, choose_display, show_seconds
from offbench.progress import Progress as Mark
from offbench.topo import cache as topo_cache
from offbench.topo.draw import draw
from offbench.topo.text import disagreement, each_way_bytes, floor_lines, measurement_lines, note_lines
from offbench.topology.detect import detect
from offbench.topology.imports import load_machine
from offbench.topology.links import Rate
from offbench.topology.model import Machine, Note
from offbench.topology.schema import anonymous, to_json
from offbench.units import GIB, parse_rate, parse_size
from offbench.workload.presets import find

EQUAL_BYTES = 8 * GIB
"""Each way and GPU in the equal-bytes rung when neither --bytes nor --model says."""
STATE_BYTES = 8
"""AdamW's two fp32 moments: bytes a parameter, each way."""


@dataclass(frozen=True)
class TopoOptions:
    """The command line of `offbench topo`."""

    source: str | None = None
    size: str | None = None
    model: str | None = None
    world: int | None = None
    remote: int | None = None
    measure: bool = False
    json: bool = False
    save: Path | None = None
    dram: str | None = None
    """Rate of one NUMA node's memory where CPUs run the optimizer step."""


class Measure(Protocol):
    """Climbs the ladder on this host."""

    def __call__(self, machine: Machine, rungs: Sequence[Rung], on_rung: Callable[[int, Rung], None]) -> list[Outcome]:
        """Outcomes in the rungs' order."""


def topo_command(
    options: TopoOptions,
    measure: Measure | None = None,
    look: Callable[[], Machine] = detect,
    out: Console | None = None,
) -> int:
    """Detect or load, measure if asked, compute, show; returns the exit code.

    Raises UsageError for input that cannot be used; a host that lacks something is shown as it is.
    """
    console = out or Console(highlight=False)
    size, note = step_bytes(options)
    check(options)
    machine = load_machine(options.source) if options.source is not None else topo_cache.recall(look())
    if options.measure:
        machine = measured(machine, size or EQUAL_BYTES, measure or on_this_host, quiet=options.json)
    found, why_not = compute(machine, options, size)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [floor_json(floor) for floor in found]
    if options.save:
        save(options.save, to_json(anonymous(machine), now, rows))
    if options.json:
        print(to_json(machine, now, rows), end="")
        return 0
    show(console, machine, found, [line for line in (note, why_not) if line])
    if options.save:
        _say(console, f"saved without UUIDs: {options.save}; read it back with --from")
    return 0


def check(options: TopoOptions) -> None:
    """Raise UsageError for options that contradict each other."""
    if options.measure and options.source is not None:
        raise UsageError("--measure copies on this machine; leave out --from, or --measure")
    if options.size is not None or options.model is not None:
        return
    given = {"--remote changes": options.remote, "--dram adds": options.dram, "--world changes": options.world}
    idle = [name for name, value in given.items() if value is not None]
    if idle:
        raise UsageError(f"{idle[0]} a floor: say for how many bytes with --bytes or --model")


def step_bytes(options: TopoOptions) -> tuple[int | None, str | None]:
    """Bytes each way per rank and step, and how they follow from the model; None when no floor was asked for."""
    if options.size is not None and options.model is not None:
        raise UsageError("--bytes and --model both say how much moves; give one")
    if options.size is not None:
        return parse_size("--bytes", options.size), None
    if options.model is None:
        return None, None
    world = options.world or 8
    params = find(options.model).local_params(world)
    text = f"{options.model} over {world} ranks: {params:,} parameters a rank x {STATE_BYTES} bytes of AdamW state"
    return params * STATE_BYTES, text


def compute(machine: Machine, options: TopoOptions, size: int | None) -> tuple[list[Floor], str | None]:
    """The floors asked for, and a line when there are none or they are of a part of the job."""
    if size is None:
        return [], None
    if not machine.gpus:
        return [], "no floor: no GPU here; describe a machine with --from, as in --from seed-8xh200"
    if any(gpu.mig_parent for gpu in machine.gpus):
        return [], "no floor: MIG instances share their GPU's link with others; use whole GPUs"
    # A job started here gets the GPUs that CUDA shows it; those stand first.
    here = len(visible(machine))
    world = options.world or (8 if options.model else here)
    ranks = min(world, here)
    chunk = find(options.model).chunk_bytes if options.model else CHUNK_BYTES
    found = floors(machine, size, size, ranks, options.remote, chunk)
    if options.dram is not None:
        rate = Rate("both", parse_rate("--dram", options.dram), "assumed", "--dram")
        found.append(dram_floor(machine, size, size, size / STATE_BYTES, rate, ranks))
    if world > ranks:
        absent = f"{world - ranks} of {world} ranks are not on this machine; what they share with others is not in"
        return found, f"{absent} this floor; for all of them on one machine: --from MACHINE"
    return found, None


def measured(machine: Machine, each_way: int, measure: Measure, quiet: bool) -> Machine:
    """Climb the ladder with a progress display, learn from it, keep it for later.

    Raises UsageError without a GPU to measure.
    """
    if not machine.gpus:
        why = next((note.text for note in machine.noted("degraded") if note.code == "no-gpu"), "no GPU found")
        raise UsageError(f"--measure needs a GPU: {why}; floors without one: --from seed-8xh200 --bytes 28.4GiB")
    display = Quiet() if quiet else choose_display()
    rungs = plan(layout(machine), each_way)
    display.say(f"{len(rungs)} measurements, about {show_seconds(estimate_s(rungs))}; the GPUs should be idle")
    display.start("starting one process per GPU", len(rungs))
    began = datetime.now(UTC).timestamp()

    def on_rung(number: int, rung: Rung) -> None:
        display.update(Mark("measure", number + 1, len(rungs), None, datetime.now(UTC).timestamp()))

    try:
        found = learn(machine, measure(machine, rungs, on_rung))
    finally:
        took = datetime.now(UTC).timestamp() - began
        display.finish(f"the ladder took {show_seconds(took)}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        topo_cache.keep(found, now)
    except OSError as error:
        lost = f"the measurement could not be kept for later runs: {error}"
        return replace(found, notes=(*found.notes, Note("warning", "no-cache", lost, "use --save FILE")))
    return found


def on_this_host(machine: Machine, rungs: Sequence[Rung], on_rung: Callable[[int, Rung], None]) -> list[Outcome]:
    """Real copies: one bound process per GPU."""
    from offbench.ladder.crew import PIECE_BYTES, ProcessCrew, region_bytes, task_of

    machine = replace(machine, gpus=visible(machine))
    remote = any(rung.buffers == "remote" for rung in rungs)
    _, available = hardware.host_memory(Path("/"))
    nodes = layout(machine).nodes
    region = region_bytes(available, len(machine.gpus), remote, nodes=len(nodes))
    task = task_of(machine, "cuda", region, PIECE_BYTES, remote, nodes)
    with (
        tempfile.TemporaryDirectory(prefix="offbench-topo-") as folder,
        ProcessCrew(machine, Path(folder), task) as crew,
    ):
        for warning in crew.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return run_ladder(rungs, crew, on_rung)


def run_ladder(rungs: Sequence[Rung], crew: Crew, on_rung: Callable[[int, Rung], None]) -> list[Outcome]:
    """All rungs, in order."""
    return list(climb(rungs, crew, on_rung))


def show(console: Console, machine: Machine, found: Sequence[Floor], remarks: Sequence[str]) -> None:
    """Everything, for a person."""
    draw(machine, console)
    if len(machine.gpus) > 1:
        _say(console, explain(machine))
    blocks: list[list[str]] = [list(measurement_lines(machine)), list(disagreements(machine))]
    blocks += [[*(floor_lines(machine, found) if found else ()), *remarks], list(note_lines(machine.notes))]
    for block in filter(None, blocks):
        console.print()
        for line in block:
            _say(console, line)


def disagreements(machine: Machine) -> list[str]:
    """Where the workload's own time and the formula differ."""
    lines = []
    for row in machine.measurements:
        if row.rung == "equal":
            size = each_way_bytes(row)
            lines.append(disagreement(row, floors(machine, size, size)[0]))
    return [line for line in lines if line]


def save(path: Path, text: str) -> None:
    """Write a snapshot. Raises UsageError when the path cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--save {path}: cannot be written: {error.strerror}; choose another file") from None


def _say(console: Console, line: str) -> None:
    """The line, wrapped below its own start; words that look like markup stay as they are."""
    indent = " " * (len(line) - len(line.lstrip(" -><*")) or 2)
    for part in textwrap.wrap(
        line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ):
        console.print(part, markup=False, highlight=False, soft_wrap=True)


class Quiet(Display):
    """For `--json`: progress goes nowhere, so that the output stays one object."""

    def start(self, title: str, steps: int) -> None:
        """Nothing."""

    def update(self, progress: Mark) -> None:
        """Nothing."""

    def finish(self, line: str) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""
