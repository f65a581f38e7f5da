"""From the command line to what is simulated: every input with the place it comes from. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offbench.config import Workload
from offbench.errors import UsageError
from offbench.planner import sources
from offbench.planner.inputs import FP32, Compute, Layout, Links, local_numel, of_model, uniform
from offbench.record import RunRecord, read_records
from offbench.topology.imports import load_machine
from offbench.topology.model import Machine
from offbench.units import GIB, count, gib, parse_rate, parse_size
from offbench.workload import presets

BIG_MODEL, BIG_WORLD, UNIFORM_LAYERS = "qwen3-30b-a3b", 8, 48
"""What a plan is for when nothing says."""
STATE_BYTES = 2 * FP32
"""AdamW's two fp32 moments: bytes a parameter, each way."""


@dataclass(frozen=True)
class PlanOptions:
    """The command line of `offbench plan`; None where an option was not given."""

    model: str | None = None
    layers: int | None = None
    world: int | None = None
    ep: int | None = None
    seq_len: int | None = None
    source: str | None = None
    record: Path | None = None
    forward: float | None = None
    backward: float | None = None
    update: float | None = None
    size: str | None = None
    params: int | None = None
    one_way: str | None = None
    both_ways: str | None = None
    tflops: float | None = None
    target: float = 1.05
    against: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Job:
    """The training job: a preset, or so many bytes of state in equal layers."""

    model: str | None
    layers: int
    world: int
    ep: int
    seq_len: int | None
    micro_batch: int
    chunk_bytes: int
    layout: Layout
    said: str

    @property
    def tokens_per_step(self) -> int | None:
        """Of all ranks; None where the tokens per sample are not known."""
        return None if self.seq_len is None else self.seq_len * self.micro_batch * self.world


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


def gather(options: PlanOptions, look: Callable[[], Machine]) -> Inputs:
    """Resolve the options. look: this host's machine, asked for only when neither a file nor rates are given.

    Raises UsageError for options that contradict each other or leave something unknown.
    """
    if not options.target >= 1:
        raise UsageError(f"--target {options.target:g}: a step cannot be planned below that of none; give 1 or more")
    rows = recorded(options.record) if options.record else []
    job = plan_job(options, rows[0].spec.workload if rows else None, rows[0].spec.mode.world if rows else None)
    compute, compute_from = plan_compute(options, job, rows)
    links, links_from, sockets = plan_links(options, job, rows, look)
    return Inputs(job, compute, links, compute_from, links_from, sockets)


def recorded(path: Path) -> list[RunRecord]:
    """The `none` rows of a results file. Raises UsageError when there are none with phases, or RecordError."""
    rows = sources.baseline(read_records([path]).records)
    if not rows:
        raise UsageError(
            f"--record {path}: no measured row of arm none with its phases; add one: offbench run --arm none"
        )
    if rows[0].spec.workload.grad_accum > 1:
        raise UsageError(f"--record {path}: its steps accumulate gradients; give --forward, --backward and --update")
    return rows


def plan_job(options: PlanOptions, workload: Workload | None, recorded_world: int | None) -> Job:
    """The job's layout: from a record, the preset, --params or --bytes.

    Raises UsageError when more than one of them is given.
    """
    ways = [name for name, value in (("--model", options.model), ("--params", options.params)) if value is not None]
    ways += ["--bytes"] if options.size else []
    ways += ["--record"] if workload else []
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)} each say what the model is; give one")
    changed = {"--layers": options.layers, "--world": options.world, "--ep": options.ep, "--seq-len": options.seq_len}
    if workload and (given := [name for name, value in changed.items() if value is not None]):
        raise UsageError(f"{given[0]}: the times of --record are of its own job; leave it out, or give times yourself")
    world = options.world or recorded_world or BIG_WORLD
    if options.params is not None or options.size is not None:
        return _uniform_job(options, world)
    shape = presets.find(options.model or (workload.model if workload else BIG_MODEL))
    layers = options.layers or (workload.layers if workload else shape.layers)
    ep = options.ep or (workload.ep if workload else math.gcd(world, shape.experts, BIG_WORLD))
    if world % ep or shape.experts % ep:
        raise UsageError(f"--ep {ep}: must divide the world ({world}) and the experts ({shape.experts})")
    seq_len = options.seq_len or (workload.seq_len if workload else shape.seq_len)
    batch = workload.micro_batch if workload else 1
    layout = of_model(shape, world, ep, layers, shape.chunk_bytes)
    size = f"{shape.name}, {count(layers, 'layer')}, {count(world, 'rank')}, EP {ep}"
    said = f"{size}, {seq_len * batch:,} tokens a rank and step"
    return Job(shape.name, layers, world, ep, seq_len, batch, shape.chunk_bytes, layout, said)


