"""What NVML says of every GPU: address, UUID, NUMA affinity, link, coherent path, MIG instances, PCIe distances.

Handles are taken by index only to walk the list; nothing keeps the index. A call a GPU or driver does not support is
silence, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offbench.hardware import text
from offbench.placement import sysfs_address
from offbench.topology.capacity import gt_of_generation, parse_width
from offbench.topology.evidence import node_of_cpus
from offbench.topology.facts import GpuFacts, NodeClaim
from offbench.topology.links import Pcie
from offbench.topology.model import DataPath, NumaNode

_NODE_SCOPE = 0  # NVML_AFFINITY_SCOPE_NODE
_WORD = 64  # NVML's masks are arrays of unsigned long


@dataclass(frozen=True)
class Reading:
    """NVML's answer. `gpus` holds whole GPUs, each followed by its MIG instances."""

    gpus: tuple[GpuFacts, ...] = ()
    levels: tuple[tuple[str, str, int], ...] = ()
    """(address, address, topology level) of each pair of whole GPUs."""
    silent: str | None = None
    """Why NVML gave nothing."""


def read_nvml(nvml: Any, nodes: Sequence[NumaNode]) -> Reading:
    """Ask NVML; `nvml` is a module like pynvml, None where there is none."""
    if nvml is None:
        return Reading(silent="not asked")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Reading(silent=str(error))
    try:
        ask = _asker(nvml)
        count = ask("nvmlDeviceGetCount") or 0
        # A GPU that fell off the bus still counts but gives no handle.
        listed = [ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        handles = [handle for handle in listed if handle is not None]
        gpus = [_gpu(ask, handle, nodes) for handle in handles]
        levels = []
        for one in range(len(handles)):
            for other in range(one):
                level = ask("nvmlDeviceGetTopologyCommonAncestor", handles[other], handles[one])
                if level is not None:
                    levels.append((gpus[other].bdf or "", gpus[one].bdf or "", int(level)))
        rows: list[GpuFacts] = []
        for gpu, handle in zip(gpus, handles, strict=True):
            rows += [gpu, *_instances(ask, handle, gpu)]
        return Reading(tuple(rows), tuple(levels), None if rows else "it lists no GPU")
    finally:
        nvml.nvmlShutdown()


Ask = Callable[..., Any]


def _asker(nvml: Any) -> Ask:
    """Call by name; None where the bindings, the driver or the GPU do not know the call."""

    def ask(name: str, *arguments: Any) -> Any:
        call = getattr(nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None

    return ask


def _gpu(ask: Ask, handle: Any, nodes: Sequence[NumaNode]) -> GpuFacts:
    info = ask("nvmlDeviceGetPciInfo", handle)
    name, uuid = ask("nvmlDeviceGetName", handle), ask("nvmlDeviceGetUUID", handle)
    own_node = ask("nvmlDeviceGetNumaNodeId", handle)
    known = text(name) if name is not None else None
    return GpuFacts(
        bdf=sysfs_address(text(info.busId)) if info is not None else None,
        uuid=text(uuid) if uuid is not None else None,
        name=known,
        pcie=Pcie(
            max_gt_s=gt_of_generation(ask("nvmlDeviceGetMaxPcieLinkGeneration", handle) or 0),
            max_width=parse_width(str(ask("nvmlDeviceGetMaxPcieLinkWidth", handle))),
            current_gt_s=gt_of_generation(ask("nvmlDeviceGetCurrPcieLinkGeneration", handle) or 0),
            current_width=parse_width(str(ask("nvmlDeviceGetCurrPcieLinkWidth", handle))),
            source="NVML",
        ),
        numa=tuple(_claims(ask, handle, nodes)),
        data_path=_data_path(ask, handle, known or ""),
        memory_node=int(own_node) if own_node is not None and own_node >= 0 else None,
    )


def claims_of(nvml: Any, bus_id: str, nodes: Sequence[NumaNode]) -> tuple[NodeClaim, ...]:
    """What NVML says of the NUMA node of the one GPU at that address; nothing where there is no NVML."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        ask = _asker(nvml)
        handle = ask("nvmlDeviceGetHandleByPciBusId", bus_id.encode())
        return tuple(_claims(ask, handle, nodes)) if handle is not None else ()
    finally:
        nvml.nvmlShutdown()


def _claims(ask: Ask, handle: Any, nodes: Sequence[NumaNode]) -> Iterable[NodeClaim]:
    most = max((node.id for node in nodes), default=0)
    memory = ask("nvmlDeviceGetMemoryAffinity", handle, most // _WORD + 1, _NODE_SCOPE)
    if memory is not None:
        yield NodeClaim("NVML memory affinity", _bits(memory))
    last = max((cpu for node in nodes for cpu in node.cpus), default=0)
    cpus = ask("nvmlDeviceGetCpuAffinity", handle, last // _WORD + 1)
    if cpus is not None:
        yield NodeClaim("NVML CPU affinity", node_of_cpus(_bits(cpus), nodes))


def _data_path(ask: Ask, handle: Any, name: str) -> DataPath:
    mode = ask("nvmlDeviceGetC2cModeInfoV", handle)
    if "GB10" in name:  # one memory for CPU and GPU
        return "unified"
    return "c2c" if mode is not None and mode.isC2cEnabled else "pcie"


def _instances(ask: Ask, handle: Any, parent: GpuFacts) -> Iterable[GpuFacts]:
    for place in range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if instance is None:
            continue
        name, uuid = ask("nvmlDeviceGetName", instance), ask("nvmlDeviceGetUUID", instance)
        yield replace(
            parent,
            uuid=text(uuid) if uuid is not None else None,
            name=text(name) if name is not None else parent.name,
            mig_parent=parent.uuid,
        )


def _bits(words: Iterable[int]) -> frozenset[int]:
    return frozenset(
        place * _WORD + bit for place, word in enumerate(words) for bit in range(_WORD) if int(word) >> bit & 1
    )
