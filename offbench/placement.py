"""Bind this process to the NUMA node of its GPU, and say afterwards where its threads may run.

Binding comes before anything starts threads or pins memory: threads inherit the CPU mask, pages stay on the node
that touched them first, and pinned pages never move. What the kernel refuses is recorded and the launch goes on. No
torch here, and neither numactl nor libnuma. The roots of /sys and /proc are arguments, so that tests bring their own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SYSFS, PROC = Path("/sys"), Path("/proc")
PAGE = mmap.PAGESIZE

_LAST_CPU = 65535
"""Well above what a kernel is built for: x86 allows 8192 CPUs (NR_CPUS_RANGE_END in arch/x86/Kconfig)."""
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the kernel's syscall tables
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}


@dataclass(frozen=True)
class Placement:
    """What binding did."""

    status: Literal["bound", "not applicable", "refused"]
    reason: str | None = None
    """Why it is not applicable or refused."""
    node: int | None = None
    """The GPU's NUMA node, where it is known."""
    cpus: tuple[int, ...] = ()
    """CPUs this process was bound to; compare with `affinity()` later, since libraries reset masks."""
    memory: str | None = None
    """Memory policy of a bound process: `preferred`, or `refused: why` (first touch by bound threads still holds)."""

    def describe(self) -> str:
        """`node K`, `not applicable` or `refused: why`, as `offbench.record.Host.numa` keeps it."""
        if self.status == "bound":
            return f"node {self.node}"
        return f"refused: {self.reason}" if self.status == "refused" else "not applicable"


def prefer_node(node: int) -> str | None:
    """Ask the kernel to take this thread's new pages from `node` while it has room; children inherit it.

    None when granted, else why not: containers often forbid the call (sglang#28401).
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"no set_mempolicy number known for {platform.machine()}"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    size = ctypes.c_ulong(len(mask) * bits + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), mask, size) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def page_nodes(addresses: Sequence[int]) -> list[int] | None:
    """NUMA node of the page at each address, by move_pages(2) with nodes=NULL, which moves nothing; negative for one
    that was never touched. None when the kernel refuses, as containers make it do."""
    number = _MOVE_PAGES.get(platform.machine())
    if number is None:
        return None
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    status = (ctypes.c_int * len(addresses))()
    count, own = ctypes.c_ulong(len(addresses)), ctypes.c_int(0)
    if ctypes.CDLL(None).syscall(ctypes.c_long(number), own, count, pages, None, status, ctypes.c_int(0)) != 0:
        return None
    return list(status)


def abilities() -> dict[str, bool]:
    """Which calls this process is allowed to make, by making them in a thread of their own: set_mempolicy to the
    default (being allowed to read a policy proves nothing) and sched_setaffinity to the mask there is."""
    found: dict[str, bool] = {}

    def probe() -> None:
        number = _SET_MEMPOLICY.get(platform.machine())
        call = ctypes.CDLL(None).syscall
        found["set_mempolicy"] = number is not None and call(ctypes.c_long(number), ctypes.c_int(0), None, None) == 0
        try:
            os.sched_setaffinity(0, os.sched_getaffinity(0))
        except OSError:
            found["setaffinity"] = False
        else:
            found["setaffinity"] = True

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    here = ctypes.create_string_buffer(1)
    return found | {"move_pages": page_nodes([ctypes.addressof(here) // PAGE * PAGE]) is not None}


def bind(
    pci_bus_id: str | None,
    sysfs: Path = SYSFS,
    proc: Path = PROC,
    set_affinity: Callable[[int, Iterable[int]], None] = os.sched_setaffinity,
    prefer: Callable[[int], str | None] = prefer_node,
    node: int | None = None,
) -> Placement:
    """Bind every thread of this process to the allowed CPUs of the GPU's NUMA node, and prefer that node's memory.

    pci_bus_id: the GPU's address, None without a GPU. node: its NUMA node where the caller knows it (NVML may, where
    the kernel does not). What the machine lacks or forbids is told in the result; only text that is no PCI address
    raises (ValueError). Binding again does no harm.
    """
    nodes = _cpu_nodes(sysfs)
    if pci_bus_id is None:
        return Placement("not applicable", "no GPU")
    if len(nodes) < 2:
        return Placement("not applicable", "one NUMA node")
    node = gpu_node(pci_bus_id, sysfs) if node is None else node
    if node is None:
        return Placement("refused", f"no source says on which NUMA node GPU {pci_bus_id} is")
    if node not in nodes:
        return Placement("refused", f"node {node} of GPU {pci_bus_id} has no CPUs", node)
    allowed = _status_list(proc / "self/status", "Cpus_allowed_list")
    cpus = nodes[node] & allowed
    if not cpus:
        theirs, ours = format_cpulist(nodes[node]), format_cpulist(allowed)
        return Placement("refused", f"this process may use CPUs {ours}, none of node {node} ({theirs})", node)
    try:
        _bind_threads(cpus, proc, set_affinity)
    except OSError as error:
        return Placement("refused", f"sched_setaffinity: {error.strerror}", node)
    if node in _status_list(proc / "self/status", "Mems_allowed_list"):
        refused = prefer(node)
    else:
        refused = f"this process may not use memory of node {node}"
    memory = "preferred" if refused is None else f"refused: {refused}"
    return Placement("bound", None, node, tuple(sorted(cpus)), memory)


def _bind_threads(cpus: frozenset[int], proc: Path, set_affinity: Callable[[int, Iterable[int]], None]) -> None:
    set_affinity(0, cpus)  # the calling thread; those it starts from now on inherit the mask
    for task in sorted(int(entry.name) for entry in (proc / "self/task").iterdir()):
        try:
            set_affinity(task, cpus)
        except ProcessLookupError:
            continue  # a thread that ended since it was listed


def gpu_node(pci_bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """NUMA node of a PCI device: its own numa_node, else that of the nearest bridge above it, else the one node that
    holds all its local CPUs. -1 is unknown and never node 0; None when no source knows."""
    device = (sysfs / "bus/pci/devices" / sysfs_address(pci_bus_id)).resolve()
    for place in (device, *device.parents):
        value = _read(place / "numa_node")
        if value is not None and int(value) >= 0:
            return int(value)
    local = parse_cpulist(_read(device / "local_cpulist") or "")
    return next((node for node, cpus in _cpu_nodes(sysfs).items() if local and local <= cpus), None)


def sysfs_address(pci_bus_id: str) -> str:
    """A PCI address as sysfs spells it, `dddd:bb:dd.f` in lower case: NVML writes eight digits of domain in upper
    case, CUDA no function. Domains above ffff keep their length. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", pci_bus_id.strip().lower())
    if match is None:
        raise ValueError(f"{pci_bus_id!r} is no PCI address like 0000:1a:00.0")
    domain, bus, slot, function = match.groups(default="0")
    return f"{int(domain, 16):04x}:{bus}:{slot}.{function}"


