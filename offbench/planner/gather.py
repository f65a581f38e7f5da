"""From the command line to what is simulated: every input with the place it comes from. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbench.config import Workload
from offbench.errors import UsageError
from offbench.planner import sources
from offbench.planner.footprint import footprint
from offbench.planner.inputs import FP32, Compute, Footprint, Layout, Links, local_numel, of_model, uniform
from offbench.planner.reality import traced_of
from offbench.planner.tasks import SmallCopies
from offbench.record import RunRecord
from offbench.results_file import read_records
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
    budgets: tuple[str, ...] = ()
    fsdp_copies: str = "kernel"
    readbacks: str = "kernel"
    what_if: tuple[str, ...] = ()
    plot: Path | None = None
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
    """Cap of a chunk before it is cut into pieces, as an ArmSpec has it."""
    said: str
    grad_accum: int = 1
    state: int | None = None
    """Without a preset: bytes of state of a rank."""
    moment: int = FP32
    """Bytes of one moment of a parameter."""

    def cut(self, cap: int) -> Layout:
        """The state in copies of at most `cap` bytes, larger parameters alone: `Schedule.chunk_bytes`."""
        if self.state is not None:
            return uniform(self.state, self.layers, cap, self.moment)
        assert self.model is not None
        return of_model(presets.find(self.model), self.world, self.ep, self.layers, cap, self.moment)

    @property
    def layout(self) -> Layout:
        """The state in whole chunks."""
        return self.cut(self.chunk_bytes)

    @property
    def tokens_per_step(self) -> int | None:
        """Of all ranks; None where the tokens per sample are not known."""
        return None if self.seq_len is None else self.seq_len * self.micro_batch * self.grad_accum * self.world

    @property
    def footprint(self) -> Footprint:
        """GPU memory beside state; of a job without a preset parameters and gradients only."""
        if self.model is None or self.seq_len is None:
            return Footprint(self.layout.nbytes / 2, self.layout.nbytes / 2)
        workload = Workload(
            model=self.model,
            layers=self.layers,
            ep=self.ep,
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            grad_accum=self.grad_accum,
        )
        return footprint(workload, self.world)


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


def gather(options: PlanOptions, look: Callable[[], Machine]) -> Inputs:
    """Resolve the options. look: this host's machine, asked for only when neither a file nor rates are given.

    Raises UsageError for options that contradict each other or leave something unknown, RecordError for a bad file.
    """
    if not options.target >= 1:
        raise UsageError(f"--target {options.target:g}: a step cannot be planned below that of none; give 1 or more")
    records = read_records([options.record]).records if options.record else []
    rows = recorded(options.record, records) if options.record else []
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
        job, compute, links, compute_from, links_from, len(sockets) or None, machine, small, emulated, traced
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


def recorded(path: Path, records: list[RunRecord]) -> list[RunRecord]:
    """The `none` rows of a results file. Raises UsageError when there are none with phases."""
    rows = sources.baseline(records)
    if not rows:
        raise UsageError(
            f"--record {path}: no measured row of arm none with its phases; add one: offbench run --arm none"
        )
    return rows


def plan_job(options: PlanOptions, row: RunRecord | None) -> Job:
    """The job's layout: from a record, the preset, --params or --bytes.

    Raises UsageError when more than one of them is given, or a record does not say how much state a rank has.
    """
    workload = row.spec.workload if row else None
    ways = [name for name, value in (("--model", options.model), ("--params", options.params)) if value is not None]
    ways += ["--bytes"] if options.size else []
    ways += ["--record"] if workload else []
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)} each say what the model is; give one")
    changed = {"--layers": options.layers, "--world": options.world, "--ep": options.ep, "--seq-len": options.seq_len}
    if workload and (given := [name for name, value in changed.items() if value is not None]):
        raise UsageError(f"{given[0]}: the times of --record are of its own job; leave it out, or give times yourself")
    if row is not None and row.job is not None:
        return _own_job(row)
    world = options.world or (row.spec.mode.world if row else BIG_WORLD)
    if options.params is not None or options.size is not None:
        return _uniform_job(options, world)
    shape = presets.find(options.model or (workload.model if workload else BIG_MODEL))
    layers = options.layers or (workload.layers if workload else shape.layers)
    ep = options.ep or (workload.ep if workload else math.gcd(world, shape.experts, BIG_WORLD))
    if world % ep or shape.experts % ep:
        raise UsageError(f"--ep {ep}: must divide the world ({world}) and the experts ({shape.experts})")
    seq_len = options.seq_len or (workload.seq_len if workload else shape.seq_len)
    batch = workload.micro_batch if workload else 1
    size = f"{shape.name}, {count(layers, 'layer')}, {count(world, 'rank')}, EP {ep}"
    accum = workload.grad_accum if workload else 1
    said = f"{size}, {seq_len * batch * accum:,} tokens a rank and step"
    return Job(shape.name, layers, world, ep, seq_len, batch, shape.chunk_bytes, said, accum)


def _uniform_job(options: PlanOptions, world: int) -> Job:
    if options.ep is not None:
        raise UsageError("--ep needs a --model: with --bytes or --params every rank holds an equal share")
    layers = options.layers or UNIFORM_LAYERS
    if options.size is not None:
        nbytes, said = parse_size("--bytes", options.size), f"{options.size} of state a rank (--bytes)"
    else:
        nbytes = -(-STATE_BYTES * (options.params or 0) // world)
        said = f"{options.params:,} parameters x {STATE_BYTES} bytes of state / {count(world, 'rank')} (--params)"
    said += f", assumed in {layers} equal layers"
    return Job(None, layers, world, 1, options.seq_len, 1, GIB, said, state=nbytes)


def _own_job(row: RunRecord) -> Job:
    """What a trainer that offbench did not launch has said of itself (`offbench.measure`)."""
    if not row.local_params:
        raise UsageError("--record: no parameters are known of that job; give StepRecorder the optimizer")
    world, layers = row.spec.mode.world, sources.told(row, "layers", UNIFORM_LAYERS)
    accum = sources.told(row, "grad_accum", 1)
    tokens = None if row.tokens_per_step is None else row.tokens_per_step // (world * accum)
    said = f"{row.local_params:,} parameters a rank x {STATE_BYTES} bytes of state, {count(world, 'rank')}"
    said += f", assumed in {layers} equal layers"
    nbytes = STATE_BYTES * row.local_params
    return Job(None, layers, world, 1, tokens, 1, GIB, said, accum, state=nbytes)


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
