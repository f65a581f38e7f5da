"""One interface over the accelerator and the CPU: stamps on the compute stream, memory figures, identity.

A stamp marks a point in the compute stream's work. Nothing here waits for the whole device except
`Device.synchronize`, which belongs outside the measured window: a device-wide wait at a step boundary would
serialise exactly the arms whose copies run beside the next step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbench.errors import UsageError
from offbench.offload import meanwhile
from offbench.offload.readback import Mailbox, Way


@dataclass(frozen=True)
class Stamp:
    """A point in the compute stream's work; on the CPU, where work is done when a call returns, a point in time."""

    event: Any
    """The device's timing event; None on the CPU."""
    host_s: float
    """Host clock (time.perf_counter) when the stamp was queued, seconds."""

    def wait(self) -> None:
        """Let the host wait until the compute stream has reached this stamp; other streams go on."""
        if self.event is not None:
            self.event.synchronize()


class Device(ABC):
    """The device a rank computes on. Memory figures are bytes of this process; None where there is no such count."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @staticmethod
    def of(torch_device: torch.device) -> Device:
        """The implementation for `torch_device` (`cpu`, or `cuda` with or without an index).

        Raises UsageError for any other device type.
        """
        if torch_device.type == "cpu":
            return CpuDevice(torch_device)
        if torch_device.type == "cuda":
            return CudaDevice(torch_device)
        raise UsageError(f"device {torch_device} is not supported; use cuda or cpu")

    @abstractmethod
    def stamp(self) -> Stamp:
        """Mark the work queued so far on the current stream; does not wait."""

    @abstractmethod
    def seconds(self, earlier: Stamp, later: Stamp) -> float:
        """Seconds between two stamps of the same stream; the host waits until both have happened."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for every stream of the device. Never inside the measured window."""

    @abstractmethod
    def host_buffer(self, count: int) -> Tensor:
        """A float32 host tensor [count] to which the device copies without waiting (pinned where that exists)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The device's own name, `cpu` on the CPU."""

    @property
    @abstractmethod
    def pci_bus_id(self) -> str | None:
        """Lower-case `dddd:bb:dd.f`, as sysfs names it."""

    @abstractmethod
    def allocated(self) -> int | None:
        """Bytes of live tensors."""

    @abstractmethod
    def reserved(self) -> int | None:
        """Bytes the caching allocator holds."""

    @abstractmethod
    def peak_allocated(self) -> int | None:
        """Largest `allocated` since the last reset."""

    @abstractmethod
    def peak_reserved(self) -> int | None:
        """Largest `reserved` since the last reset."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Let both peaks start again from what is held now."""

    @abstractmethod
    def alloc_retries(self) -> int | None:
        """Times so far that the caching allocator had no memory left, gave back what it kept, for which it waits for
        the device, and tried again."""

    @abstractmethod
    def used(self) -> int | None:
        """Bytes in use by the device's own count, all processes together."""

    @abstractmethod
    def limit(self) -> int | None:
        """Most bytes that the caching allocator can hold now: what everything else on the device leaves of it, or, if
        that is less, the share set by `set_per_process_memory_fraction`."""

    @abstractmethod
    def trim(self) -> None:
        """Let the caching allocator give back what no tensor uses."""


