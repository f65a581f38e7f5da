"""Looks at the host this runs on. Loads no CUDA, needs no GPU, and fails for nothing that the host lacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbench import hardware
from offbench.placement import PROC, SYSFS, abilities
from offbench.topology import sysfs as kernel
from offbench.topology.build import build
from offbench.topology.facts import AMD, Facts, GpuFacts, PciDevice, address_order, gpu_devices
from offbench.topology.identity import Answer, CudaDevice, ask_cuda, number, patience
from offbench.topology.model import Host, Machine, Note, NumaNode, Process, Source
from offbench.topology.nvml import Reading, read_nvml

AskCuda = Callable[[Mapping[str, str]], Answer]


def detect(
    env: Mapping[str, str] | None = None,
    sysfs: Path = SYSFS,
    proc: Path = PROC,
    nvml: Any = None,
    cuda: AskCuda = ask_cuda,
) -> Machine:
    """This host as a Machine. `nvml` is a module like pynvml (default: pynvml itself); `cuda` starts the question to
    CUDA and returns how to wait for it. Both are asked at the same time as the kernel, so the slowest decides."""
    env = os.environ if env is None else env
    answer = cuda(env)
    nodes = kernel.read_nodes(sysfs, proc)
    reading = read_nvml(hardware.load_nvml() if nvml is None else nvml, nodes)
    machine = _assemble(env, sysfs, proc, nodes, reading, answer(patience(reading.gpus, env)), Source("live"))
    allowed = abilities()
    process = replace(
        machine.process or Process(),
        can_set_mempolicy=allowed["set_mempolicy"],
        can_setaffinity=allowed["setaffinity"],
        can_move_pages=allowed["move_pages"],
    )
    return replace(machine, process=process)


def read_root(folder: Path) -> Machine:
    """A copy of a host's /sys and /proc below `folder`: what the kernel of that host said, and nobody else."""
    sysfs, proc = folder / "sys", folder / "proc"
    source = Source("root", folder.name, "copy of /sys and /proc")
    return _assemble({}, sysfs, proc, kernel.read_nodes(sysfs, proc), Reading(silent="not asked"), None, source)


def _assemble(
    env: Mapping[str, str],
    sysfs: Path,
    proc: Path,
    nodes: tuple[NumaNode, ...],
    reading: Reading,
    cuda: Sequence[CudaDevice] | None,
    source: Source,
) -> Machine:
    by_driver = kernel.driver_gpus(proc)
    listed = tuple(gpu for gpu in reading.gpus if gpu.bdf is not None)
    devices = kernel.read_devices(sysfs, nodes, by_driver | {gpu.bdf for gpu in listed if gpu.bdf is not None})
    ordered, notes = number(listed, cuda, env)
    # Cards that neither CUDA nor NVML shows: on the PCI bus, or at least in the driver's own list.
    rest = {card.bdf for card in gpu_devices(devices.values())} | by_driver
    rest -= {gpu.bdf for gpu in ordered}
    every = (*ordered, *(GpuFacts(bdf) for bdf in sorted(rest, key=address_order)))
    memory_nodes = kernel.gpu_memory_nodes(proc)
    gpus = [replace(gpu, memory_node=memory_nodes.get(gpu.bdf or "", gpu.memory_node)) for gpu in every]
    place = {gpu.bdf: index for index, gpu in reversed(list(enumerate(gpus)))}
    levels = {
        (min(place[one], place[other]), max(place[one], place[other])): level
        for one, other, level in reading.levels
        if one in place and other in place
    }
    host = kernel.read_host(sysfs, proc)
    found = tuple(_notes(env, sysfs, host, gpus, devices, reading, source)) + notes
    return build(
        Facts(
            source=source,
            devices=devices,
            gpus=tuple(gpus),
            nodes=nodes,
            host=host,
            process=kernel.read_process(proc, env),
            levels=levels,
            notes=found,
        )
    )


def _notes(
    env: Mapping[str, str],
    sysfs: Path,
    host: Host,
    gpus: Sequence[GpuFacts],
    devices: Mapping[str, PciDevice],
    reading: Reading,
    source: Source,
) -> Iterable[Note]:
    """What this host lacks, each with what to do."""
    wsl = "microsoft" in (host.kernel or "").lower()
    if not gpus:
        why = f" (NVML: {reading.silent})" if reading.silent and source.kind == "live" else ""
        todo = "for a floor describe the machine: offbench topo --from FILE, or --from seed-8xh200"
        yield Note("degraded", "no-gpu", f"no GPU found{why}: sockets and NUMA nodes only", todo)
    if wsl:
        todo = "copies can still be measured: offbench topo --measure"
        yield Note("degraded", "wsl", "WSL2 shows no PCI tree above the GPU: no topology, no NUMA node", todo)
    elif not (sysfs / "bus/pci/devices").is_dir():
        todo = "run on the host, mount /sys read-only, or copy in pairs to find the groups: offbench topo --measure"
        yield Note(
            "degraded", "no-sysfs", f"no PCI devices below {sysfs}/bus/pci: a container or sandbox hides them", todo
        )
    if not (sysfs / "devices/system/node").is_dir():
        todo = "run on the host, or mount /sys read-only"
        yield Note("degraded", "no-numa", "the kernel shows no NUMA nodes: nothing can be said about placement", todo)
    if host.hypervisor:
        todo = "believe measurements only: offbench topo --measure"
        yield Note(
            "degraded", "guest", "this is a guest: its PCI tree and link speeds are the hypervisor's claims", todo
        )
    if gpus and reading.silent is not None and source.kind == "live":
        yield from _without_nvml(devices, reading.silent)
    hidden = [gpu for gpu in gpus if gpu.cuda_ordinal is None]
    named = [name for name in kernel.VISIBLE if name in env]
    if hidden and named and len(hidden) < len(gpus):
        text = (
            f"{len(hidden)} of {len(gpus)} GPUs are hidden by {', '.join(named)}; others may use them, and the links"
        )
        yield Note("warning", "hidden-gpus", text, "compare only runs with the same devices in use")


def _without_nvml(devices: Mapping[str, PciDevice], why: str) -> Iterable[Note]:
    if any(device.vendor == AMD for device in gpu_devices(devices.values())):
        todo = "check the order of GPUs with HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES unset"
        yield Note("degraded", "rocm", "AMD GPUs: from the kernel alone; which one HIP calls 0 is not known", todo)
        return
    text = f"NVML gave nothing ({why}): no second source for NUMA nodes, no PCIe distances, no replay counters"
    yield Note("degraded", "no-nvml", text, "install the NVIDIA driver's libnvidia-ml where this runs")
