"""The AdamW kernels: torch's own, on state that is on the device, or ours, on state in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.optim.adamw import adamw

from offbench.offload.chunks import Chunk
from offbench.offload.engine import Work
from offbench.offload.hyper import Hyper
from offbench.offload.layout import Member
from offbench.offload.staged import Staged

Implementation = Literal["fused", "foreach"]
"""torch's kernels. Their bits differ, so an update is compared only with its own implementation."""


def work(
    chunk: Chunk,
    members: Sequence[Member],
    gradients: list[torch.Tensor],
    hypers: Sequence[Hyper],
    implementation: Implementation,
    in_place: bool,
) -> Work:
    """One chunk's update with the gradients and hyperparameters (by param group) as they are now.

    Nothing in it refers to the optimizer: dropping that must drain what is pending.
    """

    def update(state: Staged) -> None:
        for group in sorted({member.group for member in members}):
            chosen = [(m, g) for m, g in zip(members, gradients, strict=True) if m.group == group]
            run([m for m, _ in chosen], [g for _, g in chosen], state, hypers[group], implementation, in_place)

    return Work(chunk, update, gradients, [member.local for member in members])


@torch.no_grad()
def run(
    members: Sequence[Member],
    gradients: Sequence[torch.Tensor],
    state: Staged,
    hyper: Hyper,
    implementation: Implementation,
    in_place: bool,
) -> None:
    """Queue one AdamW step of these parameters on the current stream.

    gradients: shaped as the members' local shards. state: the bytes of their chunk; in_place: they are in host memory.
    AdamW is elementwise, so contiguous tensors are handed over flat: a tensor made costs the host more than it looks.
    """
    parameters = [member.local for member in members]
    if all(tensor.is_contiguous() for tensor in (*parameters, *gradients)):
        parameters = [_flat(parameter) for parameter in parameters]
        gradients = [_flat(gradient) for gradient in gradients]
        moments = [member.flat(state, local) for member, local in zip(members, parameters, strict=True)]
    else:
        moments = [member.views(state) for member in members]
    if in_place:
        from offbench.offload.zerocopy import kernel  # needs Triton

        kernel.adamw(
            parameters,
            gradients,
            [first for first, _ in moments],
            [second for _, second in moments],
            [member.step for member in members],
            **vars(hyper),
        )
        return
    adamw(
        parameters,
        list(gradients),
        [first for first, _ in moments],
        [second for _, second in moments],
        [],
        [member.step for member in members],
        foreach=implementation == "foreach",
        fused=implementation == "fused",
        amsgrad=False,
        maximize=False,
        **vars(hyper),
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)
