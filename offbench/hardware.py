"""What this host has: GPUs as CUDA will see them, memory within cgroup limits, CPUs. No torch, no CUDA context.

GPUs come from NVML, filtered by CUDA_VISIBLE_DEVICES. Ordinals in that variable are taken in PCI order, which is
what CUDA does under CUDA_DEVICE_ORDER=PCI_BUS_ID; the launcher sets it.
"""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbench.units import gib

UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number for `no limit`; nothing real reaches this many bytes."""


@dataclass(frozen=True)
class Gpu:
    """One device that CUDA will list."""

    name: str
    uuid: str
    bus_id: str
    """Lower-case `dddd:bb:dd.f`."""
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Hardware:
    """The host as a launch finds it."""

    gpus: tuple[Gpu, ...]
    no_gpu_why: str | None
    """Why there is no GPU; None when there is one."""
    cpu_model: str | None
    cpus: int
    """CPUs this process may run on."""
    numa_nodes: int
    host_bytes: int
    """Memory of the host, or the cgroup's limit where that is smaller."""
    host_available_bytes: int
    memlock_bytes: int | None
    """What this process may lock (`memlock_limit`); None: as much as it wants."""

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the smallest visible GPU."""
        return min((gpu.memory_bytes for gpu in self.gpus), default=None)


def detect(env: Mapping[str, str] = os.environ, root: Path = Path("/"), nvml: Any = None) -> Hardware:
    """Look at this host. `root` holds proc/ and sys/; `nvml` is a module like pynvml (default: pynvml itself)."""
    gpus, why = visible_gpus(env, nvml)
    total, available = host_memory(root)
    return Hardware(
        gpus=gpus,
        no_gpu_why=why,
        cpu_model=cpu_model(root),
        cpus=len(os.sched_getaffinity(0)),
        numa_nodes=numa_nodes(root),
        host_bytes=total,
        host_available_bytes=available,
        memlock_bytes=memlock_limit(root),
    )


def load_nvml() -> Any:
    """The NVML bindings; imported late because most commands need no GPU."""
    return importlib.import_module("pynvml")


def visible_gpus(env: Mapping[str, str], nvml: Any = None) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs CUDA will list, in its order, and why there are none."""
    nvml = nvml or load_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"NVML says: {error}"
    try:
        count = nvml.nvmlDeviceGetCount()
        every = [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        chosen = filter_visible(every, env.get("CUDA_VISIBLE_DEVICES"), lambda uuid: _by_uuid(nvml, uuid))
    finally:
        nvml.nvmlShutdown()
    if chosen:
        return tuple(chosen), None
    hidden = f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES')!r} hides all {len(every)}"
    return (), hidden if every else "NVML lists no GPU"


def filter_visible(gpus: list[Gpu], text: str | None, by_uuid: Callable[[str], Gpu | None]) -> list[Gpu]:
    """Apply CUDA_VISIBLE_DEVICES: ordinals, GPU- or MIG- UUIDs (also abbreviated); like CUDA, stop at the first
    entry that names no device or one already named. MIG instances are not in `gpus`, so `by_uuid` finds them."""
    if text is None:
        return gpus
    chosen: list[Gpu] = []
    for item in (part.strip() for part in text.split(",")):
        found: Gpu | None = None
        if item.isdigit():
            found = gpus[int(item)] if int(item) < len(gpus) else None
        elif item.startswith("GPU-"):
            matches = [gpu for gpu in gpus if gpu.uuid.startswith(item)]
            found = matches[0] if len(matches) == 1 else None
        elif item.startswith("MIG-"):
            found = by_uuid(item)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def _by_uuid(nvml: Any, uuid: str) -> Gpu | None:
    try:
        return _gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError:
        return None


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        name=text(nvml.nvmlDeviceGetName(handle)),
        uuid=text(nvml.nvmlDeviceGetUUID(handle)),
        bus_id=normal_bus_id(text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def text(value: str | bytes) -> str:
    """NVML strings are bytes in some versions of the bindings."""
    return value.decode() if isinstance(value, bytes) else value


def normal_bus_id(bus_id: str) -> str:
    """`00000000:1A:00.0` (NVML), `0000:1a:00` (CUDA) -> `0000:1a:00.0`."""
    domain, bus, rest = bus_id.lower().split(":")
    device, _, function = rest.partition(".")
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or '0'}"


def host_memory(root: Path) -> tuple[int, int]:
    """(total, available) bytes: /proc/meminfo, lowered by every cgroup limit above this process.

    A guest whose limit lies above what its kernel shows gets memory plugged in as it is used (seen on Firecracker: 31
    GiB at boot, 255 once they were touched); there the limit is what counts.
    """
    info: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        info[name] = int(rest.split()[0]) << 10
    total, available = info["MemTotal"], info["MemAvailable"]
    limits = cgroup_memory(root)
    if limits and is_guest(root) and (smallest := min(limits))[0] > total:
        total, available = smallest[0], smallest[0] - smallest[1]
    for limit, used in limits:
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of each limited memory cgroup from this process's own up to the top; page cache that
    can be dropped counts as unused."""
    found = []
    for folder, names in _memory_cgroups(root):
        limit, used, stat, reclaimable = (folder / names[0], folder / names[1], folder / "memory.stat", names[2])
        if not (limit.exists() and used.exists()):
            continue
        bound = limit.read_text().strip()
        if bound == "max" or int(bound) >= UNLIMITED:
            continue
        cache = 0
        if stat.exists():
            cache = next((int(v) for k, v in map(str.split, stat.read_text().splitlines()) if k == reclaimable), 0)
        found.append((int(bound), max(0, int(used.read_text()) - cache)))
    return found


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def _memory_cgroups(root: Path) -> Iterable[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's memory cgroups. Inside a container the path in /proc/self/cgroup may name folders
    that are not mounted; those are skipped by the caller and the mount's own top is read instead."""
    entry = root / "proc/self/cgroup"
    for line in entry.read_text().splitlines() if entry.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", V2
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", V1
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), names


def is_guest(root: Path) -> bool:
    """Whether the kernel says that it runs under a hypervisor."""
    lines = (root / "proc/cpuinfo").read_text().splitlines()
    return any("hypervisor" in line.split() for line in lines if line.startswith("flags"))


CAP_IPC_LOCK = 14
"""Bit of the capability to lock memory beyond RLIMIT_MEMLOCK (capabilities(7)): root's, but not in every container."""


def memlock_limit(root: Path = Path("/")) -> int | None:
    """Bytes of RLIMIT_MEMLOCK; None where it is unlimited or does not bind this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = root / "proc/self/status"
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, value = line.partition(":")
        if name == "CapEff" and int(value, 16) >> CAP_IPC_LOCK & 1:
            return None
    return None if soft == resource.RLIM_INFINITY else soft


def memlock_caution(nbytes: int, limit: int | None) -> str | None:
    """What to say before so many bytes are pinned under that limit. Drivers usually pin memory without charging it, so
    a low one is said, not refused."""
    if limit is None or nbytes <= limit:
        return None
    return (
        f"pins {gib(nbytes)} GiB a rank while RLIMIT_MEMLOCK is {gib(limit)} GiB; "
        "if pinning fails, raise it (ulimit -l unlimited)"
    )


def cpu_model(root: Path = Path("/")) -> str | None:
    """The processor's name, or None where /proc/cpuinfo has none."""
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "cpu", "Processor"}:
            return value.strip()
    return None


def numa_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes that have CPUs; 1 where the kernel does not say."""
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(1 for path in lists if path.read_text().strip()))
