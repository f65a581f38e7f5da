"""torch's fused AdamW as a Triton kernel of few programs, for moments in pinned host memory.

Loads and stores of the moments cross the link: the kernel is the copy, both ways at once, and no copy engine takes
part. A few programs are enough to fill the link, and leave the other multiprocessors to the model.

Note [The same bits as torch's kernel]
    torch computes fp32 AdamW in fp32 (`adam_math` in ATen/native/cuda/fused_adam_utils.cuh), every operation rounded
    to nearest, subnormals kept. Its compiler fuses a product with the addition behind it where the source allows; the
    machine code that torch 2.11 and 2.15 ship for sm_90 has the same operations in both:
        decay  = lr * weight_decay                      if weight_decay is not 0:
        p      = fma(-decay, p, p)
        m      = fma(beta1, m, fma(-beta1, g, g))
        v      = fma(beta2, v, fma(-beta2, g * g, g * g))
        p      = p - (lr / (1 - beta1^t) * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    lr, betas, eps and weight_decay arrive as doubles and are rounded to fp32 first. Here each of these is written as
    one correctly rounded operation and the compiler may fuse nothing. The powers are the device's own approximation:
    they are asked of torch.pow, which compiles to the same instructions as in its AdamW.
    Not yet shown on CUDA: `support.differs` compares both before the first use, tests do so at length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbench.offload.zerocopy import PROGRAMS

BLOCK = 4096
"""Elements that a program works on at a time."""
WARPS, STAGES = 8, 3
"""Threads / 32 of a program; blocks it has in flight, so that the link's latency is hidden."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _block(  # type: ignore[no-untyped-def]
    weights,
    grads,
    exp_avgs,
    exp_avg_sqs,
    at,
    count,
    decay,
    beta1,
    beta2,
    step_size,
    correction,
    eps,
    DECAY: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = at + tl.arange(0, BLOCK)
    mask = None if WHOLE else offsets < count  # without a mask the accesses are 16 bytes wide
    m = tl.load(exp_avgs + offsets, mask=mask)
    v = tl.load(exp_avg_sqs + offsets, mask=mask)
    g = tl.load(grads + offsets, mask=mask)
    p = tl.load(weights + offsets, mask=mask)
    if DECAY:
        p = tl.fma(decay * -1.0, p, p)  # a negation may be compiled to 0 - x, which loses the sign of zero
    m = tl.fma(beta1, m, tl.fma(beta1 * -1.0, g, g))
    square = g * g
    v = tl.fma(beta2, v, tl.fma(beta2 * -1.0, square, square))
    p = p - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    tl.store(exp_avgs + offsets, m, mask=mask)
    tl.store(exp_avg_sqs + offsets, v, mask=mask)
    tl.store(weights + offsets, p, mask=mask)


@triton.jit(do_not_specialize=["which", "count"])  # type: ignore[untyped-decorator, unused-ignore]
def update(  # type: ignore[no-untyped-def]
    weights,
    grads,
    exp_avgs,
    exp_avg_sqs,
    powers1,
    powers2,
    which,
    count,
    lr,
    decay,
    beta1,
    beta2,
    eps,
    DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One step over `count` elements, all tensors fp32. powers1[which] is beta1^t, powers2[which] beta2^t; DECAY says
    whether there is any weight decay, `decay` is lr * weight_decay."""
    correction = tl.sqrt_rn(1.0 - tl.load(powers2 + which))
    step_size = tl.div_rn(lr, 1.0 - tl.load(powers1 + which))
    mine = tl.program_id(0).to(tl.int64)
    blocks = count // BLOCK
    for block in tl.range(mine, blocks, tl.num_programs(0), num_stages=STAGES):
        _block(
            weights, grads, exp_avgs, exp_avg_sqs, block * BLOCK, count,
            decay, beta1, beta2, step_size, correction, eps, DECAY, True, BLOCK,
        )  # fmt: skip
    if (mine == blocks % tl.num_programs(0)) & (blocks * BLOCK < count):
        _block(
            weights, grads, exp_avgs, exp_avg_sqs, blocks.to(tl.int64) * BLOCK, count,
            decay, beta1, beta2, step_size, correction, eps, DECAY, False, BLOCK,
        )  # fmt: skip


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    programs: int = PROGRAMS,
) -> None:
    """Queue one AdamW step on the current stream; counts `steps` up first, as torch's does.

    All tensors are fp32, contiguous and visible to the device, those of one parameter of equal size; steps: 0-dim, on
    the device. The moments may be pinned host memory (`HostStore.visible`).
    """
    torch._foreach_add_(list(steps), 1)
    counts = torch.stack(list(steps))
    powers1, powers2 = (torch.pow(torch.full_like(counts, beta), counts) for beta in (beta1, beta2))
    decay = _rounded(_rounded(lr) * _rounded(weight_decay))  # a product of two fp32 is exact in double
    options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
    for which, tensors in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        assert all(tensor.is_contiguous() and tensor.dtype is torch.float32 for tensor in tensors)
        count = tensors[0].numel()
        if not count:  # a shard of a parameter with fewer rows than ranks
            continue
        update[(min(programs, -(-count // BLOCK)),)](
            *tensors, powers1, powers2, which, count, lr, decay, beta1, beta2, eps,
            DECAY=_rounded(weight_decay) != 0, BLOCK=BLOCK, STAGES=STAGES, **options,
        )  # fmt: skip


def _rounded(value: float) -> float:
    """The nearest fp32."""
    return ctypes.c_float(value).value
