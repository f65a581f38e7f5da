"""Small values for the host without the copy engine.

A device-to-host copy of 128 bytes waits behind whatever bulk write-back that engine is serving, and the host with it:
once a layer for the expert counts of expert parallelism, once a step for loss and norm. Pinned host memory is in the
device's address space too, so a kernel can write the values there itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Way = Literal["copy", "kernel"]


class Mailbox:
    """A small pinned buffer that the device writes and the host reads.

    buffer: pinned host tensor (pageable on a CPU device, where both ways are plain copies). way: `copy` uses the copy
    engine, `kernel` an elementwise kernel on the current stream. Values are the same bits either way.
    """

    around: ClassVar[Callable[[bool, int], AbstractContextManager[None]]] = staticmethod(
        lambda by_kernel, nbytes: nullcontext()
    )
    """What every send of the process runs inside, made of (by a kernel?, bytes); see `offbench.small_watch`."""

    def __init__(self, buffer: Tensor, device: torch.device, way: Way) -> None:
        self.buffer = buffer
        self.kernel_writes = 0
        """Values sent by kernels so far, in calls."""
        self._seen = device_view(buffer, device) if way == "kernel" and device.type == "cuda" else None

    @torch.no_grad()
    def send(self, values: Tensor) -> None:
        """Queue buffer[: values.numel()] <- values (same dtype) on the current stream; waits for nothing."""
        with Mailbox.around(self._seen is not None, values.nbytes):
            self._write(values)

    def _write(self, values: Tensor) -> None:
        count = values.numel()
        if self._seen is None:
            self.buffer.view(-1)[:count].copy_(values.reshape(-1), non_blocking=True)
            return
        # `copy_` between two tensors of one device may use the copy engine: adding zero is always a kernel.
        torch.add(values.reshape(-1), 0, out=self._seen.view(-1)[:count])
        self.kernel_writes += 1


def device_view(pinned: Tensor, device: torch.device) -> Tensor:
    """The same memory as a tensor of the device, which must not outlive it."""

    class Interface:
        __cuda_array_interface__: dict[str, Any] = {  # noqa: RUF012
            "shape": tuple(pinned.shape),
            "typestr": {torch.float32: "<f4", torch.int64: "<i8", torch.int32: "<i4", torch.uint8: "|u1"}[
                pinned.dtype
            ],
            "data": (pinned.data_ptr(), False),
            "strides": None,
            "version": 3,
        }

    return torch.as_tensor(Interface(), device=device)
