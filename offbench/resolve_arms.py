"""The arms of a round from the options of the command line. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from offbench import arms, seed
from offbench.arm_line import ArmLine, parse
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
    shared = _knobs(options)
    _axes(options, device)  # a bad value is said even where every arm has its own
    if options.table is not None:
        return _table(options, shared["chunk_bytes"] or shape.chunk_bytes)
    lines = [parse(text, options) for text in options.arm or arms.DEFAULT_ARMS]
    chosen = ", ".join(line.arm.name for line in lines)
    for key, value in shared.items():
        if value is not None and not any(key in line.arm.defaults for line in lines):
            raise UsageError(f"{flag_of(key)}: no chosen arm uses it ({chosen})")
    found = [(_spec(line, shape, device), line.options.activation_offload) for line in lines]
    return found if options.arm else list(dict.fromkeys(found))  # --numa makes two of the default arms equal


def _spec(line: ArmLine, shape: ModelShape, device: Literal["cuda", "cpu"]) -> ArmSpec:
    knobs = _knobs(line.options)
    for key, value in knobs.items():
        if value is not None and key not in line.arm.defaults and _FIELDS[key] in line.own:
            raise UsageError(f"{flag_of(key)}: arm {line.arm.name} does not use it")
    return build(
        line.arm.resolve,
        numa=line.options.numa,
        **_axes(line.options, device),
        **knobs | {"chunk_bytes": knobs["chunk_bytes"] or shape.chunk_bytes},
    )


_FIELDS = {
    "chunk_bytes": "chunk",
    "state_budget": "state_budget",
    "pieces": "pieces",
    "slots": "slots",
    "staging_bytes": "staging",
    "loss_bytes": "at_loss",
    "lead": "lead",
    "ahead": "ahead",
    "first_step": "first_step",
}
"""Fields of ArmSpec that some arms use, and the options that set them."""


def _knobs(options: Options) -> dict[str, Any]:
    """What only some arms use, by field of ArmSpec; None: not given."""
    found = {field: getattr(options, name) for field, name in _FIELDS.items()}
    found["state_budget"] = _budget(options.state_budget)
    for key in ("staging_bytes", "loss_bytes", "chunk_bytes"):
        found[key] = None if found[key] is None else parse_size(flag_of(key), found[key])
    if found["chunk_bytes"] is not None and found["chunk_bytes"] < 4096:
        raise UsageError(f"--chunk {options.chunk}: the smallest chunk is 4KiB")
    one_of("--first-step", options.first_step or "bounded", ("bounded", "whole"))
    return found


def _axes(options: Options, device: Literal["cuda", "cpu"]) -> dict[str, Any]:
    """What every arm has, by field of ArmSpec."""
    usual = ("kernel", "kernel") if device == "cuda" else ("stock", "copy")
    found = {
        "fsdp_copies": usual[0] if options.fsdp_copies is None else options.fsdp_copies,
        "readbacks": usual[1] if options.readbacks is None else options.readbacks,
        "activation_copies": options.activation_copies or "copy",
        "gradient_pool": "stock" if options.gradient_pool is None else options.gradient_pool,
    }
    one_of("--fsdp-copies", found["fsdp_copies"], ("stock", "kernel"))
    one_of("--readbacks", found["readbacks"], ("copy", "kernel"))
    one_of("--activation-copies", found["activation_copies"], ("copy", "kernel"))
    if options.activation_copies is not None and not options.activation_offload:
        raise UsageError("--activation-copies: only with --activation-offload")
    one_of("--gradient-pool", found["gradient_pool"], ("stock", "compute", "auto"))
    limit = None if options.memory_limit is None else parse_size("--memory-limit", options.memory_limit)
    return {**found, "memory_limit": limit}


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
        "--activation-copies": options.activation_copies,
        "--gradient-pool": options.gradient_pool not in {None, "stock"},
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
