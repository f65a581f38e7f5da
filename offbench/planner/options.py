"""The command line of `offbench plan` as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    memory_limit: str | None = None
    fsdp_copies: str = "kernel"
    readbacks: str = "kernel"
    what_if: tuple[str, ...] = ()
    plot: str | None = None
    against: tuple[Path, ...] = ()
