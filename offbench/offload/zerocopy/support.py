"""May updates run in host memory here? If not, state is staged as under overlap, and one warning says why.

On CUDA the kernel is not torch's, so before it is used for the first time it is compared with torch's, by value, on
this device and with this torch and Triton. On the CPU torch's own AdamW runs, directly on the host's state.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from offbench.offload.chunks import ALIGNMENT
from offbench.offload.hoststore import HostStore
from offbench.offload.schedule import Schedule

_HYPER: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
_FUSED: dict[str, Any] = {"foreach": False, "fused": True, "amsgrad": False, "maximize": False}
_MAPS_HOST_MEMORY = 19
"""CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY."""
_SAME_ADDRESS = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""


def in_host_memory(
    schedule: Schedule, device: torch.device, implementation: str, parameters: Sequence[torch.Tensor]
) -> Schedule:
    """The schedule itself, or, when these parameters cannot be updated so, the one that stages their state."""
    why = _not_in_host_memory(device, implementation, parameters)
    if why is None:
        return schedule
    warnings.warn(f"{schedule.name}: {why}; state is staged on the device as under overlap", UserWarning, stacklevel=4)
    return dataclasses.replace(schedule, update="device")


def is_reachable(store: HostStore) -> bool:
    """Whether kernels reach that memory where it is, through `HostStore.visible`."""
    device = store.device
    return device.type == "cpu" or (
        device.type == "cuda" and torch.version.cuda is not None and maps_host_memory(device)
    )


def _not_in_host_memory(device: torch.device, implementation: str, parameters: Sequence[torch.Tensor]) -> str | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"its kernel is for CUDA, not for {device.type}"
    if implementation != "fused":
        return f"its kernel computes the bits of the fused AdamW, not of {implementation}"
    if other := next((p.dtype for p in parameters if p.dtype is not torch.float32), None):
        return f"its kernel is for float32, not for {other}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        if not maps_host_memory(device):
            return "this GPU cannot reach pinned host memory at the host's own addresses"
        return differs(device)
    except Exception as error:  # whatever keeps the kernel from being compiled or run: no C compiler, no driver for it
        return f"its kernel does not run here ({type(error).__name__}: {str(error).partition(chr(10))[0]})"


def maps_host_memory(device: torch.device) -> bool:
    """Whether kernels of this CUDA device may use the host's addresses of registered memory."""
    driver, handle, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), device.index or 0) != 0:
        return False
    for attribute in (_MAPS_HOST_MEMORY, _SAME_ADDRESS):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle) != 0 or not value.value:
            return False
    return True


@functools.cache
@torch.no_grad()
def differs(device: torch.device) -> str | None:
    """None when the kernel, on pinned memory, leaves the bits of torch's fused AdamW, else what differs. Once a
    process: three steps of two tensors with odd sizes, with and without weight decay, subnormal moments among them."""
    from offbench.offload.zerocopy.kernel import BLOCK, adamw

    sizes = (3 * BLOCK + 5, 77)
    generator = torch.Generator().manual_seed(1)
    torchs = [[torch.randn(n, generator=generator, dtype=torch.float32, device="cpu").to(device) for n in sizes]]
    ours = [[parameter.clone() for parameter in torchs[0]]]
    torchs += [[torch.zeros(n, dtype=torch.float32, device=device) for n in sizes] for _ in range(2)]
    store = HostStore([-(-4 * n // ALIGNMENT) * ALIGNMENT for n in 2 * sizes], pin_for=device)
    places = ((0, 1), (2, 3))
    ours += [[store.visible(i).view(torch.float32)[:n] for i, n in zip(p, sizes, strict=True)] for p in places]
    steps = [[torch.zeros((), dtype=torch.float32, device=device) for _ in sizes] for _ in range(2)]
    for step, weight_decay in enumerate((0.1, 0.0, 0.1)):
        scales = 10.0 ** -torch.arange(max(sizes), dtype=torch.float32, device="cpu").remainder(26)
        scaled = [torch.randn(n, generator=generator, dtype=torch.float32, device="cpu") * scales[:n] for n in sizes]
        grads = [gradient.to(device) for gradient in scaled]
        hyper = _HYPER | {"lr": 1e-2 / (step + 1), "weight_decay": weight_decay}
        torch_adamw(torchs[0], grads, torchs[1], torchs[2], [], steps[0], **_FUSED, **hyper)
        adamw(ours[0], grads, ours[1], ours[2], steps[1], **hyper)
    torch.cuda.current_stream(device).synchronize()
    for name, mine, theirs in zip(("parameters", "exp_avg", "exp_avg_sq"), torchs, ours, strict=True):
        unequal = sum(_unequal(a, b) for a, b in zip(mine, theirs, strict=True))
        if unequal:
            return f"its kernel leaves {unequal} of {sum(sizes)} {name} other than torch's fused AdamW does"
    return None


def _unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many float32 have other bits."""
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())
