"""What a person should know about a machine, from the machine alone: conflicts, doubts, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterable

from offbench.placement import format_cpulist
from offbench.topology.capacity import line_rate
from offbench.topology.model import Gpu, Machine, Note
from offbench.units import count, gib

MEASURE = "measure it: offbench topo --measure"


def notes_on(machine: Machine) -> tuple[Note, ...]:
    """Everything worth saying, conflicts first."""
    return (
        *_numa(machine),
        *_emulated(machine),
        *_flat(machine),
        *_links(machine),
        *_settings(machine),
        *_paths(machine),
        *_nodes(machine),
    )


def _named(gpus: Iterable[Gpu]) -> str:
    """`GPU 3`, `GPUs 0-3,6`."""
    indices = [gpu.index for gpu in gpus]
    return f"GPU{'s' if len(indices) > 1 else ''} {format_cpulist(indices)}"


def _numa(machine: Machine) -> Iterable[Note]:
    for gpu in machine.gpus:
        if gpu.numa.confidence == "conflict":
            said = "; ".join(f"{claim.source} says {claim.value}" for claim in gpu.numa.claims)
            text = f"{_named([gpu])}: sources differ about its NUMA node: {said}; node {gpu.numa.value} is used"
            yield Note("conflict", "numa-conflict", text, "measure copies from each node: offbench topo --measure")
    lost = [gpu for gpu in machine.gpus if gpu.numa.value is None]
    if lost:
        text = f"{_named(lost)}: no source says on which NUMA node; unknown is not node 0"
        yield Note("degraded", "numa-unknown", text, "measure copies from each node: offbench topo --measure")
    homes = {node.id: node for node in machine.nodes}
    placed = [(gpu, homes[gpu.numa.value]) for gpu in machine.gpus if gpu.numa.value in homes]
    cut_off = [gpu for gpu, home in placed if home.cpus and not home.cpus_allowed]
    if cut_off:
        text = f"{_named(cut_off)}: none of the CPUs this process may use are on the node of the GPU"
        yield Note("warning", "cpuset", text, "ask the scheduler for CPUs on the node of the GPU; runs go on unbound")


def _emulated(machine: Machine) -> Iterable[Note]:
    makers = sorted({bridge.emulated for bridge in machine.bridges if bridge.emulated is not None})
    if makers:
        text = f"bridges emulated by {', '.join(makers)}: they hide or invent sharing, and their speed is a claim"
        yield Note("degraded", "emulated-bridges", text, MEASURE)
    lower = []
    for link in machine.links:
        own, least = link.rate("in"), link.path_min
        if makers and own is not None and least is not None and least.bytes_s < 0.99 * own.bytes_s:
            lower.append((link, least, own))
    if lower:
        link, least, own = lower[0]
        text = (
            f"{link.id}: its emulated bridges claim {gib(least.bytes_s)} GiB/s ({least.source}), the GPU itself "
            f"{gib(own.bytes_s)}; the GPU's is shown" + (f"; the same for {len(lower) - 1} more" if lower[1:] else "")
        )
        yield Note("warning", "emulated-speed", text, MEASURE)


def _flat(machine: Machine) -> Iterable[Note]:
    bare = [gpu for gpu in machine.gpus if not gpu.chain and gpu.bdf is not None and gpu.data_path == "pcie"]
    if len(bare) > 1:
        text = f"{_named(bare)}: no bridge is visible above them, so which of them share an uplink cannot be seen"
        yield Note("degraded", "flat", text, "find the groups by copying in pairs: offbench topo --measure")


def _links(machine: Machine) -> Iterable[Note]:
    unknown = [machine.gpus[link.gpus[0]] for link in machine.links if link.kind == "gpu_link" and not link.rates]
    unknown = [gpu for gpu in unknown if gpu.data_path == "pcie"]
    if unknown:
        text = f"{_named(unknown)}: link speed or width is not known; floors leave the link out and say so"
        yield Note("degraded", "link-unknown", text, MEASURE)
    idle = [gpu for gpu in machine.gpus if _below_its_best(gpu)]
    if idle and machine.source.kind == "live":
        text = f"{_named(idle)}: the link now runs below its maximum, as idle GPUs do; arithmetic uses the maximum"
        yield Note("warning", "idle-link", text, "read it under load: offbench topo --measure")


def _below_its_best(gpu: Gpu) -> bool:
    now = line_rate(gpu.pcie.current_gt_s, gpu.pcie.current_width)
    best = line_rate(gpu.pcie.max_gt_s, gpu.pcie.max_width)
    return now is not None and best is not None and now < best


def _settings(machine: Machine) -> Iterable[Note]:
    """What firmware and kernel have set, and nothing here can change. ACS only concerns traffic between GPUs."""
    ports = {bridge.bdf: bridge for bridge in machine.bridges if bridge.emulated is None}
    for gpu in machine.gpus:
        port = ports.get(gpu.chain[-1]) if gpu.chain else None
        mine, theirs = gpu.pcie.max_payload_bytes, port.pcie.max_payload_bytes if port else None
        if port and mine and theirs and mine != theirs:
            text = (
                f"{_named([gpu])}: MaxPayload is {mine} bytes at the GPU and {theirs} at the port above ({port.bdf})"
            )
            yield Note("warning", "max-payload", text, "set one size in firmware, or boot with pci=pcie_bus_perf")
    translated = [gpu for gpu in machine.gpus if (gpu.pcie.iommu or "identity") != "identity"]
    if translated:
        text = f"{_named(translated)}: the IOMMU translates their copies ({translated[0].pcie.iommu})"
        yield Note("warning", "iommu", text, "if copies are slow, boot with iommu=pt and measure again")


def _paths(machine: Machine) -> Iterable[Note]:
    other = [gpu for gpu in machine.gpus if gpu.data_path != "pcie"]
    if other:
        ways = ", ".join(sorted({gpu.data_path for gpu in other}))
        text = f"{_named(other)}: copies go over {ways}; PCIe is not the data path and is no part of the floor"
        yield Note("warning", "not-pcie", text, MEASURE)
    instances = [gpu for gpu in machine.gpus if gpu.mig_parent is not None]
    if instances:
        text = f"{_named(instances)}: MIG instances; the link is the whole GPU's, shared with its other instances"
        yield Note("degraded", "mig", text, "a floor per instance is not given; use a whole GPU to compare")


def _nodes(machine: Machine) -> Iterable[Note]:
    with_cpus = [node for node in machine.nodes if node.kind == "cpu"]
    packages = machine.host.packages
    if packages is not None and with_cpus and packages > len(with_cpus):
        text = f"{packages} sockets but {count(len(with_cpus), 'NUMA node')}: NUMA is off, or the guest hides it"
        yield Note("warning", "sockets-without-nodes", text, "switch NUMA on in firmware and kernel to bind by socket")
