"""Gradients as memory: who still reads it, and whether it may be used for something else afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offbench.offload.engine import Work


@dataclass
class GradientMemory:
    """Memory that the gradients of some works share."""

    tensors: list[torch.Tensor]
    pending: set[int]
    """Chunks whose update still reads it."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.tensors[0].untyped_storage().nbytes())


def by_memory(works: Sequence[Work]) -> dict[int, GradientMemory]:
    """The gradients of these works by the address of the memory they are views of."""
    found: dict[int, GradientMemory] = {}
    for work in works:
        for gradient in work.gradients:
            shared = found.setdefault(gradient.untyped_storage().data_ptr(), GradientMemory([], set()))
            shared.tensors.append(gradient)
            shared.pending.add(work.chunk.index)
    return found


def sole_memory(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All bytes of the memory behind these gradients (uint8), if nothing else refers to it.

    FSDP2 reduces a parameter group into one buffer of which all its gradients are views.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)  # private: without it gradients are simply not taken over
    if count is None:
        return None
    storage = gradients[0].untyped_storage()
    bases = {id(gradient._base) for gradient in gradients if gradient._base is not None}
    ours = len({id(gradient) for gradient in gradients}) + len(bases) + 1  # and `storage`
    if count(storage._cdata) != ours:
        return None
    return torch.empty(0, dtype=torch.uint8, device=gradients[0].device).set_(storage)
