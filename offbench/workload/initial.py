"""Initial weights that depend on nothing but seed, parameter name and position: the same for any sharding.

Each element is drawn by hashing its position in the full parameter, so a rank fills its own shard directly, without
the full tensor and without talking to others. Normal(0, 0.02) as Qwen3 does; norms start at one.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STD = 0.02
_BLOCK = 1 << 24
"""Elements drawn at once: bounds the temporaries to a few 128 MiB tensors."""


@torch.no_grad()
def initialise(model: nn.Module, seed: int, expert_rank: int = 0) -> None:
    """Fill every parameter of a `Qwen3Moe`, sharded by FSDP or not, in place.

    expert_rank: which part of the experts this rank holds under expert parallelism.
    """
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() == 1:
            local.fill_(1.0)
            continue
        row = first_local_row(parameter) + (expert_rank * parameter.shape[0] if ".experts." in name else 0)
        fill_normal(local, _key(seed, name), row * math.prod(parameter.shape[1:]))


def first_local_row(parameter: Tensor) -> int:
    """First row of dim 0 this rank holds of an FSDP parameter; 0 of a plain one."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    per_rank = -(-parameter.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * per_rank, parameter.shape[0])


def fill_normal(out: Tensor, key: int, start: int) -> None:
    """Fill contiguous `out` with elements [start, start + numel) of the normal sequence named by `key`.

    Box-Muller on two 32-bit halves of a hash, in fp64: rounding to fp32 then hides the last-bit differences between
    the vector and scalar code of log and cos, so values do not depend on where a shard begins.
    """
    flat = out.view(-1)
    for first in range(0, flat.numel(), _BLOCK):
        last = min(first + _BLOCK, flat.numel())
        bits = _mix(torch.arange(start + first, start + last, device=out.device) * _GOLDEN + key)
        low, high = (bits & _LOW32).double(), ((bits >> 32) & _LOW32).double()
        radius = low.add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        flat[first:last] = radius.mul_(high.mul_(2 * math.pi * 2.0**-32).cos_()).mul_(STD)


_LOW32 = (1 << 32) - 1


def _signed(value: int) -> int:
    """The 64-bit pattern as the signed integer torch takes."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little", signed=True)
