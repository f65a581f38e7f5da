"""Writes /sys and /proc of a described machine below a folder, and plays its NVML.

A description (tests/data/topology/*.json) holds `nodes` (cpus, package, distance), `pci` (path below /sys/devices to
class, vendor:device, numa_node, max speed, max width and, where they differ, current speed and width, or a driver;
null: no PCI bus at all), `nvml` (one object per GPU: bdf, name, uuid, node, and what else it knows) and `levels`
(NVML's distance of pairs of those). Files with a `schema` are snapshots of measured machines instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offbench.placement import format_cpulist, parse_cpulist
from offbench.topology import Machine, detect
from offbench.topology.identity import Answer, CudaDevice

DATA = Path(__file__).parent.parent / "data" / "topology"
_FILES = {path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))}
NAMES = [name for name, content in _FILES.items() if "schema" not in content]
SNAPSHOTS = [name for name, content in _FILES.items() if "schema" in content]
"""Written by `offbench topo --measure --save` instead: whole machines with what was measured on them."""


def described(name: str) -> dict[str, Any]:
    """The description of that name."""
    loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return loaded


def write_root(folder: Path, text: Mapping[str, Any]) -> Path:
    """Write the tree; returns `folder`."""
    cpus = frozenset[int]().union(*(parse_cpulist(node["cpus"]) for node in text["nodes"].values()))
    system = folder / "sys/devices/system"
    put(system / "cpu/online", text.get("online", format_cpulist(cpus)))
    for number, node in text["nodes"].items():
        put(system / f"node/node{number}/cpulist", node["cpus"])
        put(system / f"node/node{number}/distance", node["distance"])
        put(system / f"node/node{number}/meminfo", f"Node {number} MemTotal: 1024 kB\nNode {number} MemFree: 512 kB")
        for cpu in parse_cpulist(node["cpus"]):
            put(system / f"cpu/cpu{cpu}/topology/physical_package_id", str(node["package"]))
    for path, row in (text["pci"] or {}).items():
        _device(folder, path, row)
    allowed = text.get("allowed", format_cpulist(cpus))
    put(folder / "proc/self/status", f"Cpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{','.join(text['nodes'])}")
    flags = "" if text.get("cpuinfo") == "none" else f"flags\t: fpu{' hypervisor' if text['hypervisor'] else ''}\n"
    put(folder / "proc/cpuinfo", f"model name\t: Test CPU\n{flags}")
    put(folder / "proc/sys/kernel/osrelease", text.get("kernel", "6.8.0"))
    for bdf, node in text.get("gpu_memory", {}).items():
        put(folder / f"proc/driver/nvidia/gpus/{bdf}/numa_status", f"Node:      {node}\nStatus:    online\n")
    return folder


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _device(folder: Path, path: str, row: list[Any]) -> None:
    kind, ids, node, speed, width, *more = row
    home, bdf = folder / "sys/devices" / path, path.rpartition("/")[2]
    vendor, device = ids.split(":")
    now = more if len(more) == 2 else (speed, width)
    for name, value in {
        "class": f"0x{kind}00",
        "vendor": f"0x{vendor}",
        "device": f"0x{device}",
        "numa_node": node,
        "max_link_speed": speed,
        "max_link_width": width,
        "current_link_speed": now[0],
        "current_link_width": now[1],
    }.items():
        put(home / name, str(value))
    link = folder / "sys/bus/pci/devices" / bdf
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    if len(more) == 1:
        driver = folder / "sys/bus/pci/drivers" / more[0]
        driver.mkdir(parents=True, exist_ok=True)
        (home / "driver").symlink_to(driver)


class NVMLError(Exception):
    """Stands for pynvml's error."""


@dataclass
class FakeNvml:
    """Answers for the GPUs of a description, in the order of that list, and refuses what they do not know."""

    text: Mapping[str, Any]
    broken: str | None = None
    NVMLError: type[Exception] = field(default=NVMLError, init=False)

    def _row(self, handle: Any) -> dict[str, Any]:
        row: dict[str, Any] = self.text["nvml"][handle] if isinstance(handle, int) else handle
        return row

    def _know(self, value: Any) -> Any:
        if value is None:
            raise NVMLError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError(self.broken)

    def nvmlShutdown(self) -> None:
        """Nothing is held."""

    def nvmlDeviceGetCount(self) -> int:
        return len(self.text["nvml"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: Any) -> SimpleNamespace:
        domain, rest = self._row(handle)["bdf"].split(":", 1)
        return SimpleNamespace(busId=f"{int(domain, 16):08X}:{rest.upper()}".encode())

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return str(self._row(handle)["name"]).encode()

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(self._row(handle)["uuid"])

    def nvmlDeviceGetMemoryAffinity(self, handle: Any, words: int, scope: int) -> list[int]:
        assert scope == 0, "NUMA node scope"
        return mask(frozenset({self._know(self._row(handle)["node"])}), words)

    def nvmlDeviceGetCpuAffinity(self, handle: Any, words: int) -> list[int]:
        return mask(parse_cpulist(self._know(self._row(handle).get("cpus"))), words)

    def nvmlDeviceGetNumaNodeId(self, handle: Any) -> int:
        return int(self._know(self._row(handle).get("own_node")))

    def nvmlDeviceGetC2cModeInfoV(self, handle: Any) -> SimpleNamespace:
        return SimpleNamespace(isC2cEnabled=int(self._know(self._row(handle).get("c2c"))))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:
        return int(self._know(self._row(handle).get("gen")))

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int:
        return int(self._know(self._row(handle).get("width")))

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return int(self._know(self.text.get("levels", {}).get(f"{one},{other}")))

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return len(self._row(handle).get("mig", ()))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, place: int) -> dict[str, Any]:
        instance: dict[str, Any] = self._row(handle)["mig"][place]
        return instance


def mask(bits: frozenset[int], words: int) -> list[int]:
    """NVML's array of 64-bit words."""
    return [sum(1 << bit % 64 for bit in bits if bit // 64 == word) for word in range(words)]


def cuda_says(*devices: CudaDevice) -> Callable[[Mapping[str, str]], Answer]:
    """CUDA's answer, given."""
    return lambda env: lambda seconds: devices


def cuda_silent(env: Mapping[str, str]) -> Answer:
    """No CUDA driver."""
    return lambda seconds: None


def look(folder: Path, text: Mapping[str, Any], env: Mapping[str, str] | None = None, **given: Any) -> Machine:
    """Detection on a description's own tree and NVML; CUDA silent unless `cuda` is given."""
    write_root(folder, text)
    given = {"nvml": FakeNvml(text), "cuda": cuda_silent, **given}
    return detect(env or {}, folder / "sys", folder / "proc", **given)


def nodes(machine: Machine) -> list[int | None]:
    """NUMA node of each GPU."""
    return [gpu.numa.value for gpu in machine.gpus]


def pairs(machine: Machine, sharing: str) -> list[tuple[int, ...]]:
    """Groups of several GPUs with that verdict."""
    return [group.gpus for group in machine.groups if group.sharing == sharing and len(group.gpus) > 1]


def codes(machine: Machine) -> set[str]:
    """Codes of the notes."""
    return {note.code for note in machine.notes}
