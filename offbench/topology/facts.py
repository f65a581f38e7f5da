"""What one source saw, before anything is concluded: the common shape of sysfs, NVML, CUDA and imported files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offbench.placement import format_cpulist
from offbench.topology.links import Pcie
from offbench.topology.model import DataPath, Host, Note, NumaNode, Process, Source

NVIDIA, AMD = "10de", "1002"
INTERNAL, SINGLE, MULTIPLE, HOSTBRIDGE, NODE, SYSTEM = 0, 10, 20, 30, 40, 50
"""PCIe distance of two GPUs, as NVML's topology levels number it (nvml.h, nvmlGpuTopologyLevel_t)."""


@dataclass(frozen=True)
class NodeClaim:
    """What one source says about the NUMA node of a device: a set of nodes, of which only a single one is a word."""

    source: str
    """Starts with the name of whoever is asked (`sysfs`, `NVML`, `CUDA`, `NCCL XML`): same word, same witness."""
    nodes: frozenset[int] = frozenset()
    """Empty: the source does not know (-1, or nothing written)."""
    text: str | None = None
    """As written, where that is not just the list of nodes."""

    @property
    def written(self) -> str:
        """For people."""
        return self.text if self.text is not None else format_cpulist(self.nodes) or "-1"


@dataclass(frozen=True)
class PciDevice:
    """A PCI function with its way up to the CPU."""

    bdf: str
    root: str | None
    """`pci0000:44`; None where the source names no root complex."""
    chain: tuple[str, ...] = ()
    """Addresses of the bridges above it, the one nearest the CPU first."""
    pci_class: int = 0
    """Class and subclass, four hex digits: 0x0302."""
    vendor: str | None = None
    device: str | None = None
    """Four lower-case hex digits each."""
    pcie: Pcie = field(default_factory=Pcie)
    """What this device says of the link above it."""
    driver: str | None = None
    tagged: bool = False
    """The source itself calls it a GPU."""
    synthetic: bool = False
    """Written by hand into a topology file: no such device exists."""
    numa: tuple[NodeClaim, ...] = ()

    @property
    def ids(self) -> str | None:
        """`vvvv:dddd`."""
        return f"{self.vendor}:{self.device}" if self.vendor and self.device else None

    @property
    def slot(self) -> str:
        """The address without its function: one card."""
        return self.bdf.rpartition(".")[0]


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as listed by CUDA, NVML or a file, to be joined with its PCI device by address."""

    bdf: str | None
    cuda_ordinal: int | None = None
    uuid: str | None = None
    name: str | None = None
    mig_parent: str | None = None
    pcie: Pcie | None = None
    """What NVML says of its link."""
    numa: tuple[NodeClaim, ...] = ()
    data_path: DataPath = "pcie"
    memory_node: int | None = None
    label: str | None = None
    """What the source calls it, where it has no address: `GPU3`."""


@dataclass(frozen=True)
class Facts:
    """All that was read. `gpus` is None where only the PCI devices say what is a GPU."""

    source: Source
    devices: Mapping[str, PciDevice] = field(default_factory=dict)
    gpus: tuple[GpuFacts, ...] | None = None
    nodes: tuple[NumaNode, ...] = ()
    host: Host = field(default_factory=Host)
    process: Process | None = None
    levels: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """PCIe distance of pairs of `gpus`, by position, where NVML or text gave it."""
    notes: tuple[Note, ...] = ()


def is_gpu(device: PciDevice) -> bool:
    """Whether a PCI function is a GPU that computes: 3D controllers and accelerators always, `other display` of AMD,
    VGA only of NVIDIA or bound to amdgpu. On-board VGA is none, nor are the audio functions of a card."""
    if device.tagged or device.pci_class == 0x0302 or device.pci_class >> 8 == 0x12:
        return True
    if device.pci_class == 0x0380:
        return device.vendor == AMD
    return device.pci_class == 0x0300 and (device.vendor == NVIDIA or device.driver == "amdgpu")


def gpu_devices(devices: Iterable[PciDevice]) -> list[PciDevice]:
    """The GPUs among PCI functions, by address; of several functions of one slot, one card, the first stands."""
    cards: dict[str, PciDevice] = {}
    for device in sorted(devices, key=lambda device: address_order(device.bdf)):
        if is_gpu(device):
            cards.setdefault(device.slot, device)
    return list(cards.values())


def address_order(bdf: str) -> tuple[int, ...]:
    """Sorts PCI addresses as the bus numbers them; domains may have more than four digits."""
    return tuple(int(part, 16) for part in bdf.replace(".", ":").split(":"))
