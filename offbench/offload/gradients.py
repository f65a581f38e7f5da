"""Gradients as memory: ours alone, who still reads it, and whether it may be used for something else afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offbench.offload.engine import Work
from offbench.offload.layout import alias
from offbench.offload.streams import trainable


def own(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory as tensors that nobody else holds, flat where that costs nothing: whoever keeps `p.grad`, or a
    buffer that it is a view of, then counts as a user of its memory.

    FSDP2 reduces a parameter group into one buffer of which all its gradients are views: that is cut in one call.
    """
    found: list[torch.Tensor | None] = [None] * len(gradients)
    views: dict[int, tuple[torch.Tensor, torch.dtype, list[tuple[int, int, int]]]] = {}
    for i, gradient in enumerate(gradients):
        if (base := gradient._base) is not None and gradient.is_contiguous():
            if (known := views.get(id(base))) is None and base.dim() == 1 and base.dtype == gradient.dtype:
                known = views[id(base)] = base, base.dtype, []
            if known is not None and known[1] == gradient.dtype:
                known[2].append((int(gradient.storage_offset()), gradient.numel(), i))
                continue
        found[i] = alias(gradient)
    for base, _, spans in views.values():
        spans.sort()
        pieces = _cut(alias(base), spans)
        for at, (_, _, i) in enumerate(spans):
            found[i] = alias(gradients[i]) if pieces is None else pieces[at]
    return [gradient for gradient in found if gradient is not None]


def _cut(base: torch.Tensor, spans: Sequence[tuple[int, int, int]]) -> list[torch.Tensor] | None:
    """Pieces of a buffer at (offset, elements, ...) of its memory; None when they overlap or leave it."""
    if not base.is_contiguous():
        return None
    sizes: list[int] = []
    wanted: list[int] = []
    position = begin = int(base.storage_offset())
    for start, count, _ in spans:
        if start < position:
            return None
        if start > position:
            sizes.append(start - position)
        wanted.append(len(sizes))
        sizes.append(count)
        position = start + count
    left = begin + base.numel() - position
    if left < 0:
        return None
    pieces = base.split_with_sizes([*sizes, left] if left else sizes)
    return [pieces[i] for i in wanted]


@dataclass
class GradientMemory:
    """Memory that the gradients of some works share."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    """Chunks whose update still reads it."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.tensors[0].untyped_storage().nbytes())


def by_memory(works: Sequence[Work]) -> dict[int, list[GradientMemory]]:
    """By chunk, the memories that its gradients are views of."""
    memories: dict[int, GradientMemory] = {}
    addresses: dict[int, int] = {}
    found: dict[int, list[GradientMemory]] = {}
    for work in works:
        mine: dict[int, GradientMemory] = {}
        for gradient in work.gradients:
            base = gradient._base  # of views it is asked once: a storage is a new object for every tensor
            if base is None:
                address = gradient.untyped_storage().data_ptr()
            elif (known := addresses.get(id(base))) is not None:
                address = known
            else:
                address = addresses[id(base)] = base.untyped_storage().data_ptr()
            if address not in mine:
                memory = mine[address] = memories.setdefault(address, GradientMemory())
                memory.pending.add(work.chunk.index)
            mine[address].tensors.append(gradient)
        found[work.chunk.index] = list(mine.values())
    return found


def one_of_each(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of the gradients that share memory, one."""
    return list({gradient.untyped_storage().data_ptr(): gradient for gradient in gradients}.values())


def sole_memory(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All bytes of the memory behind these gradients (uint8), if nothing else refers to it."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # private: without it gradients are simply not taken over
    if count is None:
        return None
    storage = gradients[0].untyped_storage()
    bases = {id(gradient._base) for gradient in gradients if gradient._base is not None}
    ours = len({id(gradient) for gradient in gradients}) + len(bases) + 1  # and `storage`
    if count(storage._cdata) != ours:
        return None
    with trainable():
        return torch.empty(0, dtype=torch.uint8, device=gradients[0].device).set_(storage)
