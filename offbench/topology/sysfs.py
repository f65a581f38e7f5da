"""Reads /sys and /proc: GPUs and the bridges above them, NUMA nodes, host, process. The roots are arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from offbench.placement import parse_cpulist
from offbench.topology.capacity import parse_speed, parse_width
from offbench.topology.config_space import acs_redirects, max_payload
from offbench.topology.evidence import node_of_cpus
from offbench.topology.facts import NodeClaim, PciDevice, address_order, gpu_devices
from offbench.topology.links import Pcie
from offbench.topology.model import Host, NodeKind, NumaNode, Process

_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

VISIBLE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that hide or reorder devices."""
_GUEST_VENDORS = ("QEMU", "VMware", "Xen", "Microsoft Corporation", "Google", "Amazon EC2", "OpenStack", "innotek")


def read_devices(sysfs: Path, nodes: Iterable[NumaNode], known: Iterable[str] = ()) -> dict[str, PciDevice]:
    """Every GPU and every bridge above one, by address; {} where the kernel shows no PCI devices.

    `known` are addresses that another source calls a GPU.
    """
    folder = sysfs / "bus/pci/devices"
    if not folder.is_dir():
        return {}
    named = frozenset(known)
    plain = [_identify(entry, entry.name.lower() in named) for entry in folder.iterdir() if _BDF.fullmatch(entry.name)]
    every = {device.bdf: device for device in plain}
    cards = gpu_devices(plain)
    wanted = {bdf for card in cards for bdf in (*card.chain, card.bdf) if bdf in every}
    held = tuple(nodes)
    return {bdf: _in_full(every[bdf], folder, held) for bdf in sorted(wanted, key=address_order)}


def _identify(entry: Path, tagged: bool) -> PciDevice:
    """What it takes to tell a GPU: class, vendor, driver, and the way up, which is the resolved path."""
    parts = entry.resolve().parts
    roots = [part for part in parts if _ROOT.fullmatch(part)]
    driver = entry / "driver"
    return PciDevice(
        bdf=entry.name.lower(),
        root=roots[0] if roots else None,
        chain=tuple(part for part in parts[:-1] if _BDF.fullmatch(part)),
        pci_class=int(_read(entry / "class") or "0", 16) >> 8,
        vendor=_hex(_read(entry / "vendor")),
        device=_hex(_read(entry / "device")),
        driver=driver.resolve().name if driver.exists() else None,
        tagged=tagged,
    )


def _in_full(device: PciDevice, folder: Path, nodes: tuple[NumaNode, ...]) -> PciDevice:
    entry = folder / device.bdf
    config = _config(entry / "config")
    pcie = Pcie(
        max_gt_s=parse_speed(_read(entry / "max_link_speed")),
        max_width=parse_width(_read(entry / "max_link_width")),
        current_gt_s=parse_speed(_read(entry / "current_link_speed")),
        current_width=parse_width(_read(entry / "current_link_width")),
        source="sysfs",
        max_payload_bytes=max_payload(config),
        acs=acs_redirects(config),
        iommu=_read(entry / "iommu_group/type"),
    )
    return PciDevice(
        **{**vars(device), "pcie": pcie, "numa": tuple(_node_claims(device, entry.resolve(), folder, nodes))}
    )


def _node_claims(device: PciDevice, entry: Path, folder: Path, nodes: tuple[NumaNode, ...]) -> Iterable[NodeClaim]:
    own = _integer(_read(entry / "numa_node"))
    if own is not None:
        yield NodeClaim("sysfs numa_node", frozenset({own} if own >= 0 else ()), str(own))
    if own is None or own < 0:
        for bdf in reversed(device.chain):
            above = _integer(_read(folder / bdf / "numa_node"))
            if above is not None and above >= 0:
                yield NodeClaim(f"sysfs ancestor {bdf}", frozenset({above}))
                break
    listed = _read(entry / "local_cpulist")
    cpus = parse_cpulist(listed) if listed is not None else parse_cpumask(_read(entry / "local_cpus"))
    if cpus:
        yield NodeClaim("sysfs local_cpulist", node_of_cpus(cpus, nodes))


