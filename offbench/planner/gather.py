"""From the command line to what is simulated: every input with the place it comes from. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbench.errors import UsageError
from offbench.planner import sources
from offbench.planner.inputs import Compute, Links, local_numel
from offbench.planner.job import BIG_TOKENS, STATE_BYTES, Job, plan_job
from offbench.planner.options import PlanOptions
from offbench.planner.reality import traced_of
from offbench.planner.tasks import SmallCopies
from offbench.record import RunRecord
from offbench.results_file import read_records
from offbench.topology.imports import load_machine
from offbench.topology.model import Machine
from offbench.units import count, gib, parse_rate
from offbench.workload import presets


@dataclass(frozen=True)
class Inputs:
    """All a plan needs, with a line per input on its origin."""

    job: Job
    compute: Compute
    links: Links
    compute_from: str
    links_from: str
    sockets: int | None
    """Sockets with GPUs, where the machine says."""
    machine: Machine | None
    """Where the rates are those of a described one."""
    small: SmallCopies
    emulated: float | None = None
    """`--emulate-link` of the record that the rates are from, bytes/s both ways."""
    launches: Mapping[str, float] = field(default_factory=dict)
    """By arm, seconds of launches in the record's traced steps beyond those of `none`: not simulated."""
    pcie: int | None = None
    """PCIe generation of the GPU whose launches the rates are from."""


def gather(options: PlanOptions, look: Callable[[], Machine]) -> Inputs:
    """Resolve the options. look: this host's machine, asked for only when neither a file nor rates are given.

    Raises UsageError for options that contradict each other or leave something unknown, RecordError for a bad file.
    """
    if not 1 <= options.target < math.inf:
        raise UsageError(
            f"--target {options.target:g}: a step is planned in steps of none, and cannot be below that; give 1 or "
            "more, as in 1.05"
        )
    if options.tflops is not None and not 0 < options.tflops < math.inf:
        raise UsageError(f"--tflops {options.tflops:g}: give the TFLOP/s that a GPU sustains, as in 400")
    records = readable(options.record, "--record") if options.record is not None else []
    rows = recorded(options.record, records) if options.record is not None else []
    job = plan_job(options, rows[0] if rows else None)
    if options.fsdp_copies not in {"stock", "kernel"}:
        raise UsageError(f"--fsdp-copies {options.fsdp_copies}: stock or kernel")
    if options.readbacks not in {"copy", "kernel"}:
        raise UsageError(f"--readbacks {options.readbacks}: copy or kernel")
    compute, compute_from = plan_compute(options, job, rows)
    links, links_from, machine = plan_links(options, job, rows, look)
    sockets = {gpu.package for gpu in machine.gpus if gpu.package is not None} if machine else set()
    probed = rows[0] if rows and machine is None and options.one_way is None else None
    emulated = probed.spec.mode.emulate_link if probed else None
    small = SmallCopies(options.fsdp_copies == "stock", options.readbacks == "copy")
    traced = launches(records, like=rows[0], small=small) if rows else {}
    return Inputs(
        job,
        compute,
        links,
        compute_from,
        links_from,
        len(sockets) or None,
        machine,
        small,
        emulated,
        traced,
        pcie if probed and isinstance(pcie := probed.env.get("pcie_max_generation"), int) else None,
    )


def launches(records: list[RunRecord], like: RunRecord, small: SmallCopies) -> dict[str, float]:
    """By arm, how much longer than in `none` compute stood idle for launches in traced steps of the same job: the most
    of rows with such small copies."""
    found: dict[str, float] = {}
    for record in records:
        arm, alike = record.spec.arm, (record.job, record.spec.workload) == (like.job, like.spec.workload)
        same = alike and SmallCopies(arm.fsdp_copies == "stock", arm.readbacks == "copy") == small
        if same and arm.name != "none" and (traced := traced_of(record, records)):
            found[arm.name] = max(found.get(arm.name, 0.0), traced.launch_s)
    return found


def readable(path: Path, option: str) -> list[RunRecord]:
    """The records of a results file. Raises UsageError when there are none and says what is wrong with the first line,
    RecordError for a file that cannot be opened."""
    found = read_records([path])
    if found.records:
        return found.records
    why = f": {found.problems[0]}" if found.problems else "; `offbench run` and StepRecorder write them"
    raise UsageError(f"{option} {path}: no records in it{why}")


