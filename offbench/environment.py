"""What a record needs to be read later: versions, commit, GPU condition, limits and variables. No torch import.

Whatever cannot be asked here is null. Keys are flat enough to be table columns; sizes are bytes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import runpy
import subprocess
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from offbench import __version__
from offbench.config import RunSpec
from offbench.hardware import cgroup_memory, cpu_model, host_memory, load_nvml, numa_nodes, text

PREFIXES = (
    "CUDA_",
    "FSDP_",
    "GLOO_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
)
"""Environment variables that can change a measurement begin with one of these."""

REASONS = {
    0x01: "idle",
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clock",
}
"""Bits of NVML's clock event (throttle) reasons."""


def capture(
    gpu_bus_id: str | None, env: Mapping[str, str] = os.environ, root: Path = Path("/"), nvml: Any = None
) -> dict[str, Any]:
    """The environment of this process; `gpu_bus_id` (`dddd:bb:dd.f`) names the GPU to ask, None: a CPU run."""
    total, available = host_memory(root)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        **versions(),
        **source_state(Path(__file__).resolve().parent.parent, env),
        **(gpu_state(gpu_bus_id, nvml or load_nvml()) if gpu_bus_id else {"gpu": None, "driver": None}),
        "cpu_model": cpu_model(root),
        "cpus": os.cpu_count(),
        "numa_nodes": numa_nodes(root),
        "affinity": cpu_list(os.sched_getaffinity(0)),
        "omp_threads": env.get("OMP_NUM_THREADS"),
        "host_bytes": total,
        "host_available_bytes": available,
        "cgroup_memory_limit_bytes": min((limit for limit, _ in cgroup_memory(root)), default=None),
        "cgroup_cpus": cgroup_cpus(root),
        "memlock_bytes": "unlimited" if soft == resource.RLIM_INFINITY else soft,
        "kernel": platform.release(),
        "variables": {name: value for name, value in sorted(env.items()) if name.startswith(PREFIXES)},
    }


def versions() -> dict[str, Any]:
    """Versions of what decides a measurement. torch's is read from its version file: importing it takes seconds."""
    torch = torch_version()
    return {
        "offbench": __version__,
        "python": platform.python_version(),
        "torch": torch.get("__version__"),
        "torch_git": torch.get("git_version"),
        "cuda": torch.get("cuda"),
        "nccl": _installed("nvidia-nccl-cu13") or _installed("nvidia-nccl-cu12"),
        "triton": _installed("triton"),
    }


def torch_version() -> dict[str, Any]:
    """The names in torch/version.py; empty when torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).parent / "version.py"))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_state(folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Commit of the checkout whose top is `folder`, and whether the package differs from it; null for an installed
    package or without git. A tree that was copied without its .git can say so itself: OFFBENCH_COMMIT=<commit>, with a
    `+` behind it when the tree differs."""
    told = env.get("OFFBENCH_COMMIT", "")
    unknown = {"commit": told.removesuffix("+") or None, "dirty": told.endswith("+") if told else None}
    if not (folder / ".git").exists():
        return unknown
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--", "offbench", "pyproject.toml")
    except (OSError, subprocess.SubprocessError):
        return unknown
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def gpu_state(bus_id: str, nvml: Any) -> dict[str, Any]:
    """Name, driver, clocks, power, temperature, throttle reasons and PCIe link of one GPU as NVML sees them now.

    gpu_id tells GPUs of one kind apart: the first 16 hex digits of the SHA-256 of the UUID, which itself would name
    the board to others.
    """

    def ask(name: str, *args: object) -> Any:
        """One NVML query; None where this GPU, driver or binding does not have it."""
        query = getattr(nvml, name, None)
        if query is None:
            return None
        try:
            return query(*args)
        except nvml.NVMLError:
            return None

    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        power, limit = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        driver, uuid = ask("nvmlSystemGetDriverVersion"), ask("nvmlDeviceGetUUID", handle)
        return {
            "gpu": text(nvml.nvmlDeviceGetName(handle)),
            "gpu_bus_id": bus_id,
            "gpu_id": sha256(text(uuid).encode()).hexdigest()[:16] if uuid is not None else None,
            "driver": text(driver) if driver is not None else None,
            "gpu_memory_bytes": int(memory.total) if memory else None,
            "gpu_sm_mhz": ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            "gpu_sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            "gpu_memory_mhz": ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            "gpu_power_w": power / 1000 if power is not None else None,
            "gpu_power_limit_w": limit / 1000 if limit is not None else None,
            "gpu_temperature_c": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_throttle_reasons": throttle_names(reasons),
            "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_max_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "pcie_max_width": ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            "pcie_replays": ask("nvmlDeviceGetPcieReplayCounter", handle),
        }
    finally:
        nvml.nvmlShutdown()


def throttle_names(bits: int | None) -> list[str] | None:
    """Names of the set bits; an unknown bit is shown in hex, None stays None."""
    if bits is None:
        return None
    names = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return [*names, hex(rest)] if rest else names


def cgroup_cpus(root: Path) -> float | None:
    """CPUs' worth of time the cgroup grants (v2 cpu.max, v1 quota), or None without a limit."""
    v2 = root / "sys/fs/cgroup/cpu.max"
    if v2.exists():
        quota, period = v2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    v1 = root / "sys/fs/cgroup/cpu"
    if not (v1 / "cpu.cfs_quota_us").exists():
        return None
    granted = int((v1 / "cpu.cfs_quota_us").read_text())
    return None if granted < 0 else granted / int((v1 / "cpu.cfs_period_us").read_text())


def cpu_list(cpus: set[int]) -> str:
    """{0, 1, 2, 5} -> `0-2,5`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def identity(env: Mapping[str, Any], spec: RunSpec) -> tuple[Any, ...]:
    """What must agree for one record to stand for another launch: torch, offbench, and the device it ran on: the GPU
    and its driver, or the CPU and how many there are."""
    device = ("gpu", "driver") if spec.mode.device == "cuda" else ("cpu_model", "cpus")
    return tuple(env.get(key) for key in ("torch", "offbench", *device))