def read_nodes(sysfs: Path, proc: Path) -> tuple[NumaNode, ...]:
    """The NUMA nodes in order, none where the kernel shows none. Offline CPUs are left out."""
    root = sysfs / "devices/system"
    online = _read(root / "cpu/online")
    allowed = _status(proc).get("Cpus_allowed_list")
    graphics = frozenset(gpu_memory_nodes(proc).values())
    nodes = []
    for folder in (root / "node").glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        listed = _read(folder / "cpulist")
        cpus = parse_cpulist(listed) if listed is not None else parse_cpumask(_read(folder / "cpumap"))
        cpus &= parse_cpulist(online) if online is not None else cpus
        kind: NodeKind = "cpu" if cpus else ("gpu" if number in graphics else "memory_only")
        memory = dict(re.findall(r"(MemTotal|MemFree):\s+(\d+)", _read(folder / "meminfo") or ""))
        nodes.append(
            NumaNode(
                id=number,
                kind=kind,
                cpus=tuple(sorted(cpus)),
                cpus_allowed=tuple(sorted(cpus & parse_cpulist(allowed) if allowed is not None else cpus)),
                package=_package(root, cpus),
                memory_bytes=int(memory["MemTotal"]) << 10 if "MemTotal" in memory else None,
                free_bytes=int(memory["MemFree"]) << 10 if "MemFree" in memory else None,
                distances=tuple(int(word) for word in (_read(folder / "distance") or "").split()),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.id))


def _package(root: Path, cpus: Iterable[int]) -> int | None:
    """The one physical package of those CPUs; None where they are of several, of none, or the kernel says -1."""
    found = {_integer(_read(root / f"cpu/cpu{cpu}/topology/physical_package_id")) for cpu in cpus}
    only = found.pop() if len(found) == 1 else None
    return only if only is not None and only >= 0 else None


def packages(sysfs: Path) -> int | None:
    """How many physical packages the online CPUs are of; None where the kernel does not say."""
    files = (sysfs / "devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    ids = {number for file in files if (number := _integer(_read(file))) is not None and number >= 0}
    return len(ids) or None


def gpu_memory_nodes(proc: Path) -> dict[str, int]:
    """NUMA node of each GPU's own memory, by address, from the NVIDIA driver's numa_status."""
    found = {}
    for file in (proc / "driver/nvidia/gpus").glob("*/numa_status"):
        node = re.search(r"^Node:\s+(\d+)", _read(file) or "", re.MULTILINE)
        if node is not None:
            found[file.parent.name.lower()] = int(node[1])
    return found


def driver_gpus(proc: Path) -> frozenset[str]:
    """Addresses the NVIDIA driver has claimed, as it lists them in /proc; empty without the driver."""
    return frozenset(entry.name.lower() for entry in (proc / "driver/nvidia/gpus").glob("*") if ":" in entry.name)


def read_host(sysfs: Path, proc: Path) -> Host:
    """Firmware, kernel and CPU; None for whatever is not shown."""
    vendor, product = (_read(sysfs / "class/dmi/id" / name) for name in ("sys_vendor", "product_name"))
    info = _read(proc / "cpuinfo") or ""
    model = re.search(r"^(?:model name|cpu|Processor)\s*:\s*(.+)$", info, re.MULTILINE)
    thp = re.search(r"\[(\w+)\]", _read(sysfs / "kernel/mm/transparent_hugepage/enabled") or "")
    translation = re.findall(r"\S*iommu\S*=\S+", _read(proc / "cmdline") or "")
    return Host(
        vendor=vendor,
        product=product,
        kernel=_read(proc / "sys/kernel/osrelease"),
        cpu_model=model[1].strip() if model else None,
        hypervisor=_in_guest(info, vendor, product),
        packages=packages(sysfs),
        numa_balancing=_read(proc / "sys/kernel/numa_balancing"),
        thp=thp[1] if thp else None,
        iommu=" ".join(translation) or None,
    )


def _in_guest(cpuinfo: str, vendor: str | None, product: str | None) -> bool | None:
    """x86 CPUs report a hypervisor among their flags. Other CPUs do not; there the firmware's vendor may tell."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is not None:
        return "hypervisor" in flags[1].split()
    if vendor is not None and vendor.startswith(_GUEST_VENDORS) and not (product or "").endswith(".metal"):
        return True
    return None


def read_process(proc: Path, env: Mapping[str, str]) -> Process:
    """What this process may use, and what its environment hides."""
    status = _status(proc)
    return Process(
        cpus_allowed=status.get("Cpus_allowed_list"),
        mems_allowed=status.get("Mems_allowed_list"),
        visible=tuple((name, env[name]) for name in VISIBLE if name in env),
    )


def parse_cpumask(text: str | None) -> frozenset[int]:
    """CPUs of a mask in 32-bit hex words, high word first (`0000ffff,ffffffff`), also with 0x or empty words."""
    value = 0
    for word in (text or "").strip().split(","):
        value = value << 32 | int(word or "0", 16)
    return frozenset(bit for bit in range(value.bit_length()) if value >> bit & 1)


def _status(proc: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in (_read(proc / "self/status") or "").splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _config(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _integer(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"-?\d+", text) else None


def _hex(text: str | None) -> str | None:
    return f"{int(text, 16):04x}" if text else None
