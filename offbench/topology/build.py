"""From facts to a machine: joins the lists of GPUs, weighs the evidence, finds groups, and lists the links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from offbench.topology.bridges import bridges_above, merge_chips
from offbench.topology.capacity import lesser, rates_of, slowest
from offbench.topology.evidence import weigh
from offbench.topology.facts import NVIDIA, Facts, GpuFacts, PciDevice, gpu_devices
from offbench.topology.links import Bridge, Group, Link, LinkKind, Pcie, Rate, RateKind
from offbench.topology.model import DataPath, Gpu, Machine, NumaNode, Source
from offbench.topology.notes import notes_on
from offbench.topology.sharing import by_members, find_groups, ground_of, uplink_id
from offbench.units import count

_SXM_WITH_CPU_NVLINK = ("10de:15f9", "10de:1db1", "10de:1db5")
"""P100 and V100 modules; POWER8 and POWER9 boards wire their NVLink to the CPU as well."""
_UNIFIED = ("1002:74a0",)
"""MI300A: CPU and GPU dies on one memory."""


def build(facts: Facts) -> Machine:
    """The machine that the facts describe; the same facts give the same machine."""
    joined = _join(facts)
    gpus = tuple(_gpu(index, listed, device, facts) for index, (listed, device) in enumerate(joined))
    bridges = merge_chips(bridges_above(gpus, facts.devices))
    groups, conflicts = find_groups(gpus, bridges, facts.levels, ground_of(facts.source, facts.host.hypervisor))
    links = tuple(_links(gpus, bridges, groups, facts))
    machine = Machine(
        source=facts.source,
        host=facts.host,
        process=facts.process,
        nodes=facts.nodes,
        bridges=bridges,
        gpus=gpus,
        links=links,
        groups=groups,
        title=_title(gpus, facts.nodes),
    )
    return replace(machine, notes=(*facts.notes, *conflicts, *notes_on(machine)))


def _join(facts: Facts) -> list[tuple[GpuFacts, PciDevice | None]]:
    """Listed GPUs with their PCI devices, in the order listed, then cards that only the PCI bus shows. A MIG instance
    has the device of its parent."""
    cards = {card.bdf: card for card in gpu_devices(facts.devices.values())}
    if facts.gpus is None:
        return [(GpuFacts(card.bdf), card) for card in cards.values()]
    listed = [(gpu, facts.devices.get(gpu.bdf or "")) for gpu in facts.gpus]
    seen = {gpu.bdf for gpu in facts.gpus}
    return [*listed, *((GpuFacts(bdf), card) for bdf, card in cards.items() if bdf not in seen)]


def _gpu(index: int, listed: GpuFacts, device: PciDevice | None, facts: Facts) -> Gpu:
    numa = weigh((*listed.numa, *(device.numa if device else ())), facts.nodes)
    home = next((node for node in facts.nodes if node.id == numa.value), None)
    return Gpu(
        index=index,
        bdf=listed.bdf,
        numa=numa,
        package=home.package if home else None,
        root=device.root if device else None,
        chain=device.chain if device else (),
        pcie=_own_link(device, listed),
        cuda_ordinal=listed.cuda_ordinal,
        uuid=listed.uuid,
        name=listed.name or listed.label,
        vendor_device=device.ids if device else None,
        mig_parent=listed.mig_parent,
        data_path=_data_path(listed, device, facts),
        memory_node=listed.memory_node,
    )


def _own_link(device: PciDevice | None, listed: GpuFacts) -> Pcie:
    """sysfs and NVML each know what a GPU can do; NVML's maximum counts the slot in as well: the lesser holds."""
    seen = device.pcie if device else Pcie()
    if listed.pcie is None or listed.pcie.max_gt_s is None:
        return seen
    return lesser(seen, listed.pcie) if seen.max_gt_s is not None else listed.pcie


def _data_path(listed: GpuFacts, device: PciDevice | None, facts: Facts) -> DataPath:
    ids = device.ids if device else None
    if listed.data_path != "pcie":
        return listed.data_path
    if ids in _UNIFIED:
        return "unified"
    on_power = "POWER" in (facts.host.cpu_model or "").upper()
    nvidia = ids in _SXM_WITH_CPU_NVLINK or (device is not None and device.vendor in (None, NVIDIA))
    if on_power and nvidia and (ids in _SXM_WITH_CPU_NVLINK or listed.memory_node is not None):
        return "nvlink"
    return "c2c" if listed.memory_node is not None else "pcie"


def _links(gpus: Sequence[Gpu], bridges: Sequence[Bridge], groups: Sequence[Group], facts: Facts) -> Iterable[Link]:
    above = by_members(bridges)
    cards: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        cards.setdefault(gpu.bdf or f"gpu{gpu.index}", []).append(gpu)
    for members in cards.values():
        yield _gpu_link(members, above, facts)
    for group in groups:
        if group.link is not None:
            yield _uplink(group, above.get(tuple(sorted(group.gpus)), []), facts.source)
    yield from _socket_links(gpus, facts.nodes)
    for node in sorted({gpu.numa.value for gpu in gpus if gpu.data_path != "pcie" and gpu.numa.value is not None}):
        yield Link(f"dram{node}", "dram", tuple(gpu.index for gpu in gpus if gpu.numa.value == node))


