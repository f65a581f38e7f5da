"""Activation offload: with full checkpointing, the one tensor each block keeps goes to host memory and back.

The copies run on the compute stream, as upstream's do, so they cost their full time on the link and their order needs
no events: a buffer is read in backward before the next forward can write it. Values come back bit for bit.

Note [Behind bulk copies]
    A copy engine serves one queue at a time. While it has state to move, a block's input waits for all of it, and the
    compute stream with it. A kernel that writes and reads host memory itself shares the link instead.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from offbench.errors import OffbenchError
from offbench.offload.hoststore import HostStore
from offbench.offload.readback import Way


class ActivationOffload:
    """One host buffer per block, all in exactly sized slabs made at once; pinned where the device is a GPU."""

    def __init__(
        self, blocks: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, way: Way = "copy"
    ) -> None:
        """size, dtype: of a block's input; way: `copy` by the copy engines, `kernel` by kernels on the compute
        stream."""
        used = math.prod(size) * dtype.itemsize
        self._store = HostStore([-(-used // 512) * 512] * blocks, pin_for=device)
        self._buffers = [self._store.chunk(block)[:used].view(dtype).view(size) for block in range(blocks)]
        self._held = [False] * blocks
        self._device = device
        words = torch.int32 if used % 4 == 0 else torch.uint8
        seen = [self._store.visible(block)[:used].view(words) for block in range(blocks)] if way == "kernel" else None
        self._seen = seen
        """The same buffers as the device's kernels reach them, as integers: adding nothing to those changes no bit."""
        self.out_bytes = 0
        """Bytes copied to the host so far."""
        self.in_bytes = 0
        """Bytes copied back so far."""
        self.by_kernel = 0
        """Copies either way made by kernels so far."""

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers, as requested."""
        return self._store.requested_bytes

    @property
    def addresses(self) -> list[tuple[int, int]]:
        """(address, bytes) of each slab, as `HostStore.addresses`."""
        return self._store.addresses

    @property
    def locked_bytes(self) -> int:
        """Bytes the driver pinned for them; 0 on the CPU."""
        return self._store.locked_bytes

    def saving(self, block: int) -> AbstractContextManager[None]:
        """While entered, the tensor autograd saves is the input of that block; it is kept in the block's buffer.

        The block must be checkpointed (non-reentrant), so that its input is all that is saved. Raises OffbenchError
        in a forward whose block still waits for the backward of an earlier one.
        """
        return saved_tensors_hooks(partial(self._save, block), self._load)

    def _save(self, block: int, saved: Tensor) -> Tensor | int:
        buffer = self._buffers[block]
        if saved.shape != buffer.shape:  # checkpoint also saves an empty tensor of its own
            return saved
        if self._held[block]:
            raise OffbenchError(
                f"activation offload: block {block} ran forward twice before its backward; "
                "run backward after each forward, or leave --activation-offload out"
            )
        self._held[block] = True
        if self._seen is None:
            buffer.copy_(saved, non_blocking=True)
        else:
            self._by_kernel(saved.contiguous(), self._seen[block], out=True)
        self.out_bytes += saved.nbytes
        return block

    def _load(self, saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._held[saved] = False
        self.in_bytes += self._buffers[saved].nbytes
        buffer = self._buffers[saved]
        if self._seen is None:
            return buffer.to(self._device, non_blocking=True, copy=True)
        loaded = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
        self._by_kernel(loaded, self._seen[saved], out=False)
        return loaded

    @torch.no_grad()
    def _by_kernel(self, tensor: Tensor, seen: Tensor, out: bool) -> None:
        """`copy_` between two tensors of one device may use a copy engine; an elementwise kernel never does."""
        words = tensor.view(-1).view(seen.dtype)
        source, target = (words, seen) if out else (seen, words)
        torch.bitwise_or(source, 0, out=target)
        self.by_kernel += 1
