"""May updates be deferred on this model and torch? If not, they run synchronously, and one warning says why. On a
torch that nobody has checked a test decides, and a warning says what."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from offbench.offload import fsdp
from offbench.offload.layout import local_of
from offbench.offload.schedule import Schedule
from offbench.offload.selftest import gathers_wait, is_checked
from offbench.offload.streams import Streams


def deferrable(
    schedule: Schedule, model: nn.Module | None, parameters: Sequence[nn.Parameter], streams: Streams
) -> Schedule:
    """The schedule itself, or, when a reader of some parameter could not be made to wait, its synchronous form."""
    why = _not_deferrable(model, parameters, streams)
    if why is None:
        if not is_checked(torch.__version__):
            text = f"torch {torch.__version__} is unknown here and passes the start-up test; updates overlap"
            warnings.warn(f"{schedule.name}: {text}", UserWarning, stacklevel=4)
        return schedule
    warnings.warn(f"{schedule.name}: {why}; updates run synchronously inside step()", UserWarning, stacklevel=4)
    return dataclasses.replace(schedule, deferred=False, write_back="forward")


def _not_deferrable(model: nn.Module | None, parameters: Sequence[nn.Parameter], streams: Streams) -> str | None:
    if model is None:
        return "no model was given whose gathers could wait"
    try:
        managed = fsdp.managed_parameters(model)
        if unmanaged := [p for p in parameters if p not in managed]:
            names = {p: name for name, p in model.named_parameters()}
            found = names.get(unmanaged[0], f"of shape {tuple(unmanaged[0].shape)}")
            more = f" and {len(unmanaged) - 1} more" if len(unmanaged) > 1 else ""
            return f"no FSDP2 group manages parameter {found}{more}"
        if is_checked(torch.__version__):
            return None
        for mesh in fsdp.meshes(model):
            if why := gathers_wait(mesh, local_of(parameters[0]).device, streams):
                return f"torch {torch.__version__} is unknown here and fails the start-up test: {why}"
    except fsdp.UnknownFSDP as unknown:
        return str(unknown)
    return None


def in_gather_order(
    schedule: Schedule, model: nn.Module | None, parameters: Sequence[tuple[nn.Parameter, int]]
) -> list[tuple[nn.Parameter, int]]:
    """Parameters, with their param group's index, as the forward will gather them, if their updates are deferred.

    A gather waits for the chunks it reads and for all before them. Param groups may have any order (norms and biases,
    without weight decay, mostly come last), and the root's own parameters are gathered first, however late their use.
    """
    if not schedule.deferred or model is None:
        return list(parameters)
    order = fsdp.gather_order(model)
    return sorted(parameters, key=lambda entry: order[entry[0]])
