"""Which state stays on the device, and how it gets there and back between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbench.offload.chunks import Chunk, ends
from offbench.offload.hoststore import HostStore


def leading(chunks: Sequence[Chunk], nbytes: int | None) -> set[int]:
    """Indices of the leading chunks that fit whole into so many bytes (None: of all), and of those that are empty.
    A parameter's pieces fit together or not at all.

    The leading ones are needed first in the forward, when a moving one could hide behind nothing.
    """
    most = sum(chunk.nbytes for chunk in chunks) if nbytes is None else nbytes
    return {chunk.index for chunk, end in zip(chunks, ends(chunks), strict=True) if end <= most or not chunk.nbytes}


def relocate(
    chunks: Sequence[Chunk], keep: set[int], resident: dict[int, torch.Tensor], store: HostStore, device: torch.device
) -> list[int]:
    """Make the chunks of `keep`, and no others, resident on `device`; returns the indices of those that moved.

    resident: their state, by chunk; changed in place. Nothing may be in flight; the host waits for the copies. Whoever
    still holds tensors of a chunk that moved holds its old memory. Memory that cannot be had, here or there, raises
    before anything has changed.
    """
    out = [chunk for chunk in chunks if chunk.index in resident and chunk.index not in keep]
    into = [chunk for chunk in chunks if chunk.index in keep and chunk.index not in resident]
    lacking = [chunk for chunk in out if store.chunk(chunk.index).numel() < chunk.home_bytes]
    store.provide({chunk.index: chunk.home_bytes for chunk in lacking})
    made = {chunk.index: torch.empty(chunk.home_bytes, dtype=torch.uint8, device=device) for chunk in into}
    for index, state in made.items():
        state.copy_(store.chunk(index))
    resident.update(made)
    for chunk in out:
        store.chunk(chunk.index).copy_(resident.pop(chunk.index))
    return [chunk.index for chunk in (*out, *into)]
