"""NCCL and RCCL topology XML (`NCCL_TOPO_DUMP_FILE`): a claim about PCI switches, links and NUMA nodes.

NCCL writes one `<pci>` per switch, that of its upstream port, and for every link the lesser of what both ends can do.
Its own bandwidth figures are planning values and are not in the file; none are used here.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from offbench.placement import sysfs_address
from offbench.topology.build import build
from offbench.topology.capacity import parse_speed, parse_width
from offbench.topology.facts import AMD, Facts, GpuFacts, NodeClaim, PciDevice, address_order, gpu_devices
from offbench.topology.links import Pcie
from offbench.topology.model import Host, Machine, Note, NumaNode, Source
from offbench.topology.sysfs import parse_cpumask

SOURCE = "NCCL XML"
_BY_HAND = "ffff:"
"""Domain of switches that authors of such files make up, all on one bus, `ffff:ff`."""


def read_nccl(root: ET.Element, name: str) -> Machine:
    """The machine of a `<system>` element. Raises ValueError for addresses or numbers that are none."""
    devices: dict[str, PciDevice] = {}
    order: dict[str, int] = {}
    for cpu in root.iter("cpu"):
        node = int(cpu.get("numaid", "-1"))
        claim = NodeClaim(SOURCE, frozenset({node} if node >= 0 else ()), str(node))
        for element, chain in _pci(cpu, ()):
            device = _device(element, chain, claim)
            devices[device.bdf] = device
            gpu = element.find("gpu")
            if gpu is not None and gpu.get("dev", "").isdigit():
                order[device.bdf] = int(gpu.get("dev", ""))
    nodes = tuple(sorted((_node(cpu) for cpu in root.iter("cpu")), key=lambda node: node.id))
    cards = [card.bdf for card in gpu_devices(devices.values())]
    cards.sort(key=lambda bdf: (order.get(bdf, len(order)), address_order(bdf)))
    version = root.get("version", "?")
    return build(
        Facts(
            source=Source("nccl", name, f"{'RCCL' if version == '2' else 'NCCL'} topology XML, version {version}"),
            devices=devices,
            gpus=tuple(GpuFacts(bdf) for bdf in cards),
            nodes=tuple({node.id: node for node in nodes if node.id >= 0}.values()),
            host=Host(cpu_model=_cpu(root)),
            notes=(_limits(bool(cards)),),
        )
    )


def _limits(any_gpu: bool) -> Note:
    """What such a file cannot tell."""
    text = (
        "an NCCL file tells neither packages (sockets), memory, guest or bare metal, nor which GPU CUDA calls 0 "
        "elsewhere; root ports are left out, and static files are written by hand"
    )
    if not any_gpu:
        text = f"the file lists no GPU, only NUMA nodes by address; {text}"
    return Note("limit", "nccl-file", text, "compare with the machine itself: offbench topo")


def _pci(element: ET.Element, chain: tuple[str, ...]) -> Iterator[tuple[ET.Element, tuple[str, ...]]]:
    for child in element.findall("pci"):
        yield child, chain
        yield from _pci(child, (*chain, sysfs_address(child.get("busid", ""))))


def _device(element: ET.Element, chain: tuple[str, ...], claim: NodeClaim) -> PciDevice:
    bdf = sysfs_address(element.get("busid", ""))
    vendor, device = (_id(element.get(key)) for key in ("vendor", "device"))
    link = Pcie(
        max_gt_s=parse_speed(element.get("link_speed")),
        max_width=parse_width(element.get("link_width")),
        source=SOURCE,
    )
    number = int(element.get("class") or "0", 16) >> 8
    return PciDevice(
        bdf=bdf,
        root=_root(chain[0] if chain else bdf),
        chain=chain,
        pci_class=number,
        # RCCL's older files name no vendor; `other display` with a <gpu> inside is AMD's.
        vendor=vendor or (AMD if number == 0x0380 else None),
        device=device,
        pcie=link,
        tagged=element.find("gpu") is not None,
        synthetic=bdf.startswith(_BY_HAND) or vendor == "ffff",
        numa=(claim,),
    )


def _root(bdf: str) -> str | None:
    """The file names no root complex: the bus of the uppermost device stands for it. A switch that was written by hand
    is on no bus: its address says nothing of what else is there."""
    return None if bdf.startswith(_BY_HAND) else f"pci{bdf[: bdf.rindex(':')]}"


def _id(text: str | None) -> str | None:
    return f"{int(text, 16):04x}" if text else None


def _node(cpu: ET.Element) -> NumaNode:
    cpus = tuple(sorted(parse_cpumask(cpu.get("affinity"))))
    return NumaNode(int(cpu.get("numaid", "-1")), "cpu", cpus, cpus)


def _cpu(root: ET.Element) -> str | None:
    first = root.find("cpu")
    words = [first.get(key) for key in ("arch", "vendor")] if first is not None else []
    return " ".join(word for word in words if word) or None
