"""The arms of a round from the options of the command line. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from offbench import arms, seed
from offbench.config import ArmSpec
from offbench.errors import UsageError
from offbench.options import Options, build, flag_of, one_of
from offbench.units import parse_size
from offbench.workload.presets import ModelShape


def arms_of(options: Options, shape: ModelShape, device: Literal["cuda", "cpu"]) -> list[tuple[ArmSpec, bool]]:
    """(arm, activation offload) of every launch of a round.

    On a GPU small copies are made by kernels unless told otherwise: that costs `none` nothing
    (results/h200-all-arms.md), and all others wait less. A CPU has no copy engine to wait for, so nothing is replaced.
    """
    knobs: dict[str, Any] = {
        "state_budget": _budget(options.state_budget),
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
    limit = None if options.memory_limit is None else parse_size("--memory-limit", options.memory_limit)
    usual = ("kernel", "kernel") if device == "cuda" else ("stock", "copy")
    fsdp_copies = usual[0] if options.fsdp_copies is None else options.fsdp_copies
    readbacks = usual[1] if options.readbacks is None else options.readbacks
    one_of("--fsdp-copies", fsdp_copies, ("stock", "kernel"))
    one_of("--readbacks", readbacks, ("copy", "kernel"))
    gradient_pool = "stock" if options.gradient_pool is None else options.gradient_pool
    one_of("--gradient-pool", gradient_pool, ("stock", "compute"))
    one_of("--first-step", options.first_step or "bounded", ("bounded", "whole"))
    if options.table is not None:
        return _table(options, chunk or shape.chunk_bytes)
    found = [arms.find(name) for name in options.arm or arms.DEFAULT_ARMS]
    for key, value in (("chunk_bytes", chunk), *knobs.items()):
        if value is not None and not any(key in arm.defaults for arm, _ in found):
            raise UsageError(f"{flag_of(key)}: no chosen arm uses it ({', '.join(arm.name for arm, _ in found)})")
    specs = [
        build(
            arm.resolve,
            numa=numa or options.numa,
            fsdp_copies=fsdp_copies,
            readbacks=readbacks,
            gradient_pool=gradient_pool,
            memory_limit=limit,
            chunk_bytes=chunk or shape.chunk_bytes,
            **knobs,
        )
        for arm, numa in found
    ]
    if not options.arm:
        specs = list(dict.fromkeys(specs))  # --numa makes two of the default arms equal
    return [(spec, options.activation_offload) for spec in specs]


def _budget(text: str | None) -> int | str | None:
    """Bytes, or `auto`, which a size would not name."""
    if text is None or text == "auto":
        return text
    try:
        return parse_size("--state-budget", text, least=0)
    except UsageError as error:
        raise UsageError(f"{error}, or auto") from error


def _table(options: Options, chunk: int) -> list[tuple[ArmSpec, bool]]:
    if options.table != "seed":
        raise UsageError(f"unknown table {options.table}: there is seed")
    fixed = {
        "--arm": options.arm,
        "--numa": options.numa,
        "--activation-offload": options.activation_offload,
        "--fsdp-copies": options.fsdp_copies == "kernel",
        "--readbacks": options.readbacks == "kernel",
        "--gradient-pool": options.gradient_pool == "compute",
        "--memory-limit": options.memory_limit,
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