def _gpu_link(members: Sequence[Gpu], above: Mapping[tuple[int, ...], list[Bridge]], facts: Facts) -> Link:
    """The way of one card alone: its own link and those of bridges that only it uses, the slowest of the real ones."""
    first = members[0]
    indices = tuple(gpu.index for gpu in members)
    if first.data_path != "pcie":
        kind: LinkKind = "c2c" if first.data_path == "c2c" else "gpu_link"
        note = f"copies go over {first.data_path}; the PCIe link is not the data path"
        return Link(f"gpu{first.index}", kind, indices, (), first.bdf, first.vendor_device, note=note)
    alone = above.get(indices, [])
    real = slowest([first.pcie, *(bridge.pcie for bridge in alone if bridge.emulated is None)])
    return Link(
        id=f"gpu{first.index}",
        kind="gpu_link",
        gpus=indices,
        rates=rates_of(real, _kind(facts.source)) if real else (),
        bdf=first.bdf,
        vendor_device=first.vendor_device,
        pcie=real or first.pcie,
        path_min=_path_min(first, facts),
        note="other MIG instances of this GPU may use the link too" if first.mig_parent is not None else None,
    )


def _path_min(gpu: Gpu, facts: Facts) -> Rate | None:
    """The lowest rate any link of the chain claims, with the device that claims it."""
    ends = [(bdf, facts.devices[bdf].pcie) for bdf in gpu.chain if bdf in facts.devices]
    ends.append((gpu.bdf or "", gpu.pcie))
    least = slowest([pcie for _, pcie in ends])
    if least is None:
        return None
    where = next(bdf for bdf, pcie in ends if pcie is least)
    return rates_of(least, "assumed", f" of {where}")[0]


def _uplink(group: Group, bridges: Sequence[Bridge], source: Source) -> Link:
    """The link of a group: the slowest of its real bridges; of emulated ones what they claim, as assumed."""
    real = slowest([bridge.pcie for bridge in bridges if bridge.emulated is None])
    claimed = slowest([bridge.pcie for bridge in bridges])
    top = bridges[0] if bridges else None
    emulated = next((bridge.emulated for bridge in bridges if bridge.emulated is not None), None)
    rates: tuple[Rate, ...] = ()
    if real is not None:
        rates = rates_of(real, _kind(source))
    elif claimed is not None:
        rates = rates_of(claimed, "assumed", f", claimed by a bridge that {emulated} emulates")
    return Link(
        id=group.link or uplink_id(bridges[0]),
        kind="uplink",
        gpus=group.gpus,
        rates=rates,
        bdf=top.bdf if top else None,
        vendor_device=top.vendor_device if top else None,
        emulated=emulated,
        pcie=real or claimed,
        sharing=group.sharing,
    )


def _kind(source: Source) -> RateKind:
    """hwloc keeps the speed a link had when it was read, not what it can do: an assumption, never a line rate."""
    return "assumed" if source.kind == "hwloc" else "line rate"


def _socket_links(gpus: Sequence[Gpu], nodes: Sequence[NumaNode]) -> Iterable[Link]:
    """One per package with GPUs. Nothing declares what a socket can carry: without a measurement it has no rate, and
    stands here so that a floor names what it lacks."""
    for package in sorted({gpu.package for gpu in gpus if gpu.package is not None}):
        yield Link(f"socket{package}", "socket", tuple(gpu.index for gpu in gpus if gpu.package == package))
    loose = [gpu for gpu in gpus if gpu.package is None]
    for node in sorted({gpu.numa.value for gpu in loose if gpu.numa.value is not None}):
        members = tuple(gpu.index for gpu in loose if gpu.numa.value == node)
        yield Link(f"socket of node{node}", "socket", members, note="which package the node is of is not known")
    nowhere = tuple(gpu.index for gpu in loose if gpu.numa.value is None)
    if nowhere:
        yield Link("socket?", "socket", nowhere, note="on which socket these GPUs are is not known")


def _title(gpus: Sequence[Gpu], nodes: Sequence[NumaNode]) -> str:
    names = {gpu.name for gpu in gpus}
    known = sum(1 for node in nodes if node.kind == "cpu")
    host = count(known, "NUMA node") if known else "NUMA nodes not known"
    name = names.pop() if len(names) == 1 else None
    if not gpus:
        return f"no GPU, {host}"
    # Text has no names; its labels (GPU0) are none.
    return f"{len(gpus)} x {name}, {host}" if name and gpus[0].bdf else f"{count(len(gpus), 'GPU')}, {host}"
