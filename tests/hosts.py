"""Made-up hosts, and a made-up NVML, for tests that must not look at the machine they run on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from offbench.config import GIB
from offbench.hardware import Gpu, Hardware


def host(gpus: int = 0, gpu_gib: int = 140, host_gib: int = 128, name: str = "NVIDIA H200") -> Hardware:
    """A host with that many equal GPUs, most of its memory free."""
    cards = tuple(
        Gpu(name, f"GPU-{i:08x}", f"0000:{i + 1:02x}:00.0", gpu_gib * GIB, gpu_gib * GIB) for i in range(gpus)
    )
    return Hardware(
        gpus=cards,
        no_gpu_why=None if gpus else "NVML lists no GPU",
        cpu_model="Test CPU",
        cpus=16,
        numa_nodes=1,
        host_bytes=host_gib * GIB,
        host_available_bytes=int(0.95 * host_gib * GIB),
        memlock_bytes=None,
    )


class NVMLError(Exception):
    """Stands for pynvml's error."""


class FakeNvml:
    """The part of pynvml that offbench asks, over made-up devices; what is not set is not supported."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, names: tuple[str, ...] = (), mig: dict[str, str] | None = None, broken: str | None = None):
        self.names, self.mig, self.broken = names, mig or {}, broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError(self.broken)

    def nvmlShutdown(self) -> None:
        """Nothing to close."""

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        if uuid not in self.mig:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> Any:
        return int(bus_id.split(b":")[1], 16) - 1

    def nvmlDeviceGetName(self, handle: Any) -> bytes | str:
        return self.mig[handle] if isinstance(handle, str) else self.names[handle].encode()

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return handle if isinstance(handle, str) else f"GPU-{handle}abc"

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        index = 0 if isinstance(handle, str) else handle
        return SimpleNamespace(busId=f"00000000:{index + 1:02X}:00.0".encode())

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=140 * GIB, free=139 * GIB)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 123_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        raise NVMLError("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return 0x4 | 0x40
