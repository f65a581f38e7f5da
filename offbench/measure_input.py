"""What a trainer hands to StepRecorder, checked when it is handed over: in `finish` the run would be lost with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch.distributed.tensor import DTensor

from offbench.errors import UsageError
from offbench.window import PhaseName


def check_settings(job: Mapping[str, Any], tokens_per_step: int, warmup: int, steps: int) -> None:
    """Raise UsageError for a job that no JSON line can hold, and for counts below one."""
    for name, value in job.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
            raise UsageError(
                f"job[{name!r}] is {value!r} ({type(value).__name__}): names are text, and values text, numbers, "
                "booleans or None; pass str() of it"
            )
    for what, number in (("tokens_per_step", tokens_per_step), ("warmup", warmup), ("steps", steps)):
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"{what} is {number!r}: must be a whole number, at least 1")


class StepOrder:
    """The calls of one step: begin, marks, report, end. Raises UsageError for one that is out of order or has nothing
    to record."""

    def __init__(self) -> None:
        self._inside = self._reported = False

    def begin(self) -> bool:
        """Whether a step starts: one that had no end, since the trainer skipped it, goes on."""
        starts = not self._inside
        self._inside = True
        return starts

    def mark(self, phase: str) -> bool:
        """Whether this phase belongs to a step: a hook on the model also marks the forwards of an evaluation."""
        if phase not in get_args(PhaseName):
            raise UsageError(f"mark({phase!r}): phases are {', '.join(get_args(PhaseName))}")
        return self._inside

    def report(self, **scalars: Any) -> None:
        """These are the step's scalars, by name; None: the step has none of that name."""
        self._within("report()")
        for what, value in scalars.items():
            if isinstance(value, DTensor):
                raise UsageError(f"report(): {what} is a DTensor; pass its full_tensor()")
            if value is not None and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                shown = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {value!r}"
                raise UsageError(f"report(): {what} {shown}; pass a tensor of one element, still on its device")
        self._reported = True

    def end(self) -> None:
        """The step ends."""
        self._within("end()")
        if not self._reported:
            raise UsageError("end(): no loss for this step; call report(loss) before optimizer.step()")
        self._inside = self._reported = False

    def finish(self, done: int, total: int) -> None:
        """The run ends after so many of its steps."""
        if done < total:
            raise UsageError(f"finish() after {done} of {total} steps: wait for end() to be True, or ask for fewer")

    def _within(self, call: str) -> None:
        if not self._inside:
            raise UsageError(f"{call} outside a step: call begin() first")
