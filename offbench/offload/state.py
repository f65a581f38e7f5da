"""Loading a saved AdamW state in place, whoever saved it: this optimizer, torch.optim.AdamW, a checkpoint by FQN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbench.errors import OffbenchError
from offbench.offload.layout import local_of

OURS = ("params", "param_names", "fused", "foreach", "capturable")
"""Group keys a checkpoint does not overwrite: they say how this process runs, not what it trains."""


def load_groups(groups: Sequence[dict[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Take over the saved hyperparameters. Raises OffbenchError when the groups hold other numbers of parameters."""
    found, expected = [len(g["params"]) for g in saved_groups], [len(g["params"]) for g in groups]
    if found != expected:
        raise OffbenchError(f"the saved param groups hold {found} parameters, this optimizer's {expected}")
    for group, saved in zip(groups, saved_groups, strict=True):
        group.update({key: value for key, value in saved.items() if key not in OURS})


@torch.no_grad()
def load_moments(mine: Mapping[str, torch.Tensor], saved: Mapping[str, Any] | None, key: object) -> None:
    """Copy one parameter's step and moments into the tensors `mine`; None: it had no step yet, so zeros.

    Raises OffbenchError when the shards differ in shape, or a moment is missing.
    """
    if saved is None:
        for tensor in mine.values():
            local_of(tensor).zero_()
        return
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in saved:
            raise OffbenchError(f"the saved state of parameter {key} has no {name}: it is not AdamW's")
        source, target = local_of(saved[name]), local_of(mine[name])
        if source.shape != target.shape:
            raise OffbenchError(
                f"saved {name} of parameter {key} is {tuple(source.shape)}, this rank's is {tuple(target.shape)}; "
                "reshard it with torch.distributed.checkpoint"
            )
        target.copy_(source)
    mine["step"].fill_(float(saved["step"]))
