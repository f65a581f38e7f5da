"""What a machine looks like to a copy between host memory and a GPU. Plain frozen data: no detection, no arithmetic.

The machine is kept flat (nodes, bridges, GPUs, links, groups), as it is written to JSON; `offbench.topology.tree`
nests it for drawing: machine > socket > NUMA node > root complex > switch > GPU. Nothing here is ever guessed: a
value that no source gave is None, and every source and value is kept beside the value that was chosen.

Addresses are lower-case `dddd:bb:dd.f`. Rates are bytes per second. `in` is host to device, `out` device to host,
`both` the two at the same time, summed. GPUs are named by `Gpu.index` everywhere.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Literal

Confidence = Literal["high", "medium", "none", "conflict"]
"""`high` two independent sources agree; `medium` one source; `none` no source knows; `conflict` sources differ."""
Direction = Literal["in", "out", "both"]
RateKind = Literal["measured", "payload", "line rate", "assumed"]
"""`measured` best rate observed; `payload` line rate less packet overhead; `line rate` GT/s x lanes x code, the hard
upper bound; `assumed` claimed by a file or by an emulated bridge, or given by the user."""
LinkKind = Literal["gpu_link", "uplink", "root_complex", "socket", "inter_socket", "dram", "c2c"]
Sharing = Literal["shared", "not_shared", "unverified"]
DataPath = Literal["pcie", "c2c", "nvlink", "unified"]
NodeKind = Literal["cpu", "gpu", "memory_only"]
SourceKind = Literal["live", "root", "hwloc", "nccl", "smi", "offbench"]
NoteKind = Literal["degraded", "conflict", "warning", "limit"]
"""`degraded` this machine lacks something; `conflict` sources differ; `limit` what an imported file cannot tell."""
PairOrSocket = Literal["pair", "socket", "not_separated"]

BEST_FIRST: tuple[RateKind, ...] = ("measured", "payload", "line rate", "assumed")
"""The order in which `Link.rate` takes what it has: a measurement outranks any declaration."""


@dataclass(frozen=True)
class Claim:
    """One source's word on one fact, kept whether or not it was believed."""

    source: str
    """Where it was read: `sysfs numa_node`, `NVML memory affinity`, `hwloc XML`, ..."""
    value: str
    """As the source gave it: `-1`, `0-1`, `3`."""


