"""Parameters and where their moments sit in a chunk's bytes; local shards of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from offbench.errors import OffbenchError
from offbench.offload.staged import Staged


@dataclass(frozen=True)
class Member:
    """One parameter of a chunk."""

    parameter: nn.Parameter
    group: int
    """Index of its param group."""
    step: torch.Tensor
    """0-dim step counter the kernel reads; on the parameter's device for `fused`, else on the CPU."""
    moments: tuple[int, int]
    """Byte offsets of exp_avg and exp_avg_sq in the chunk."""

    @property
    def local(self) -> torch.Tensor:
        """The local shard, updated in place; asked for each time, since FSDP2 may re-lay it at the first forward."""
        return local_of(self.parameter)

    def views(self, chunk: Staged) -> tuple[torch.Tensor, torch.Tensor]:
        """exp_avg and exp_avg_sq, shaped as the local shard, out of a chunk's bytes. They lie in memory as it does and
        as torch's do: the fused kernels walk through memory, whatever the strides."""
        local = self.local
        strides = torch.empty_like(local, device="meta").stride()
        first, second = self.flat(chunk, local)
        return first.as_strided(local.shape, strides), second.as_strided(local.shape, strides)

    def flat(self, chunk: Staged, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """exp_avg and exp_avg_sq of this local shard, one-dimensional."""
        first, second = self.moments
        return chunk.flat(first, local.dtype, local.numel()), chunk.flat(second, local.dtype, local.numel())


def local_of(tensor: Any) -> torch.Tensor:
    """The local shard of a DTensor, sharing its memory; a plain tensor itself. Raises OffbenchError for a subclass of
    tensor that does not keep its values in one tensor like itself."""
    found = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    assert isinstance(found, torch.Tensor)
    return found if type(found) is torch.Tensor else _inside(found)


def _inside(wrapper: Any) -> torch.Tensor:
    """What a wrapper keeps its values in: weights that are gathered in another format (float8) are wrappers around the
    tensor that is trained, and have no memory of their own. What a collective still writes is waited for."""
    if isinstance(wrapper, AsyncCollectiveTensor):
        return wrapper.wait()
    if not hasattr(wrapper, "__tensor_flatten__"):
        return wrapper  # type: ignore[no-any-return]
    inner: list[torch.Tensor] = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
    if len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (wrapper.shape, wrapper.dtype):
        raise OffbenchError(
            f"a parameter is a {type(wrapper).__name__}, whose values are not in one tensor of its shape and dtype: "
            "there is nothing AdamW could update in place; give such parameters to another optimizer"
        )
    return inner[0]


def gradient_of(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The local shard of a parameter's gradient, placed as the parameter is.

    FSDP2 reduces gradients to that. Tensor parallelism alone does not: that of a replicated weight under sequence
    parallelism is a sum still to be made over the ranks (`Partial`). torch's optimizers make it inside their kernels'
    DTensor operations; here it is a collective of its own, in the same order on all ranks.
    """
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor) or gradient._spec is parameter._spec:
        return local_of(gradient)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)


def laid_out(local: torch.Tensor) -> tuple[object, ...]:
    """What a parameter's moments are laid out for: shape, dtype, device and, if it is not contiguous, strides."""
    strides = () if local.is_contiguous() else local.stride()
    return local.shape, local.dtype, local.device, strides


def apart(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage is just that memory.

    Saving a view writes the whole storage behind it, and torch.distributed.checkpoint's stager for asynchronous saves
    fails on storages that several tensors share. Raises nothing; the memory lives as long as either tensor.
    """
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.numel() * view.element_size()]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


def placed_like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """`local` as a DTensor placed as the parameter is; it stays where it is, which `from_local` would not grant.

    Without this a checkpoint would take each rank's shard for the whole tensor.
    """
    if isinstance(parameter, DTensor):
        return DTensor(local, parameter._spec, requires_grad=False)
    return local


def moments_in(home: torch.Tensor, members: Sequence[Member]) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
    """exp_avg and exp_avg_sq of a chunk's members, as `optimizer.state` has them, in its bytes `home` (uint8)."""
    chunk = Staged.whole(home)
    found = {}
    for member in members:
        first, second = (placed_like(member.parameter, apart(moment)) for moment in member.views(chunk))
        found[member.parameter] = {"exp_avg": first, "exp_avg_sq": second}
    return found


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that nobody else holds and that is no view."""
    if type(tensor) is torch.Tensor:
        return tensor.detach()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
