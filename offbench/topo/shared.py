"""The machine whose links the ranks of a launch share, for its floor."""

from __future__ import annotations

from offbench.config import Mode
from offbench.topo import cache
from offbench.topology.detect import detect
from offbench.topology.model import Machine


def shared_machine(mode: Mode) -> Machine | None:
    """The machine whose links the local ranks share, with what `offbench topo --measure` has found on it; None where
    they share none: an emulated link is slower than all of it, and one process shares nothing."""
    if mode.device == "cpu" or mode.nproc == 1 or mode.emulate_link is not None:
        return None
    return cache.recall(detect())
