"""Sparse weight deltas: positions and values of the bf16 elements that changed, as bytes that any backend can send.

A payload is a block of int32 positions [n] followed by a block of bf16 values [n]: 6 bytes an element, against 2 of a
whole tensor, so a delta is the smaller one as long as less than a third of the elements changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENT_BYTES = 6
"""One changed element: an int32 position and a bf16 value."""
WHOLE_BYTES = 2
"""One element of a whole bf16 tensor."""


def changed(current: Tensor, last: Tensor) -> Tensor:
    """int32 positions [n] at which two bf16 tensors [elements] differ by their bits: NaN equals itself, 0 is not -0.

    The tensors have fewer than 2^31 elements.
    """
    return bits(current).ne(bits(last)).nonzero().squeeze(1).int()


def pack(values: Tensor, positions: Tensor, room: int) -> Tensor:
    """Payload, uint8 [6 x room], of the elements of bf16 `values` [elements] at int32 `positions` [n <= room], both
    blocks filled up with zeros."""
    payload = torch.zeros(ELEMENT_BYTES * room, dtype=torch.uint8, device=values.device)
    where, what = _blocks(payload)
    where[: len(positions)] = positions
    what[: len(positions)] = values[positions.long()]
    return payload


def unpack(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """int64 positions [count] and bf16 values [count] of a payload."""
    where, what = _blocks(payload)
    return where[:count].long(), what[:count]


def apply(target: Tensor, positions: Tensor, values: Tensor) -> None:
    """Set the elements of bf16 `target` [elements]. Positions behind its end are left out: in a rehearsal the other
    ranks repeat this rank's positions, and their shards may be shorter."""
    inside = positions < target.numel()
    target[positions[inside]] = values[inside]


def bits(tensor: Tensor) -> Tensor:
    """The same bf16 memory as integers, which compare bit for bit."""
    return tensor.view(torch.int16)


def _blocks(payload: Tensor) -> tuple[Tensor, Tensor]:
    room = payload.numel() // ELEMENT_BYTES
    return payload[: 4 * room].view(torch.int32), payload[4 * room :].view(torch.bfloat16)
