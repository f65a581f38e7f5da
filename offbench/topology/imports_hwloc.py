"""hwloc XML exports (1.x, 2.x, 3.x): a claim about packages, NUMA nodes and the PCI tree as lstopo saw it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping

from offbench.placement import sysfs_address
from offbench.topology.build import build
from offbench.topology.capacity import of_gigabytes
from offbench.topology.facts import Facts, NodeClaim, PciDevice, gpu_devices
from offbench.topology.links import Pcie
from offbench.topology.model import Host, Machine, NodeKind, Note, NumaNode, Source
from offbench.topology.sysfs import parse_cpumask

SOURCE = "hwloc XML"
_TYPE = re.compile(r"(?P<cls>[0-9a-f]{4}) \[(?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\]")
_IDLE_GT_S = 5.0
"""A GPU of today that reads Gen1 or Gen2 was idle: what it can do is not in the file."""


def read_hwloc(root: ET.Element, name: str) -> Machine:
    """The machine of a `<topology>` element. Raises ValueError without any object, and for addresses or numbers that
    are none."""
    if next(root.iter("object"), None) is None:
        raise ValueError("an hwloc file without any object in it; write one with lstopo --of xml")
    parents = {child: parent for parent in root.iter("object") for child in parent.findall("object")}
    nodes = tuple(sorted(_nodes(root, parents), key=lambda node: node.id))
    devices: dict[str, PciDevice] = {}
    for element, chain, top in _pci(root):
        device = _device(element, chain, top, parents)
        # lstopo may list a device twice; the first is the one in its place.
        devices.setdefault(device.bdf, device)
    idle = any(card.pcie.current_gt_s and not card.pcie.max_gt_s for card in gpu_devices(devices.values()))
    facts = {info.get("name"): info.get("value") for info in root.iter("info")}
    packages = sum(1 for item in root.iter("object") if item.get("type") in ("Package", "Socket"))
    host = Host(
        vendor=facts.get("DMISysVendor"),
        product=facts.get("DMIProductName") or facts.get("PlatformModel"),
        kernel=facts.get("OSRelease"),
        cpu_model=facts.get("CPUModel"),
        packages=packages or None,
    )
    version = root.get("version", "1.x")
    return build(
        Facts(
            source=Source("hwloc", name, f"hwloc XML, version {version}"),
            devices=devices,
            nodes=nodes,
            host=host,
            notes=tuple(_limits(idle)),
        )
    )


def _limits(idle: bool) -> Iterator[Note]:
    """What such a file cannot tell."""
    text = (
        "an hwloc file tells neither what links can do (it keeps their speed when it was written) nor guest or bare "
        "metal, nor which GPU CUDA calls 0: GPUs are numbered by PCI address"
    )
    yield Note("limit", "hwloc-file", text, "compare with the machine itself: offbench topo")
    if idle:
        text = "some links read PCIe Gen1 or Gen2, as idle GPUs do: their capacity is taken as unknown"
        yield Note(
            "warning", "idle-link", text, "write the file while copies run, or measure: offbench topo --measure"
        )


def _pci(root: ET.Element) -> Iterator[tuple[ET.Element, tuple[str, ...], ET.Element]]:
    """Every PCI bridge and device with the addresses above it and its host bridge."""

    def below(
        element: ET.Element, chain: tuple[str, ...], top: ET.Element
    ) -> Iterator[tuple[ET.Element, tuple[str, ...], ET.Element]]:
        for child in element.findall("object"):
            if child.get("type") in ("Bridge", "PCIDev") and child.get("pci_busid"):
                yield child, chain, top
                yield from below(child, (*chain, sysfs_address(child.get("pci_busid", ""))), top)
            else:
                yield from below(child, chain, top)

    for element in root.iter("object"):
        if element.get("type") == "Bridge" and element.get("bridge_type", "").startswith("0-"):
            yield from below(element, (), element)
        elif element.get("type") != "Bridge":
            # Without its host bridge (as lstopo may be told to filter) a device hangs directly below the CPU side.
            loose = [child for child in element.findall("object") if child.get("pci_busid")]
            for child in loose if element.get("type") != "PCIDev" else ():
                yield child, (), element
                yield from below(child, (sysfs_address(child.get("pci_busid", "")),), element)


def _device(
    element: ET.Element, chain: tuple[str, ...], top: ET.Element, parents: Mapping[ET.Element, ET.Element]
) -> PciDevice:
    bdf = sysfs_address(element.get("pci_busid", ""))
    kinds = _TYPE.match(element.get("pci_type", ""))
    return PciDevice(
        bdf=bdf,
        root=_root(top, chain[0] if chain else bdf),
        chain=chain,
        pci_class=int(kinds["cls"], 16) if kinds else 0,
        vendor=kinds["vendor"] if kinds else None,
        device=kinds["device"] if kinds else None,
        pcie=_link(float(element.get("pci_link_speed") or 0)),
        numa=(_home(top, parents),),
    )


def _root(top: ET.Element, first: str) -> str:
    span = re.match(r"([0-9a-f]+):\[([0-9a-f]+)-", top.get("bridge_pci", ""))
    return f"pci{span[1]}:{span[2]}" if span else f"pci{first[: first.rindex(':')]}"


def _link(gb_s: float) -> Pcie:
    """The reading as the link's state; as its capacity only where it was not idle."""
    read = of_gigabytes(gb_s)
    if read is None:
        return Pcie(source=SOURCE)
    gt_s, width = read
    if gt_s <= _IDLE_GT_S:
        return Pcie(current_gt_s=gt_s, current_width=width, source=SOURCE)
    return Pcie(gt_s, width, gt_s, width, f"{SOURCE}, as read at capture")


def _home(top: ET.Element, parents: Mapping[ET.Element, ET.Element]) -> NodeClaim:
    """The nodes of the nearest object with a node set; those of the whole machine mean that nobody knew."""
    place: ET.Element | None = top
    while place is not None and not place.get("nodeset"):
        place = parents.get(place)
    if place is None:
        return NodeClaim(SOURCE)
    return NodeClaim(SOURCE, parse_cpumask(place.get("nodeset")))


def _nodes(root: ET.Element, parents: Mapping[ET.Element, ET.Element]) -> Iterator[NumaNode]:
    owners = [
        (int(item.get("os_index", "-1")), parse_cpumask(item.get("cpuset")))
        for item in root.iter("object")
        if item.get("type") in ("Package", "Socket")
    ]
    machine = next(root.iter("object"))
    allowed = parse_cpumask(machine.get("allowed_cpuset") or machine.get("cpuset"))
    for item in root.iter("object"):
        if item.get("type") != "NUMANode":
            continue
        cpus = parse_cpumask(item.get("online_cpuset") or item.get("cpuset"))
        packages = [number for number, owned in owners if cpus & owned]
        kind: NodeKind = "cpu" if cpus else ("gpu" if item.get("subtype") == "GPUMemory" else "memory_only")
        memory = item.get("local_memory")
        yield NumaNode(
            id=int(item.get("os_index", "-1")),
            kind=kind,
            cpus=tuple(sorted(cpus)),
            cpus_allowed=tuple(sorted(cpus & allowed)),
            package=packages[0] if len(packages) == 1 and packages[0] >= 0 else None,
            memory_bytes=int(memory) if memory else None,
        )
