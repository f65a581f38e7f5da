"""The AdamW kernels: torch's own, on state that is on the device, or ours, on state in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim.adamw import adamw

from offbench.offload.hyper import Hyper

Implementation = Literal["fused", "foreach"]
"""torch's kernels. Their bits differ, so an update is compared only with its own implementation."""


@dataclass
class Call:
    """Parameters that share their hyperparameters, with all that AdamW needs for them: lists of one length. All of a
    parameter's tensors have one shape."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    first: list[torch.Tensor]
    """exp_avg."""
    second: list[torch.Tensor]
    """exp_avg_sq."""
    steps: list[torch.Tensor]
    """The counters that the kernel reads."""
    hyper: Hyper

    def add(self, other: Call) -> None:
        """Take in another one's parameters."""
        self.parameters += other.parameters
        self.gradients += other.gradients
        self.first += other.first
        self.second += other.second
        self.steps += other.steps


def run_calls(calls: Sequence[Call], implementation: Implementation, in_place: bool) -> None:
    """Queue all of them, made for this one time, on the current stream: those with equal hyperparameters as one.
    in_place: the moments are in host memory."""
    if torch.is_grad_enabled():  # not in step()
        with torch.no_grad():
            return run_calls(calls, implementation, in_place)
    if len(calls) == 1:  # as each update of state that moves
        return _run(calls[0], implementation, in_place)
    together: dict[Hyper, Call] = {}
    for call in calls:
        if call.hyper in together:
            together[call.hyper].add(call)
        else:
            together[call.hyper] = call
    for call in together.values():
        _run(call, implementation, in_place)


def _run(call: Call, implementation: Implementation, in_place: bool) -> None:
    tensors = call.parameters, call.gradients, call.first, call.second
    if in_place:
        from offbench.offload.zerocopy import kernel  # needs Triton

        kernel.adamw(*tensors, call.steps, **vars(call.hyper))
    elif implementation == "fused" and len({parameter.dtype for parameter in call.parameters}) == 1:
        # What torch.optim.adamw does for tensors of one dtype on one device. Its checks, made for every parameter at
        # every call, cost the host more than the launch, and updates are queued where the device waits for it.
        torch._foreach_add_(call.steps, 1)
        torch._fused_adamw_(*tensors, [], call.steps, amsgrad=False, maximize=False, **vars(call.hyper))
    else:
        adamw(
            *tensors,
            [],
            call.steps,
            foreach=implementation == "foreach",
            fused=implementation == "fused",
            amsgrad=False,
            maximize=False,
            **vars(call.hyper),
        )