class CudaDevice(Device):
    """A CUDA GPU, reached through torch's device module. Constructing it without an index initialises CUDA."""

    def __init__(self, torch_device: torch.device) -> None:
        self._module = torch.get_device_module(torch_device)
        if torch_device == torch.device("cuda"):
            torch_device = torch.device("cuda", self._module.current_device())
        super().__init__(torch_device)

    def stamp(self) -> Stamp:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self.torch_device))
        return Stamp(event, time.perf_counter())

    def seconds(self, earlier: Stamp, later: Stamp) -> float:
        first, second = earlier.event, later.event
        assert first is not None, "a stamp of the CPU"
        first.synchronize()
        later.wait()
        return float(first.elapsed_time(second)) / 1e3  # elapsed_time gives milliseconds

    def synchronize(self) -> None:
        self._module.synchronize(self.torch_device)

    def host_buffer(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float32, pin_memory=True)

    @property
    def name(self) -> str:
        return str(self._module.get_device_name(self.torch_device))

    @property
    def pci_bus_id(self) -> str | None:
        at = self._module.get_device_properties(self.torch_device)
        # CUDA does not name the function; a GPU is function 0 of its slot.
        return f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"

    def allocated(self) -> int | None:
        return int(self._module.memory_allocated(self.torch_device))

    def reserved(self) -> int | None:
        return int(self._module.memory_reserved(self.torch_device))

    def peak_allocated(self) -> int | None:
        return int(self._module.max_memory_allocated(self.torch_device))

    def peak_reserved(self) -> int | None:
        return int(self._module.max_memory_reserved(self.torch_device))

    def reset_peaks(self) -> None:
        self._module.reset_peak_memory_stats(self.torch_device)

    def alloc_retries(self) -> int | None:
        return int(self._module.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def used(self) -> int | None:
        free, total = self._module.mem_get_info(self.torch_device)
        return int(total - free)

    def limit(self) -> int | None:
        free, total = self._module.mem_get_info(self.torch_device)
        share = self._module.get_per_process_memory_fraction(self.torch_device)
        return min(int(free + self._module.memory_reserved(self.torch_device)), int(share * total))

    def trim(self) -> None:
        self._module.empty_cache()


class CpuDevice(Device):
    """The CPU: work is done when a call returns, and nothing counts its tensors."""

    def stamp(self) -> Stamp:
        return Stamp(None, time.perf_counter())

    def seconds(self, earlier: Stamp, later: Stamp) -> float:
        return later.host_s - earlier.host_s

    def synchronize(self) -> None:
        """Nothing is ever in flight."""

    def host_buffer(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float32)

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def pci_bus_id(self) -> str | None:
        return None

    def allocated(self) -> int | None:
        return None

    def reserved(self) -> int | None:
        return None

    def peak_allocated(self) -> int | None:
        return None

    def peak_reserved(self) -> int | None:
        return None

    def reset_peaks(self) -> None:
        """There is no count to reset."""

    def alloc_retries(self) -> int | None:
        return None

    def used(self) -> int | None:
        return None

    def limit(self) -> int | None:
        return None

    def trim(self) -> None:
        """There is no cache."""


class ScalarReader:
    """Reads a few device scalars per step as a trainer that logs its loss does, at the price of one small copy, or of
    one kernel (`offbench.offload.readback`).

    `send` queues the copy on the compute stream, `read` waits for the stamp behind it. `Tensor.item()` would queue
    the same copy, once per scalar, and block where it is called.
    """

    def __init__(self, device: Device, most: int, way: Way = "copy") -> None:
        self._device = device
        self._mailbox = Mailbox(device.host_buffer(most), device.torch_device, way)
        self._sent: tuple[int, Stamp] | None = None

    def send(self, values: Sequence[Tensor]) -> None:
        """Queue the copy of at most `most` one-element tensors of this device, each read as float32."""
        packed = torch.cat([value.detach().reshape(1).float() for value in values])
        self._mailbox.send(packed)
        self._sent = (len(values), self._device.stamp())

    def read(self) -> list[float]:
        """The values last sent, in their order, once; waits for that copy only, as `meanwhile.wait`."""
        assert self._sent is not None, "nothing was sent since the last read"
        (count, stamp), self._sent = self._sent, None
        if stamp.event is not None:
            meanwhile.wait(stamp.event)
        return [float(value) for value in self._mailbox.buffer[:count].tolist()]


# Dense bf16 tensor-core FLOP/s from the vendor's datasheets (those that print a figure "with sparsity" halved).
# A row applies when the device's name contains all of its words; the first that applies counts.
_PEAK_BF16: tuple[tuple[tuple[str, ...], float], ...] = (
    (("H100", "PCIe"), 756e12),  # NVIDIA H100 datasheet, PCIe column: 1,513 with sparsity
    (("H100", "NVL"), 835e12),  # NVIDIA H100 NVL datasheet: 1,671 with sparsity
    (("H100", "HBM3"), 989e12),  # NVIDIA H100 datasheet, SXM column: 1,979 with sparsity
    (("H200", "NVL"), 835e12),  # NVIDIA H200 datasheet, NVL column: 1,671 with sparsity
    (("H200",), 989e12),  # NVIDIA H200 datasheet, SXM column: 1,979 with sparsity
    (("GH200",), 989e12),  # NVIDIA GH200 datasheet: 1,979 with sparsity
    (("B200",), 2250e12),  # NVIDIA HGX B200: 36 PFLOP/s with sparsity for eight
    (("A100",), 312e12),  # NVIDIA A100 datasheet, PCIe and SXM alike
)


def peak_bf16_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s that the maker states for a device of this name; None when it is not in the table.

    A part of a GPU (its name says MIG) has no figure of its own.
    """
    words = set(name.replace("-", " ").split())
    if "MIG" in words:
        return None
    return next((peak for needed, peak in _PEAK_BF16 if words.issuperset(needed)), None)
