"""The arms: each a Schedule plus what is special, in a short file of its own. Importing this loads no torch."""

from __future__ import annotations

import difflib

from offbench.arms import chunked, main, none, overlap, stream, zerocopy
from offbench.arms.arm import Arm
from offbench.errors import UsageError

__all__ = ["ALIASES", "ARMS", "DEFAULT_ARMS", "Arm", "find"]

ARMS: dict[str, Arm] = {
    arm.name: arm for arm in (none.ARM, main.ARM, chunked.ARM, overlap.ARM, stream.ARM, zerocopy.ARM)
}

ALIASES: dict[str, tuple[str, bool]] = {"numa": ("chunked", True)}
"""Names that stand for an arm plus --numa."""

DEFAULT_ARMS = ("none", "main", "chunked", "numa", "overlap", "stream")
"""What `offbench run` runs when no arm is named."""


def find(name: str) -> tuple[Arm, bool]:
    """The arm of that name or alias, and whether the name implies --numa.

    Raises UsageError, with the nearest name, for an unknown one.
    """
    base, numa = ALIASES.get(name, (name, False))
    if base not in ARMS:
        names = [*ARMS, *ALIASES]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise UsageError(f"unknown arm {name}: {hint}")
    return ARMS[base], numa