@dataclass(frozen=True)
class Evidence:
    """The NUMA node of a GPU, with everything that was said about it, most trusted source first."""

    value: int | None
    confidence: Confidence
    claims: tuple[Claim, ...] = ()


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


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance where CUDA sees that."""

    index: int
    """Position in `Machine.gpus`: in CUDA's order where that is known, else by PCI address."""
    bdf: str | None
    """None in text that has no addresses."""
    numa: Evidence
    package: int | None
    """Physical package (socket) of its node; None where the node or its package is unknown."""
    root: str | None = None
    chain: tuple[str, ...] = ()
    """Addresses of the bridges above it, the one nearest the CPU first."""
    pcie: Pcie = field(default_factory=Pcie)
    """Its own link, to the port above it."""
    cuda_ordinal: int | None = None
    """Only where CUDA, or rules that fix its order, said so; never NVML's index."""
    uuid: str | None = None
    name: str | None = None
    vendor_device: str | None = None
    mig_parent: str | None = None
    """UUID of the GPU a MIG instance is part of; its link may serve other instances too."""
    data_path: DataPath = "pcie"
    """What carries copies between host and GPU; the PCIe link is not it unless this says `pcie`."""
    memory_node: int | None = None
    """NUMA node that the GPU's own memory forms on coherent parts; never one to bind to."""


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node as the kernel numbers it. Node is not socket: a package may hold several."""

    id: int
    kind: NodeKind
    """`cpu`: has CPUs. `gpu`: the memory of a GPU. `memory_only`: CXL, HBM, DAX."""
    cpus: tuple[int, ...]
    """Online CPUs."""
    cpus_allowed: tuple[int, ...]
    """Those this process may use; empty: nothing here to bind to."""
    package: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: tuple[int, ...] = ()
    """The kernel's, in the order of the nodes' ids; 10 is local."""


@dataclass(frozen=True)
class Host:
    """The computer, as firmware and kernel describe it; None where they do not."""

    vendor: str | None = None
    product: str | None = None
    kernel: str | None = None
    cpu_model: str | None = None
    hypervisor: bool | None = None
    """The CPU reports that it runs in a guest. None: not known (a file does not say)."""
    packages: int | None = None
    numa_balancing: str | None = None
    thp: str | None = None
    """Setting of transparent huge pages: always, madvise or never."""
    iommu: str | None = None
    """What the kernel command line says about it."""


@dataclass(frozen=True)
class Process:
    """What this process may use, kernel lists such as `0-3,8`; a snapshot keeps it to explain what it shows."""

    cpus_allowed: str | None = None
    mems_allowed: str | None = None
    visible: tuple[tuple[str, str], ...] = ()
    """(name, value) of the environment variables that hide or reorder devices."""
    can_set_mempolicy: bool | None = None
    """Whether the call was allowed when it was tried; None: not tried (a file)."""
    can_setaffinity: bool | None = None
    can_move_pages: bool | None = None


@dataclass(frozen=True)
class Source:
    """Where the description comes from."""

    kind: SourceKind
    name: str | None = None
    """File name without its folder, or the name of a shipped machine; None for this host."""
    detail: str = ""
    """`hwloc XML 2.0`, `NCCL XML 1`, ..."""


@dataclass(frozen=True)
class Note:
    """Something a person should know, and what to do about it."""

    kind: NoteKind
    code: str
    """Stable, for programs: `no-gpu`, `no-nvml`, `numa-conflict`, ..."""
    text: str
    todo: str = ""


@dataclass(frozen=True)
class PageBytes:
    """Bytes of host memory by their distance from one GPU."""

    local_bytes: int = 0
    """On the GPU's own NUMA node or, where that has no memory, the nearest one that has."""
    same_socket_bytes: int = 0
    """On another node of the GPU's socket."""
    remote_bytes: int = 0
    """On another socket."""
    unknown_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes looked at."""
        return sum(astuple(self))

    def __add__(self, other: PageBytes) -> PageBytes:
        return PageBytes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Measurement:
    """One run of copies on one set of GPUs."""

    rung: str
    gpus: tuple[int, ...]
    direction: Direction
    per_gpu_bytes_s: tuple[float, ...]
    """In the order of `gpus`."""
    aggregate_bytes_s: float
    seconds: float
    repeats: int
    spread: float | None = None
    """(largest - smallest) / median of the aggregate over the repeats."""
    buffer_node: str | None = None
    """NUMA node of the host buffers: `own`, `other`, or a number."""
    replays: int | None = None
    """PCIe replays counted during the run."""
    in_bytes_s: float | None = None
    """Its two directions, of which `aggregate_bytes_s` is the sum where both ran."""
    out_bytes_s: float | None = None
    placement: PageBytes | None = None
    """Where the pages of all its buffers were found; None where they were not looked at."""
    bytes_copied: float | None = None
    """Both directions, all GPUs and repeats, from start to end: more than what the window counts."""
    bytes_counted: float | None = None
    """The same by the GPUs' PCIe byte counters, packet headers included or not; None where one has none."""


@dataclass(frozen=True)
class Machine:
    """Everything known about one machine."""

    source: Source
    host: Host = field(default_factory=Host)
    process: Process | None = None
    nodes: tuple[NumaNode, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    groups: tuple[Group, ...] = ()
    notes: tuple[Note, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    pair_or_socket: PairOrSocket = "not_separated"
    """Which limit a measurement of one pair alone left standing."""
    title: str | None = None
    """One line for people: `8 x NVIDIA H200, two sockets`."""

    def links_of(self, gpu: int) -> tuple[Link, ...]:
        """Every link the copies of that GPU cross, as listed."""
        return tuple(link for link in self.links if gpu in link.gpus)

    def link(self, link_id: str) -> Link:
        """The link of that id; KeyError where there is none."""
        for link in self.links:
            if link.id == link_id:
                return link
        raise KeyError(link_id)

    def noted(self, kind: NoteKind) -> tuple[Note, ...]:
        """The notes of one kind."""
        return tuple(note for note in self.notes if note.kind == kind)
