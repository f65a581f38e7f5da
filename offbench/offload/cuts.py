"""A chunk's staged bytes cut into the moments of all its parameters, one call a part instead of one a moment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbench.offload.staged import Staged
from offbench.offload.streams import trainable

Moments = tuple[torch.Tensor, torch.Tensor]
"""exp_avg and exp_avg_sq of one parameter."""


class Cuts:
    """offsets: byte offsets of each parameter's exp_avg and exp_avg_sq in the chunk; counts: elements of each of them;
    dtype: of all moments. Where parts begin differs between chunks and budgets, not between steps, so how each is cut
    is worked out once."""

    def __init__(self, offsets: Sequence[tuple[int, int]], counts: Sequence[int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._many = len(offsets)
        self._spans = sorted(
            (start, count, 2 * member + which)
            for member, (pair, count) in enumerate(zip(offsets, counts, strict=True))
            for which, start in enumerate(pair)
        )
        self._plans: dict[tuple[int, ...], list[_Plan] | None] = {}

    def cut(self, state: Staged) -> list[Moments] | None:
        """Each parameter's moments, flat, or None when some moment does not lie in one part as whole elements. A
        `Staged`, which holds one chunk, is cut once."""
        if state.cut is not None:
            return state.cut
        shape = tuple(x for at, part in state.parts for x in (at, part.numel()))
        if shape not in self._plans:
            self._plans[shape] = self._plan(state)
        plans = self._plans[shape]
        if plans is None:
            return None
        found: list[torch.Tensor | None] = [None] * (2 * self._many)
        with trainable():  # they are kept: an evaluation may be the first to need them
            pieces = [
                part.view(self._dtype).split_with_sizes(sizes)
                for (_, part), (sizes, _) in zip(state.parts, plans, strict=True)
            ]
        for of_part, (_, slots) in zip(pieces, plans, strict=True):
            for piece, slot in zip(of_part, slots, strict=True):
                if slot is not None:
                    found[slot] = piece
        whole = [piece for piece in found if piece is not None]
        state.cut = list(zip(whole[::2], whole[1::2], strict=True))
        return state.cut

    def _plan(self, state: Staged) -> list[_Plan] | None:
        plans = []
        spans = list(self._spans)
        itemsize = self._dtype.itemsize
        for at, part in state.parts:
            if at % itemsize or part.numel() % itemsize or part.storage_offset() % itemsize:
                return None
            sizes: list[int] = []
            slots: list[int | None] = []
            position, stop = at, at + part.numel()
            while spans and spans[0][0] < stop:
                start, count, slot = spans.pop(0)
                if start < position or start + count * itemsize > stop:
                    return None
                if start > position:
                    sizes.append((start - position) // itemsize)
                    slots.append(None)
                sizes.append(count)
                slots.append(slot)
                position = start + count * itemsize
            if position < stop:
                sizes.append((stop - position) // itemsize)
                slots.append(None)
            plans.append((sizes, slots))
        return None if spans else plans


_Plan = tuple[list[int], list[int | None]]
"""Elements of each piece of a part, and which moment it is: 2 x the parameter's position, plus 1 for exp_avg_sq."""
