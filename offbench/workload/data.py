"""Seeded fake data, drawn on the device: nothing is copied from the host."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def batch(
    *, seed: int, step: int, rank: int, micro: int, samples: int, seq_len: int, vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, both [samples, seq_len] int64; a label is the token that follows.

    Equal arguments give equal data on one kind of device; any other seed, step, rank or micro batch gives other data.
    """
    name = f"{seed}/{step}/{rank}/{micro}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")
    generator = torch.Generator(device).manual_seed(key)
    drawn = torch.randint(vocab, (samples, seq_len + 1), generator=generator, device=device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
