"""What a param group asks of AdamW: its values at a step, and the options that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offbench.errors import OffbenchError

_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(frozen=True)
class Hyper:
    """A param group's values as step() found them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def capture(group: dict[str, Any]) -> Hyper:
    """The group's values now. Raises OffbenchError for a rate on the device or an option set since."""
    refuse(group)
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        raise OffbenchError("lr is a tensor on the device: reading it would stop the host every step; pass a float")
    beta1, beta2 = group["betas"]
    return Hyper(float(lr), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))


def refuse(group: dict[str, Any]) -> None:
    """Raise OffbenchError for an option that would not be exact."""
    for option in _REFUSED:
        if group.get(option):
            raise OffbenchError(f"OffloadedAdamW does not support {option}=True")
