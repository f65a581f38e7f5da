"""Global gradient norm and clipping over parameters that live on several device meshes, without a host sync."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """L2 norm of all gradients of all ranks, and the factor they were scaled by, both fp32 scalars on the device.

    Every gradient element must be held by exactly one rank of `group`: true for FSDP over all ranks, and for experts
    split by expert parallelism and then by FSDP. So the squares of all local gradients, whatever their mesh, add up
    over one group in one all-reduce. torch's `clip_grad_norm_` refuses parameters on two meshes.

    The factor is min(1, max_norm / (norm + 1e-6)), as torch's; local gradients are scaled in place by it.
    max_norm None: the factor is 1 and gradients are left as they are. Parameters without gradient are left out.
    """
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads).float().square()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if max_norm is None:
        return norm, torch.ones_like(norm)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)
    return norm, factor


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