def affinity() -> list[int]:
    """CPUs the calling thread may run on now, in order."""
    return sorted(os.sched_getaffinity(0))


def strayed_threads(cpus: Iterable[int], proc: Path = PROC) -> list[int]:
    """Ids of this process's threads that may run outside `cpus`: started before binding, or rebound by a library."""
    bound = frozenset(cpus)
    strayed = []
    for task in (proc / "self/task").iterdir():
        try:
            mask = _status_list(task / "status", "Cpus_allowed_list")
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that ended since it was listed
        if not mask <= bound:
            strayed.append(int(task.name))
    return sorted(strayed)


def parse_cpulist(text: str) -> frozenset[int]:
    """CPUs (or nodes) of a list such as `0-3,8-11` or `0,3-9,11-17`; the empty set for an empty text or `N/A`.

    Raises ValueError for anything else, and for numbers above 65535: a range ends before memory does.
    """
    text = text.strip()
    if text.upper() in ("", "N/A"):
        return frozenset()
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(f"{text!r} is no CPU list like 0-3,8-11")
        if int(match[2] or match[1]) > _LAST_CPU:
            raise ValueError(f"{text!r} is no CPU list like 0-3,8-11: no CPU or node has a number above {_LAST_CPU}")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)


def format_cpulist(cpus: Iterable[int]) -> str:
    """The shortest list that `parse_cpulist` reads back as `cpus`; `` for none."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _cpu_nodes(sysfs: Path) -> dict[int, frozenset[int]]:
    """Online CPUs of every node that has some; nodes of memory alone (GPU memory, CXL) are none to bind to."""
    root = sysfs / "devices/system"
    online = _read(root / "cpu/online")
    nodes = {}
    for folder in root.glob("node/node[0-9]*"):
        cpus = parse_cpulist(_read(folder / "cpulist") or "")
        if online is not None:
            cpus &= parse_cpulist(online)
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def _status_list(status: Path, key: str) -> frozenset[int]:
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return parse_cpulist(value)
    return frozenset()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