def _uniform_job(options: PlanOptions, world: int) -> Job:
    if options.ep is not None:
        raise UsageError("--ep needs a --model: with --bytes or --params every rank holds an equal share")
    layers = options.layers or UNIFORM_LAYERS
    if options.size is not None:
        nbytes, said = parse_size("--bytes", options.size), f"{options.size} of state a rank (--bytes)"
    else:
        nbytes = -(-STATE_BYTES * (options.params or 0) // world)
        said = f"{options.params:,} parameters x {STATE_BYTES} bytes of state / {count(world, 'rank')} (--params)"
    layout = uniform(nbytes, layers, GIB)
    said += f", assumed in {layers} equal layers"
    return Job(None, layers, world, 1, options.seq_len, 1, GIB, layout, said)


def plan_compute(options: PlanOptions, job: Job, rows: list[RunRecord]) -> tuple[Compute, str]:
    """Times of the options, else of the record, else published for that job and machine, else from FLOPs."""
    local = job.layout.nbytes / STATE_BYTES
    if options.forward is not None and options.backward is not None:
        if options.update is not None:
            return Compute(options.forward, options.backward, options.update), "given: --forward, --backward, --update"
        assumed = "update assumed: fused AdamW, 28 bytes a parameter at 4.8 TB/s (--update)"
        return Compute(options.forward, options.backward, sources.update_s(local)), f"given; {assumed}"
    if options.forward is not None or options.backward is not None or options.update is not None:
        raise UsageError("--forward and --backward go together, and --update with them: seconds of one step")
    if rows:
        return sources.compute_of_records(rows), f"measured: median of {len(rows)} launches of none, {options.record}"
    seed = (job.model, job.world, job.layers, job.seq_len) == sources.SEED_JOB
    if seed and options.source == sources.SEED_MACHINE and options.tflops is None:
        return sources.SEED_COMPUTE, "published for this job and machine: prime-rl#4427"
    if job.model is None or job.seq_len is None:
        raise UsageError("how long does a step compute? give --forward and --backward in seconds, or --record FILE")
    shape = presets.find(job.model)
    flops = sources.SUSTAINED_FLOPS if options.tflops is None else options.tflops * 1e12
    exact = sum(local_numel(*tensor, job.world, job.ep) for tensor in shape.layer_tensors()) * job.layers
    exact += sum(local_numel(*tensor, job.world, job.ep) for tensor in shape.other_tensors())
    return sources.compute_of_flops(shape, job.layers, job.seq_len, exact, flops)


def plan_links(
    options: PlanOptions, job: Job, rows: list[RunRecord], look: Callable[[], Machine]
) -> tuple[Links, str, int | None]:
    """Rates of the options, else of --from, else of the record's launches, else of this host; and its sockets."""
    if options.one_way is not None:
        if options.source:
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
    machine = load_machine(options.source) if options.source else look()
    if not machine.gpus:
        raise UsageError("no GPU here: describe a machine with --from, as in --from seed-8xh200, or give --one-way")
    ranks = min(job.world, len(machine.gpus))
    links, text = sources.links_of_machine(machine, ranks)
    if ranks < job.world:
        text += f"; {ranks} of {job.world} ranks are on one machine, the others taken to be on equal ones"
    packages = {gpu.package for gpu in machine.gpus if gpu.package is not None}
    return links, f"{options.source or 'this host'}: {text}", len(packages) or None
