"""What a machine looks like to a copy between host memory and a GPU. Plain frozen data: no detection, no arithmetic.

What copies cross (links, bridges, groups) is in `offbench.topology.links`. The machine is kept flat (nodes, bridges,
GPUs, links, groups), as it is written to JSON; `offbench.topology.tree` nests it for drawing: machine > socket > NUMA
node > root complex > switch > GPU. Nothing here is ever guessed: a value that no source gave is None, and every source
and value is kept beside the value that was chosen.

Addresses are lower-case `dddd:bb:dd.f`. Rates are bytes per second. `in` is host to device, `out` device to host,
`both` the two at the same time, summed. GPUs are named by `Gpu.index` everywhere.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Literal

from offbench.topology.links import Bridge, Direction, Group, Link, Pcie

Confidence = Literal["high", "medium", "none", "conflict"]
"""`high` two independent sources agree; `medium` one source; `none` no source knows; `conflict` sources differ."""
DataPath = Literal["pcie", "c2c", "nvlink", "unified"]
NodeKind = Literal["cpu", "gpu", "memory_only"]
SourceKind = Literal["live", "root", "hwloc", "nccl", "smi", "offbench"]
NoteKind = Literal["degraded", "conflict", "warning", "limit"]
"""`degraded` this machine lacks something; `conflict` sources differ; `limit` what an imported file cannot tell."""
PairOrSocket = Literal["pair", "socket", "not_separated"]


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
