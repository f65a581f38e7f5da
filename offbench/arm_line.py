"""`--arm` as given: a name, or a name with options of its own, as in `stream --state-budget auto`. No torch here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from offbench import arms
from offbench.arms.arm import Arm
from offbench.errors import UsageError
from offbench.options import Options

SWITCHES = ("numa", "activation_offload")
COUNTS = ("pieces", "slots", "lead", "ahead")
WORDS = (
    *("fsdp_copies", "readbacks", "activation_copies", "gradient_pool", "memory_limit"),
    *("chunk", "state_budget", "staging", "at_loss", "first_step"),
)


@dataclass(frozen=True)
class ArmLine:
    """One row that was asked for."""

    arm: Arm
    options: Options
    """Those of the whole command line, under the arm's own."""
    own: frozenset[str]
    """Names of the arm's own."""


def parse(text: str, shared: Options) -> ArmLine:
    """The arm and its options; its own go before the shared ones.

    Raises UsageError for an unknown arm, for what is no option of an arm, and for a value that is none.
    """
    where = f'--arm "{text}"'
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).lower()}; quote the arm and its options once") from error
    if not words:
        raise UsageError(f"{where}: name an arm; there are {', '.join((*arms.ARMS, *arms.ALIASES))}")
    arm, numa = arms.find(words[0])
    own = dict(_own(where, words[1:]))
    options = replace(shared, **own)
    return ArmLine(arm, replace(options, numa=options.numa or numa), frozenset(own))


def _own(where: str, words: list[str]) -> Iterator[tuple[str, Any]]:
    left = iter(words)
    known = {f"--{name.replace('_', '-')}": name for name in (*SWITCHES, *COUNTS, *WORDS)}
    for word in left:
        flag, has_value, value = word.partition("=")
        if flag not in known:
            raise UsageError(
                f"{where}: {flag} is no option of an arm; there are {', '.join(known)}; others go outside the quotes, "
                "as all arms share them"
            )
        name = known[flag]
        if name in SWITCHES:
            if has_value:
                raise UsageError(f"{where}: {flag} takes no value")
            yield name, True
            continue
        value = value if has_value else next(left, "")
        if not value or value.startswith("--"):
            raise UsageError(f"{where}: {flag} needs a value")
        yield name, _count(where, flag, value) if name in COUNTS else value


def _count(where: str, flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{where}: {flag} {value}: not a whole number") from None
