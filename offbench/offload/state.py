"""A saved AdamW state loaded in place, whoever saved it (this optimizer, torch.optim.AdamW, a checkpoint by FQN), and
where state is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from offbench.errors import OffbenchError
from offbench.offload.hyper import refuse
from offbench.offload.layout import local_of

OURS = ("params", "param_names", "fused", "foreach", "capturable", "decoupled_weight_decay")
"""Group keys a checkpoint does not overwrite: they say how this process runs, not what it trains. The last one is
Adam's in a state that Adam saved, which torch's AdamW loads, too."""


def check_own(
    state: Mapping[torch.Tensor, Mapping[str, Any]], laid_out: Mapping[nn.Parameter, Mapping[str, torch.Tensor]]
) -> None:
    """Raise OffbenchError where an optimizer's state has no longer the moments that were laid out: a checkpoint of it
    would hold what no step updates."""
    for parameter, moments in laid_out.items():
        now = state.get(parameter, {})
        if any(now.get(name) is not moment for name, moment in moments.items()):
            raise OffbenchError(
                "optimizer.state was cleared, or its moments replaced by others, as trainers do that move it to the "
                "device and back themselves; step() updates those it was made with: switch that off, or make a new "
                "optimizer"
            )


def check_saved(
    groups: Sequence[dict[str, Any]], saved_groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]
) -> None:
    """Raise OffbenchError when the saved state does not fit these groups: other numbers of parameters, an option that
    is refused, shards of another shape, something missing. Nothing is changed before all of it is known to fit."""
    found, expected = [len(g["params"]) for g in saved_groups], [len(g["params"]) for g in groups]
    if found != expected:
        raise OffbenchError(f"the saved param groups hold {found} parameters, this optimizer's {expected}")
    for group, saved in zip(groups, saved_groups, strict=True):
        refuse({key: value for key, value in saved.items() if key not in OURS})
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if state.get(key):  # an empty one is as none: reading `optimizer.state[p]` leaves it
                _check_moments(local_of(parameter).shape, state[key], key)


def _check_moments(shape: torch.Size, saved: Mapping[str, Any], key: object) -> None:
    for name in ("step", "exp_avg", "exp_avg_sq"):
        if name not in saved:
            raise OffbenchError(f"the saved state of parameter {key} has no {name}: it is not AdamW's")
    for name in ("exp_avg", "exp_avg_sq"):
        if local_of(saved[name]).shape != shape:
            raise OffbenchError(
                f"saved {name} of parameter {key} is {tuple(local_of(saved[name]).shape)}, this rank's is "
                f"{tuple(shape)}; reshard it with torch.distributed.checkpoint"
            )


def load_groups(groups: Sequence[dict[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Take over the saved hyperparameters: their values, for a scheduler writes into a rate that is a tensor."""
    for group, saved in zip(groups, saved_groups, strict=True):
        group.update({key: deepcopy(value) for key, value in saved.items() if key not in OURS})


@torch.no_grad()
def load_moments(mine: Mapping[str, torch.Tensor], saved: Mapping[str, Any] | None) -> None:
    """Copy one parameter's step and moments into the tensors `mine`; none saved: it had no step yet, so zeros."""
    if not saved:
        for tensor in mine.values():
            local_of(tensor).zero_()
        return
    for name in ("exp_avg", "exp_avg_sq"):
        local_of(mine[name]).copy_(local_of(saved[name]))
    mine["step"].fill_(float(saved["step"]))


def places(states: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of these parameters' moments by where they are: `device`, `host`. A parameter may have none."""
    found: dict[str, int] = {}
    for state in filter(None, states):
        for moment in (local_of(state["exp_avg"]), local_of(state["exp_avg_sq"])):
            place = "device" if moment.device.type != "cpu" else "host"
            found[place] = found.get(place, 0) + moment.numel() * moment.element_size()
    return found
