"""Command-line options to complete RunSpecs: every default is decided here, and said where a newcomer would wonder.

Pure: the hardware is passed in. Nothing starts before `resolve` has accepted everything. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from offbench import arms, estimate, seed
from offbench.config import ArmSpec, Frozen, Mode, RunSpec, Window, Workload
from offbench.errors import UsageError
from offbench.hardware import Hardware
from offbench.units import count, gib, parse_rate, parse_size
from offbench.workload import presets
from offbench.workload.presets import ModelShape
from offbench.workload.rules import check

F = TypeVar("F", bound=Frozen)
BIG_WORLD = 8
"""Ranks of the job that the large preset is measured as."""


@dataclass(frozen=True)
class Options:
    """`offbench run`'s options as given; None: not given."""

    arm: tuple[str, ...] = ()
    table: str | None = None
    numa: bool = False
    fsdp_copies: str = "stock"
    readbacks: str = "copy"
    model: str | None = None
    layers: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    ep: int | None = None
    ac: str | None = None
    compile: bool | None = None
    activation_offload: bool = False
    balanced_routing: bool | None = None
    count_readback: bool = True
    adamw: str | None = None
    seed: int | None = None
    max_norm: float | None = None
    """0: no clipping."""
    lr: float | None = None
    world: int | None = None
    nproc: int | None = None
    mode: str = "auto"
    device: str = "auto"
    emulate_link: str | None = None
    chunk: str | None = None
    state_budget: str | None = None
    pieces: int | None = None
    slots: int | None = None
    staging: str | None = None
    at_loss: str | None = None
    lead: int | None = None
    ahead: int | None = None
    first_step: str | None = None
    warmup: int | None = None
    steps: int | None = None
    broadcast_every: int | None = None


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
        for arm, offload in _arms(options, shape)
    ]
    for spec in specs:
        check(spec, shape)
    notes += _about_mode(options, hardware, mode, shape)
    if options.layers is None and device == "cuda":
        specs, fitted = _fit(specs, hardware, shape)
        notes += fitted
    return Resolved(specs, notes)


def _device(options: Options, hardware: Hardware) -> Literal["cuda", "cpu"]:
    _one_of("--device", options.device, ("auto", "cuda", "cpu"))
    if options.device == "cuda" and not hardware.gpus:
        raise UsageError(f"--device cuda: no GPU to use ({hardware.no_gpu_why}); use --device cpu")
    return "cuda" if hardware.gpus and options.device != "cpu" else "cpu"


def _mode(options: Options, hardware: Hardware, device: Literal["cuda", "cpu"], shape: ModelShape) -> Mode:
    """World, processes and real or rehearsed, from whichever of them were given."""
    _one_of("--mode", options.mode, ("auto", "real", "rehearsal"))
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
    return _build(Mode, kind=kind, device=device, world=world, nproc=nproc, emulate_link=link)


def _default_world(options: Options, device: str, shape: ModelShape, places: int) -> int:
    big = shape.name != "tiny"
    if options.mode == "rehearsal" or (big and device == "cuda"):
        return BIG_WORLD
    return options.nproc or places


def _divisor(world: int, at_most: int) -> int:
    """The largest divisor of world that is not above `at_most`."""
    return max(d for d in range(1, max(1, min(world, at_most)) + 1) if world % d == 0)


