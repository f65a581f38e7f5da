"""The job that is planned: a preset, or so much state in equal layers, and where that is read from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbench.config import Workload
from offbench.errors import UsageError
from offbench.planner import sources
from offbench.planner.footprint import footprint
from offbench.planner.ideal import UNIFORM_LAYERS
from offbench.planner.inputs import FP32, Footprint, Layout, of_model, uniform
from offbench.planner.options import PlanOptions
from offbench.record import RunRecord
from offbench.units import GIB, count, gib, parse_size
from offbench.workload import presets

BIG_MODEL, BIG_WORLD, BIG_TOKENS = "qwen3-30b-a3b", 8, 16384
"""What a plan is for when nothing says."""
STATE_BYTES = 2 * FP32
"""AdamW's two fp32 moments: bytes a parameter, each way."""
MOST_STATE = 1 << 40
"""Bytes of state of a rank that are still simulated: no host has as much for each of its GPUs."""


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
        """The state in copies of at most `cap` bytes, `Schedule.chunk_bytes`. A larger parameter is a copy alone, or
        is cut where it exceeds a whole chunk."""
        if self.state is not None:
            return uniform(self.state, self.layers, cap, self.moment)
        assert self.model is not None
        shape = presets.find(self.model)
        return of_model(shape, self.world, self.ep, self.layers, cap, self.moment, cut_above=self.chunk_bytes)

    @property
    def layout(self) -> Layout:
        """The state in whole chunks."""
        return self.cut(self.chunk_bytes)

    @property
    def loss_share(self) -> float:
        """Part of the forward that head and loss take; 0 without a preset."""
        if self.model is None or self.seq_len is None:
            return 0.0
        return presets.find(self.model).loss_share(self.seq_len, self.layers)

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


def plan_job(options: PlanOptions, row: RunRecord | None) -> Job:
    """The job's layout: from a record, the preset, --params or --bytes.

    Raises UsageError when more than one of them is given, or a record does not say how much state a rank has.
    """
    workload = row.spec.workload if row else None
    ways = [name for name, value in (("--model", options.model), ("--params", options.params)) if value is not None]
    ways += ["--bytes"] if options.size is not None else []
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
    shape = presets.find(options.model if options.model is not None else workload.model if workload else BIG_MODEL)
    layers = options.layers or (workload.layers if workload else shape.layers)
    ep = options.ep or (workload.ep if workload else math.gcd(world, shape.experts, BIG_WORLD))
    if world % ep or shape.experts % ep:
        raise UsageError(f"--ep {ep}: must divide the world ({world}) and the experts ({shape.experts})")
    seq_len = options.seq_len or (workload.seq_len if workload else shape.seq_len)
    batch = workload.micro_batch if workload else 1
    _check_size(STATE_BYTES * shape.local_params(world, ep, layers), "--layers", str(layers))
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
    _check_size(nbytes, *(("--params", str(options.params)) if options.size is None else ("--bytes", options.size)))
    said += f", assumed in {layers} equal layers"
    seq_len = options.seq_len
    if options.params is not None and options.forward is None:  # its FLOPs need tokens
        seq_len = seq_len or BIG_TOKENS
    return Job(None, layers, world, 1, seq_len, 1, GIB, said, state=nbytes)


def _check_size(nbytes: int, option: str, value: str) -> None:
    if nbytes > MOST_STATE:
        many = f"{gib(nbytes)} GiB of state for a rank, more than the {gib(MOST_STATE)} that are planned at most"
        raise UsageError(f"{option} {value}: {many}; give less, or more ranks (--world)")


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
