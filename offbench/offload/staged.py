"""A chunk's state on the device: one tensor, or several that hold consecutive bytes of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch

from offbench.offload.chunks import Chunk
from offbench.offload.streams import trainable


class Staged:
    """parts: (byte offset in the chunk, uint8 tensor), in order and without a gap."""

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.parts = tuple(parts)
        self._starts = [start for start, _ in self.parts]
        self._typed: dict[torch.dtype, list[torch.Tensor]] = {}
        self.cut: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """All moments, once they were cut out (`Cuts`)."""

    @staticmethod
    def whole(state: torch.Tensor) -> Staged:
        """All of it in one uint8 tensor."""
        return Staged([(0, state)])

    @staticmethod
    def at_home(chunk: Chunk, memory: torch.Tensor) -> Staged:
        """A chunk's state where it is kept: in `memory` of the chunk `chunk.home`."""
        if chunk.piece is None:
            return Staged.whole(memory)
        first, second = chunk.spans
        parts = [memory[start : start + nbytes] for start, nbytes in (first, second)]
        return Staged([(0, parts[0]), (first[1], parts[1])])

    def parted(self, chunk: Chunk) -> Sequence[tuple[int, torch.Tensor]]:
        """The parts, cut so that each lies in one range of the memory where the chunk is kept."""
        if chunk.piece is None:
            return self.parts
        border, found = chunk.nbytes // 2, []
        for at, part in self.parts:
            left = border - at
            if 0 < left < part.numel():
                found += [(at, part[:left]), (border, part[left:])]
            else:
                found.append((at, part))
        return found

    def bytes(self, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the chunk's bytes from `start`; they must lie in one part, as a whole moment does."""
        at, part = self.parts[bisect_right(self._starts, start) - 1]
        return part[start - at : start - at + nbytes]

    def flat(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """`count` elements of `dtype` [count] at the chunk's byte `start`; they must lie in one part."""
        if dtype not in self._typed:
            with trainable():  # they are kept: an evaluation may be the first to need them
                self._typed[dtype] = [part.view(dtype) for _, part in self.parts]
        which = bisect_right(self._starts, start) - 1
        first = (start - self._starts[which]) // dtype.itemsize
        return self._typed[dtype][which][first : first + count]


def segments(chunk: Chunk, least: int) -> list[tuple[int, int]]:
    """(start, bytes) of the parts in which a chunk may be staged: whole moments, together until they reach `least`
    bytes, so that large moments are apart and find room in smaller gaps."""
    starts = sorted({offset for pair in chunk.offsets for offset in pair if offset < chunk.nbytes})
    found: list[tuple[int, int]] = []
    begin = 0
    for stop in [*starts[1:], chunk.nbytes]:
        if stop - begin >= least or stop == chunk.nbytes:
            found.append((begin, stop - begin))
            begin = stop
    return found