def recorded(path: Path, records: list[RunRecord]) -> list[RunRecord]:
    """The `none` rows of a results file. Raises UsageError when there are none with phases."""
    rows = sources.baseline(records)
    if not rows:
        raise UsageError(
            f"--record {path}: no measured row of arm none with its phases; add one: offbench run --arm none"
        )
    return rows


def plan_compute(options: PlanOptions, job: Job, rows: list[RunRecord]) -> tuple[Compute, str]:
    """Times of the options, else of the record, else published for that job and machine, else from FLOPs."""
    local = job.layout.nbytes / STATE_BYTES
    if options.tflops is not None and (rows or options.forward is not None):
        raise UsageError(f"--tflops: {'--record' if rows else '--forward'} says how long a step computes; give one")
    if options.forward is not None and options.backward is not None:
        if options.forward == options.backward == 0:
            raise UsageError("--forward 0 --backward 0: a step that computes nothing hides nothing; give its seconds")
        if options.update is not None:
            compute, said = (
                Compute(options.forward, options.backward, options.update),
                "given: --forward, --backward, --update",
            )
        else:
            compute = Compute(options.forward, options.backward, sources.update_s(local))
            said = "given; update assumed: fused AdamW, 28 bytes a parameter at 4.8 TB/s (--update)"
        return compute.with_loss(job.loss_share), said
    if options.forward is not None or options.backward is not None or options.update is not None:
        raise UsageError("--forward and --backward go together, and --update with them: seconds of one step")
    if rows:
        return sources.compute_of_records(rows), f"measured: median of {len(rows)} launches of none, {options.record}"
    seed = (job.model, job.world, job.layers, job.seq_len) == sources.SEED_JOB
    if seed and options.source == sources.SEED_MACHINE and options.tflops is None:
        return sources.SEED_COMPUTE, "published for this job and machine: prime-rl#4427"
    flops = sources.SUSTAINED_FLOPS if options.tflops is None else options.tflops * 1e12
    if options.params is not None:
        return sources.compute_of_params(
            options.params, job.seq_len or BIG_TOKENS, job.world, flops, given=options.seq_len is not None
        )
    if job.model is None or job.seq_len is None:
        raise UsageError("how long does a step compute? give --forward and --backward in seconds, or --record FILE")
    shape = presets.find(job.model)
    exact = sum(local_numel(*tensor, job.world, job.ep) for tensor in shape.layer_tensors()) * job.layers
    exact += sum(local_numel(*tensor, job.world, job.ep) for tensor in shape.other_tensors())
    return sources.compute_of_flops(shape, job.layers, job.seq_len, exact, flops)


def plan_links(
    options: PlanOptions, job: Job, rows: list[RunRecord], look: Callable[[], Machine]
) -> tuple[Links, str, Machine | None]:
    """Rates of the options, else of --from, else of the record's launches, else of this host; and the machine that
    they are read from."""
    if options.one_way is not None:
        if options.source is not None:
            raise UsageError("--one-way and --from both say how fast copies are; give one")
        one = parse_rate("--one-way", options.one_way)
        both = None if options.both_ways is None else parse_rate("--both-ways", options.both_ways)
        if both is not None and both < one:
            raise UsageError(
                f"--both-ways {options.both_ways} is less than --one-way {options.one_way}: it is the sum"
            )
        text = "given: --one-way, " + ("--both-ways" if both else "both ways assumed to be twice that (--both-ways)")
        return Links.of(one, one, both), text, None
    if options.both_ways is not None:
        raise UsageError("--both-ways needs --one-way: a copy alone runs at that rate")
    if options.source is None and rows:
        links = sources.links_of_records(rows)
        if links is not None:
            mode = rows[0].spec.mode
            kind = "" if mode.kind == "real" else f", {count(mode.nproc, 'GPU')} copying"
            kind += "" if mode.emulate_link is None else f", emulated {gib(mode.emulate_link)} GiB/s both ways"
            return links, f"measured: median of {len(rows)} launches of none{kind}, {options.record}", None
    machine = load_machine(options.source) if options.source is not None else look()
    if not machine.gpus:
        raise UsageError("no GPU here: describe a machine with --from, as in --from seed-8xh200, or give --one-way")
    ranks = min(job.world, len(machine.gpus))
    links, text = sources.links_of_machine(machine, ranks)
    if ranks < job.world:
        text += f"; {ranks} of {job.world} ranks are on one machine, the others taken to be on equal ones"
    return links, f"{options.source or 'this host'}: {text}", machine
