"""What copies between host memory and a GPU cross, and what it carries: PCIe links, bridges, what GPUs share. Plain
frozen data like the rest of a machine (`offbench.topology.model`): rates in bytes per second, None where unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["in", "out", "both"]
RateKind = Literal["measured", "payload", "line rate", "assumed"]
"""`measured` best rate observed; `payload` line rate less packet overhead; `line rate` GT/s x lanes x code, the hard
upper bound; `assumed` claimed by a file or by an emulated bridge, or given by the user."""
LinkKind = Literal["gpu_link", "uplink", "root_complex", "socket", "inter_socket", "dram", "c2c"]
Sharing = Literal["shared", "not_shared", "unverified"]

UNDER_LOAD = "NVML under load"
"""`Pcie.source` where `current_*` was read while copies ran."""
BEST_FIRST: tuple[RateKind, ...] = ("measured", "payload", "line rate", "assumed")
"""The order in which `Link.rate` takes what it has: a measurement outranks any declaration."""


@dataclass(frozen=True)
class Pcie:
    """Speed and width of the PCIe link above a device, of both ends the lesser. None is unknown, never zero."""

    max_gt_s: float | None = None
    """GT/s per lane that both ends can do: what arithmetic uses."""
    max_width: int | None = None
    current_gt_s: float | None = None
    """As negotiated when it was read; idle links read low, so it says nothing about capacity."""
    current_width: int | None = None
    source: str = "unknown"
    """`sysfs`, `NVML`, `hwloc XML`, `NCCL XML`, ..."""
    max_payload_bytes: int | None = None
    """Largest packet payload in force. This and `acs` are shown to root only."""
    acs: bool | None = None
    """Of a port: whether it sends traffic between GPUs up to the root complex."""
    iommu: str | None = None
    """The kernel's word on the device's IOMMU domain: `identity` is not translated, `DMA` and `DMA-FQ` are."""


@dataclass(frozen=True)
class Rate:
    """One capacity of one link in one direction, and how it is known."""

    direction: Direction
    bytes_s: float
    kind: RateKind
    source: str
    """`32 GT/s x16 (sysfs)`, `measured here`, `measured by others: prime-rl#4427`."""
    at_least: bool = False
    """The link did not bind when this was measured: its capacity is this or more."""


@dataclass(frozen=True)
class Link:
    """Something that copies of the GPUs below it share: their bytes add up on it."""

    id: str
    """Unique in the machine: `gpu0`, `uplink 0000:44:00.0`, `socket0`."""
    kind: LinkKind
    gpus: tuple[int, ...]
    """Indices of the GPUs whose copies cross it when their host memory is on their own node; for `dram` and
    `inter_socket` those of the package."""
    rates: tuple[Rate, ...] = ()
    """All that is known; empty: capacity unknown, to be skipped and named, never zero and never infinite."""
    bdf: str | None = None
    """Address of the device at its lower end: the GPU, or the bridge nearest the CPU of an uplink."""
    vendor_device: str | None = None
    """`10de:2335`, four hex digits each."""
    emulated: str | None = None
    """Who emulates the bridge (`QEMU`, `AWS`, ...); its speed and its sharing are then claims. None: a real device."""
    pcie: Pcie | None = None
    """The PCIe link this stands for; None for sockets, DRAM and C2C."""
    path_min: Rate | None = None
    """gpu_link only: the lowest line rate the whole chain up to the root claims, emulated bridges included."""
    sharing: Sharing | None = None
    """uplink only: whether the GPUs below it really share it."""
    note: str | None = None

    def rate(self, direction: Direction, kinds: tuple[RateKind, ...] = BEST_FIRST) -> Rate | None:
        """The most trusted capacity of the given kinds in that direction; None where there is none. Of several of
        one kind the largest measured one counts (each is a lower bound) and the smallest of the others."""
        for kind in kinds:
            known = [rate for rate in self.rates if rate.direction == direction and rate.kind == kind]
            if known:
                pick = max if kind == "measured" else min
                return pick(known, key=lambda rate: rate.bytes_s)
        return None


@dataclass(frozen=True)
class Group:
    """GPUs that share, or may share, a way to the CPU; a single GPU that shares none is a group of one."""

    gpus: tuple[int, ...]
    sharing: Sharing
    link: str | None = None
    """Id of the uplink that is shared; None where no bridge is visible."""
    evidence: tuple[str, ...] = ()
    """Why, one sentence each."""


@dataclass(frozen=True)
class Bridge:
    """A root port, switch port or bridge above a GPU."""

    bdf: str
    root: str
    """Root complex, `pci0000:44`."""
    parent: str | None
    """Address of the bridge above; None below the root complex."""
    vendor_device: str | None
    gpus: tuple[int, ...]
    """Every GPU below."""
    pcie: Pcie
    """Of the link above it."""
    emulated: str | None = None
    on_card: bool = False
    """Part of an AMD GPU package: never shared, but its link counts in the path."""
    chip: str | None = None
    """Address of the first port of the chip it belongs to, where two visible levels are one non-blocking switch."""
