"""`offbench run`'s options as given, and how a bad one becomes one clear line. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from offbench.config import Frozen
from offbench.errors import UsageError

F = TypeVar("F", bound=Frozen)

_FLAGS = {"loss_bytes": "--at-loss"}
"""Options of an arm that are not called as their field."""


@dataclass(frozen=True)
class Options:
    """`offbench run`'s options as given; None: not given."""

    arm: tuple[str, ...] = ()
    table: str | None = None
    numa: bool = False
    fsdp_copies: str | None = None
    readbacks: str | None = None
    activation_copies: str | None = None
    gradient_pool: str | None = None
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
    memory_limit: str | None = None
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


def flag_of(name: str) -> str:
    """The option that sets a field of ArmSpec: `chunk_bytes` -> `--chunk`."""
    return _FLAGS.get(name, "--" + name.removesuffix("_bytes").replace("_", "-"))


def one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise UsageError unless the value is one of those allowed."""
    if value not in allowed:
        raise UsageError(f"{flag} {value}: choose {', '.join(allowed[:-1])} or {allowed[-1]}")


def build(make: Callable[..., F], **values: Any) -> F:
    """A spec from the values that were given; a value out of range becomes one clear line."""
    try:
        return make(**{key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        raise UsageError(f"{flag} {first['input']}: {first['msg'].lower()}") from error