def _workload(options: Options, device: str, shape: ModelShape, mode: Mode) -> Workload:
    _one_of("--ac", options.ac or "full", ("full", "none"))
    _one_of("--adamw", options.adamw or "fused", ("fused", "foreach"))
    ep = options.ep
    if ep is None:
        ep = 1 if shape.name == "tiny" else math.gcd(mode.world, shape.experts, BIG_WORLD)
    if ep < 1 or mode.world % ep or shape.experts % ep:
        raise UsageError(
            f"--ep {ep}: must divide the world ({mode.world}) and the experts ({shape.experts}); "
            f"use --ep {math.gcd(mode.world, shape.experts)}"
        )
    workload = _build(
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


def _window(options: Options) -> Window:
    """By default a little longer where broadcasts need it: whole periods in the warm-up and in the window."""
    every, default = options.broadcast_every or 1, Window()

    def periods(given: int | None, steps: int) -> int:
        return -(-steps // every) * every if given is None else given

    return _build(Window, warmup=periods(options.warmup, default.warmup), steps=periods(options.steps, default.steps))


def _arms(options: Options, shape: ModelShape) -> list[tuple[ArmSpec, bool]]:
    """(arm, activation offload) of every launch of a round."""
    knobs: dict[str, Any] = {
        "state_budget": None if options.state_budget is None else parse_size("--state-budget", options.state_budget),
        "pieces": options.pieces,
        "slots": options.slots,
        "staging_bytes": None if options.staging is None else parse_size("--staging", options.staging),
        "loss_bytes": None if options.at_loss is None else parse_size("--at-loss", options.at_loss),
        "lead": options.lead,
        "ahead": options.ahead,
        "first_step": options.first_step,
    }
    chunk = None if options.chunk is None else parse_size("--chunk", options.chunk)
    if chunk is not None and chunk < 4096:
        raise UsageError(f"--chunk {options.chunk}: the smallest chunk is 4KiB")
    _one_of("--fsdp-copies", options.fsdp_copies, ("stock", "kernel"))
    _one_of("--readbacks", options.readbacks, ("copy", "kernel"))
    _one_of("--first-step", options.first_step or "bounded", ("bounded", "whole"))
    if options.table is not None:
        return _table(options, chunk or shape.chunk_bytes)
    found = [arms.find(name) for name in options.arm or arms.DEFAULT_ARMS]
    for key, value in (("chunk_bytes", chunk), *knobs.items()):
        if value is not None and not any(key in arm.defaults for arm, _ in found):
            flag = _FLAGS.get(key, "--" + key.removesuffix("_bytes").replace("_", "-"))
            raise UsageError(f"{flag}: no chosen arm uses it ({', '.join(arm.name for arm, _ in found)})")
    specs = [
        _build(
            arm.resolve,
            numa=numa or options.numa,
            fsdp_copies=options.fsdp_copies,
            readbacks=options.readbacks,
            chunk_bytes=chunk or shape.chunk_bytes,
            **knobs,
        )
        for arm, numa in found
    ]
    if not options.arm:
        specs = list(dict.fromkeys(specs))  # --numa makes two of the default arms equal
    return [(spec, options.activation_offload) for spec in specs]


_FLAGS = {"loss_bytes": "--at-loss"}


def _table(options: Options, chunk: int) -> list[tuple[ArmSpec, bool]]:
    if options.table != "seed":
        raise UsageError(f"unknown table {options.table}: there is seed")
    fixed = {
        "--arm": options.arm,
        "--numa": options.numa,
        "--activation-offload": options.activation_offload,
        "--first-step": options.first_step,
        "--state-budget": options.state_budget,
        "--pieces": options.pieces,
        "--slots": options.slots,
        "--staging": options.staging,
        "--at-loss": options.at_loss,
        "--lead": options.lead,
        "--ahead": options.ahead,
    }
    given = [flag for flag, value in fixed.items() if value]
    if given:
        raise UsageError(f"--table seed: its rows fix {given[0]}; leave it out")
    return [
        (
            arms.ARMS[row.arm].resolve(numa=row.numa, chunk_bytes=chunk, first_step=row.first_step, pieces=1),
            row.activation_offload,
        )
        for row in seed.cases()
    ]


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


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{flag} {value}: choose {', '.join(allowed[:-1])} or {allowed[-1]}")


def _build(make: Callable[..., F], **values: Any) -> F:
    """A spec from the values that were given; a value out of range becomes one clear line."""
    try:
        return make(**{key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        raise UsageError(f"{flag} {first['input']}: {first['msg'].lower()}") from error
