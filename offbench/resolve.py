"""Command-line options to complete RunSpecs: every default is decided here, and said where a newcomer would wonder.

Pure: the hardware is passed in. Nothing starts before `resolve` has accepted everything. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from offbench import arms, estimate
from offbench.auto_budget import LEAST_WARMUP
from offbench.config import Mode, RunSpec, Window, Workload
from offbench.errors import UsageError
from offbench.hardware import Hardware
from offbench.options import Options, build, one_of
from offbench.resolve_arms import arms_of
from offbench.units import count, gib, parse_rate, show_size
from offbench.workload import presets
from offbench.workload.presets import ModelShape
from offbench.workload.rules import check

BIG_WORLD = 8
"""Ranks of the job that the large preset is measured as."""


@dataclass(frozen=True)
class Resolved:
    """The specs in the order asked for (a spec twice is an A/A run), and what was decided for the user."""

    specs: list[RunSpec]
    notes: list[str]


def resolve(options: Options, hardware: Hardware) -> Resolved:
    """Complete specs for the options on that hardware.

    Raises UsageError for anything that cannot be run as asked.
    """
    notes: list[str] = []
    device = _device(options, hardware)
    shape = presets.find(options.model or ("qwen3-30b-a3b" if device == "cuda" else "tiny"))
    mode = _mode(options, hardware, device, shape)
    workload = _workload(options, device, shape, mode)
    specs = [
        RunSpec(
            workload=workload.model_copy(update={"activation_offload": offload}),
            arm=arm,
            window=_window(options),
            mode=mode,
        )
        for arm, offload in arms_of(options, shape, device)
    ]
    for spec in specs:
        check(spec, shape)
        _check_memory_limit(spec, hardware)
        _check_in_place(spec)
        _check_auto(spec)
    notes += _about_mode(options, hardware, mode, shape)
    if options.layers is None and device == "cuda":
        specs, fitted = _fit(specs, hardware, shape)
        notes += fitted
    return Resolved(specs, notes)


def _device(options: Options, hardware: Hardware) -> Literal["cuda", "cpu"]:
    one_of("--device", options.device, ("auto", "cuda", "cpu"))
    if options.device == "cuda" and not hardware.gpus:
        raise UsageError(f"--device cuda: no GPU to use ({hardware.no_gpu_why}); use --device cpu")
    return "cuda" if hardware.gpus and options.device != "cpu" else "cpu"


def _mode(options: Options, hardware: Hardware, device: Literal["cuda", "cpu"], shape: ModelShape) -> Mode:
    """World, processes and real or rehearsed, from whichever of them were given."""
    one_of("--mode", options.mode, ("auto", "real", "rehearsal"))
    places = len(hardware.gpus) if device == "cuda" else 2
    for flag, value in (("--world", options.world), ("--nproc", options.nproc)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: at least 1")
    world = options.world or _default_world(options, device, shape, places)
    whole = options.mode == "real" or (device == "cpu" and options.mode == "auto")
    nproc = options.nproc or (world if whole else _divisor(world, places))
    kind = options.mode if options.mode != "auto" else ("real" if nproc == world else "rehearsal")
    if kind == "real" and nproc != world:
        raise UsageError(
            f"--mode real: a world of {world} needs --nproc {world}, not {nproc}; or use --mode rehearsal"
        )
    if device == "cuda" and nproc > places:
        less = "--mode rehearsal" if kind == "real" and options.nproc is None else f"--nproc {_divisor(world, places)}"
        raise UsageError(f"{count(nproc, 'process')} on {count(places, 'GPU')}: each needs its own; use {less}")
    if nproc > world or world % nproc:
        raise UsageError(f"--nproc {nproc} does not divide a world of {world}; use --nproc {_divisor(world, nproc)}")
    link = None if options.emulate_link is None else parse_rate("--emulate-link", options.emulate_link)
    if link is not None and device == "cpu":
        raise UsageError("--emulate-link: there is no link to a GPU on --device cpu; leave it out")
    return build(Mode, kind=kind, device=device, world=world, nproc=nproc, emulate_link=link)


def _default_world(options: Options, device: str, shape: ModelShape, places: int) -> int:
    big = shape.name != "tiny"
    if options.mode == "rehearsal" or (big and device == "cuda"):
        return BIG_WORLD
    return options.nproc or places


def _divisor(world: int, at_most: int) -> int:
    """The largest divisor of world that is not above `at_most`."""
    return max(d for d in range(1, max(1, min(world, at_most)) + 1) if world % d == 0)


def _workload(options: Options, device: str, shape: ModelShape, mode: Mode) -> Workload:
    one_of("--ac", options.ac or "full", ("full", "none"))
    one_of("--adamw", options.adamw or "fused", ("fused", "foreach"))
    ep = options.ep
    if ep is None:
        ep = 1 if shape.name == "tiny" else math.gcd(mode.world, shape.experts, BIG_WORLD)
    if ep < 1 or mode.world % ep or shape.experts % ep:
        raise UsageError(
            f"--ep {ep}: must divide the world ({mode.world}) and the experts ({shape.experts}); "
            f"use --ep {math.gcd(mode.world, shape.experts)}"
        )
    workload = build(
        Workload,
        model=shape.name,
        layers=shape.layers if options.layers is None else options.layers,
        seq_len=shape.seq_len if options.seq_len is None else options.seq_len,
        micro_batch=options.micro_batch,
        grad_accum=options.grad_accum,
        ep=ep,
        ac=options.ac,
        compile=options.compile if options.compile is not None else device == "cuda",
        routing="natural" if options.balanced_routing is False else "balanced",
        count_readback=options.count_readback,
        adamw=options.adamw,
        lr=options.lr,
        seed=options.seed,
        broadcast_every=options.broadcast_every,
    )
    if options.max_norm is not None:
        workload = workload.model_copy(update={"max_norm": options.max_norm or None})
    return workload


def _check_memory_limit(spec: RunSpec, hardware: Hardware) -> None:
    """A limit must be one."""
    limit = spec.arm.memory_limit
    if limit is None:
        return
    if spec.mode.device == "cpu":
        raise UsageError("--memory-limit: there is no GPU memory to limit on --device cpu; leave it out")
    if hardware.gpu_bytes is not None and limit > hardware.gpu_bytes:
        raise UsageError(f"--memory-limit {show_size(limit)}: the GPU has {gib(hardware.gpu_bytes)} GiB; use less")


def _window(options: Options) -> Window:
    """By default a little longer where broadcasts need it: whole periods in the warm-up and in the window."""
    every, default = options.broadcast_every or 1, Window()

    def periods(given: int | None, steps: int) -> int:
        return -(-steps // every) * every if given is None else given

    return build(Window, warmup=periods(options.warmup, default.warmup), steps=periods(options.steps, default.steps))


def _check_in_place(spec: RunSpec) -> None:
    """Updates in host memory on a GPU: what their kernel cannot be asked for."""
    schedule = arms.ARMS[spec.arm.name].schedule(spec.arm)
    if schedule.update != "host_memory" or spec.mode.device != "cuda":
        return
    if spec.mode.emulate_link is not None:
        raise UsageError(
            f"--emulate-link: arm {spec.arm.name} makes no copies whose bytes could be repeated; leave one of them out"
        )
    if spec.workload.adamw != "fused":
        raise UsageError(f"--adamw {spec.workload.adamw}: arm {spec.arm.name} computes the bits of fused; use that")


def _check_auto(spec: RunSpec) -> None:
    """--state-budget auto on a GPU measures in the warm-up."""
    w = spec.window.warmup
    if spec.arm.state_budget == "auto" and spec.mode.device == "cuda" and w < LEAST_WARMUP:
        raise UsageError(f"--warmup {w}: --state-budget auto needs {LEAST_WARMUP}, to measure and to settle in")


def _about_mode(options: Options, hardware: Hardware, mode: Mode, shape: ModelShape) -> list[str]:
    """Say aloud what a newcomer did not choose."""
    notes = []
    if mode.device == "cpu" and options.device == "auto":
        notes.append(
            f"no GPU ({hardware.no_gpu_why}): model {shape.name} on the CPU, gloo; "
            "these rows show that the arms work, not what they cost on a GPU"
        )
    if mode.kind == "rehearsal" and options.mode == "auto":
        places = count(mode.nproc, "GPU" if mode.device == "cuda" else "process")
        ranks = "rank 0" if mode.nproc == 1 else f"ranks 0 to {mode.nproc - 1}"
        notes.append(
            f"{places} for a job of {mode.world} ranks: a rehearsal of {ranks} with true shard sizes; collectives are "
            "stood in for and tok/s is modelled"
        )
    return notes


def _fit(specs: list[RunSpec], hardware: Hardware, shape: ModelShape) -> tuple[list[RunSpec], list[str]]:
    """Shrink the default depth until every arm fits the card and the host."""
    layers = estimate.fit_layers(specs, hardware)
    card = f"{hardware.gpus[0].name} with {gib(hardware.gpu_bytes or 0)} GiB"
    if layers == shape.layers:
        return specs, [f"all {layers} layers of {shape.name} fit by estimate ({card})"]
    if layers == 0:
        return specs, []  # the check before the launch refuses it with the numbers
    note = (
        f"{layers} of {shape.layers} layers of {shape.name}: the most that fits every arm by estimate ({card}, "
        f"{gib(hardware.host_bytes)} GiB of host memory)"
    )
    return [estimate.with_layers(spec, layers) for spec in specs], [note]
