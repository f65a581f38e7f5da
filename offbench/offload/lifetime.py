"""The end of an optimizer that its model outlives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from offbench.offload.engine import Engine
from offbench.offload.fsdp import ReadGuard

P = ParamSpec("P")
T = TypeVar("T")


def held(owner: weakref.ref[Any], do: Callable[P, T]) -> Callable[P, T]:
    """The same; while it runs the owner is not collected, whose end would drain what is half done. Between calls it
    may be."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        kept = owner()
        try:
            return do(*args, **kwargs)
        finally:
            del kept

    return call


def end(engine: Engine, guard: ReadGuard, withdraw: Callable[[], None]) -> None:
    """Update and write back what is owed, and leave the model as it was."""
    withdraw()
    try:
        engine.end()
    finally:
        guard.restore()
