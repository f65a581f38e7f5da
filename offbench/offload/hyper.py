"""What a param group asks of AdamW: its values at a step, and the options that are refused."""

from __future__ import annotations

from collections.abc import Mapping
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


def refuse(group: Mapping[str, Any], implementation: str | None = None) -> None:
    """Raise OffbenchError for an option that would not be exact; with `implementation`, as a group is added, for
    another kernel, for a parameter that is in it twice (of which torch only warns) and for a complex one as well."""
    for option in _REFUSED:
        if group.get(option):
            raise OffbenchError(f"OffloadedAdamW does not support {option}=True")
    if group.get("decoupled_weight_decay") is False:  # torch's AdamW would obey
        raise OffbenchError("OffloadedAdamW does not support decoupled_weight_decay=False: that is Adam, not AdamW")
    for kernel in ("fused", "foreach"):
        if implementation is not None and group.get(kernel) and kernel != implementation:
            raise OffbenchError(
                f"{kernel}=True beside implementation='{implementation}': all groups run one kernel, whose bits are "
                f"its own; pass implementation='{kernel}' instead"
            )
    params = group.get("params") if implementation is not None else None
    if isinstance(params, list) and len(set(params)) < len(params):
        raise OffbenchError("a parameter is in a param group twice: it would have two states, and be updated twice")
    if any(parameter.is_complex() for parameter in params or () if isinstance(parameter, torch.Tensor)):
        raise OffbenchError("OffloadedAdamW does not support complex parameters; pass torch.view_as_real of them")


def refuse_options(options: Mapping[str, Any], implementation: str) -> None:
    """The constructor's options that torch.optim.AdamW has and this does not. Raises OffbenchError for one that asks
    for something and for an unknown kernel, TypeError for a name that torch does not know either."""
    if implementation not in ("fused", "foreach"):
        raise OffbenchError(f"implementation={implementation!r}: choose 'fused' or 'foreach'")
    for name in options:
        if name not in (*_REFUSED, "fused", "foreach"):
            raise TypeError(f"OffloadedAdamW has no option {name}")
    refuse(options, implementation)
