"""Text of `nvidia-smi topo -m` and `-mp`: a claim about PCIe distances and NUMA nodes, without addresses or speeds.

Columns vary by driver: none, CPU, CPU and NUMA, and GPU NUMA ID. Colours occur, and pasted tables lose their tabs, so
rows are split into words and matched to what a row can hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offbench.placement import parse_cpulist
from offbench.topology.build import build
from offbench.topology.facts import HOSTBRIDGE, INTERNAL, MULTIPLE, NODE, SINGLE, SYSTEM, Facts, GpuFacts, NodeClaim
from offbench.topology.model import Machine, Note, NumaNode, Source

SOURCE = "nvidia-smi topo"
_LEVELS = {
    "PSB": INTERNAL,
    "PIX": SINGLE,
    "PXB": MULTIPLE,
    "PHB": HOSTBRIDGE,
    "NODE": NODE,
    "SYS": SYSTEM,
    "SOC": SYSTEM,
}
_CELL = re.compile(r"X|NV\d+|PSB|PIX|PXB|PHB|NODE|SYS|SOC|N/A|OK|CNS|GNS|TNS|NS|U")
_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
_ROW = re.compile(r"\s*GPU\d+\s+(?:X|NV\d+|PSB|PIX|PXB|PHB|NODE|SYS|SOC)(?:\s|$)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class _Row:
    gpu: int
    cells: tuple[str, ...]
    """Distances to the header's columns, itself as X."""
    cpus: str | None
    nodes: str | None
    own_node: str | None
    """`GPU NUMA ID`: the node of the GPU's own memory."""


def looks_like_smi(text: str) -> bool:
    """Whether the text has a row of such a table."""
    return any(_ROW.match(line) for line in _COLOUR.sub("", text).splitlines())


def read_smi(text: str, name: str) -> Machine:
    """The machine of such a table. Raises ValueError where a row does not fit its header."""
    lines = _COLOUR.sub("", text).splitlines()
    header = next((line for line in lines if re.match(r"\s*GPU\d+\b", line) and not _ROW.match(line)), "")
    # Pasted headings run together, the last device with the first of them too: cut at the heading.
    devices = re.split(r"CPU Affinity|NUMA Affinity|GPU NUMA ID", header)[0].split()
    columns = [device for device in devices if re.fullmatch(r"GPU\d+", device)]
    rows = [_row(line.split(), len(devices), header) for line in lines if _ROW.match(line)]
    homes, guessed = _homes(rows)
    place = {row.gpu: index for index, row in enumerate(rows)}
    levels, hidden = {}, False
    for row in rows:
        for column, cell in zip(columns, row.cells, strict=False):
            other = int(column.removeprefix("GPU"))
            hidden = hidden or cell.startswith("NV")
            if cell in _LEVELS and other in place and other > row.gpu:
                levels[place[row.gpu], place[other]] = _LEVELS[cell]
    notes = tuple(_limits(hidden, len(columns) - len(rows), guessed))
    nodes = _nodes(rows, homes)
    gpus = tuple(_gpu(row, homes[row.gpu]) for row in rows)
    source = Source("smi", name, "text of nvidia-smi topo")
    return build(Facts(source=source, gpus=gpus, nodes=nodes, levels=levels, notes=notes))


def _row(words: list[str], devices: int, titles: str) -> _Row:
    """Split a row: as many distances as the header has devices, then what columns remain."""
    cells = words[1 : 1 + devices]
    if len(cells) < devices or not all(_CELL.fullmatch(cell) for cell in cells):
        raise ValueError(f"row {words[0]} has not one distance for each of the {devices} columns")
    lists = [word if _LIST.fullmatch(word) else None for word in words[1 + devices :]]
    cpus, nodes, own = (*lists, None, None, None)[:3]
    return _Row(
        gpu=int(words[0].removeprefix("GPU")),
        cells=tuple(cells),
        cpus=cpus if "CPU Affinity" in titles else None,
        nodes=nodes if "NUMA Affinity" in titles else None,
        own_node=own if "GPU NUMA ID" in titles else None,
    )


def _homes(rows: list[_Row]) -> tuple[dict[int, NodeClaim], bool]:
    """What the text says of each GPU's node, and whether the numbers had to be made from CPU lists.

    Old drivers print CPUs only: different lists are different nodes, numbered by their first CPU. One list for all
    says nothing: it may be a node, or every CPU of the host.
    """
    if any(row.nodes is not None for row in rows):
        return {
            row.gpu: NodeClaim(f"{SOURCE}, NUMA affinity", parse_cpulist(row.nodes or ""), row.nodes) for row in rows
        }, False
    lists = sorted({row.cpus for row in rows if row.cpus is not None}, key=lambda text: min(parse_cpulist(text)))
    if len(lists) < 2:
        return {row.gpu: NodeClaim(f"{SOURCE}, CPU affinity", frozenset(), row.cpus) for row in rows}, False
    return {
        row.gpu: NodeClaim(
            f"{SOURCE}, CPU affinity",
            frozenset({lists.index(row.cpus)} if row.cpus is not None else ()),
            f"CPUs {row.cpus}",
        )
        for row in rows
    }, True


def _nodes(rows: list[_Row], homes: Mapping[int, NodeClaim]) -> tuple[NumaNode, ...]:
    """The nodes that are named, with the CPUs listed for GPUs that are on one of them only (a job may see fewer)."""
    cpus: dict[int, frozenset[int]] = {}
    for row in rows:
        named = homes[row.gpu].nodes
        for node in named:
            seen = parse_cpulist(row.cpus or "") if len(named) == 1 else frozenset()
            cpus[node] = cpus.get(node, frozenset()) | seen
    graphics = {int(row.own_node) for row in rows if row.own_node is not None and row.own_node.isdigit()}
    cpu_nodes = [NumaNode(node, "cpu", tuple(sorted(own)), tuple(sorted(own))) for node, own in cpus.items()]
    own_memory = [NumaNode(node, "gpu", (), ()) for node in graphics - set(cpus)]
    return tuple(sorted((*cpu_nodes, *own_memory), key=lambda node: node.id))


def _gpu(row: _Row, home: NodeClaim) -> GpuFacts:
    own = int(row.own_node) if row.own_node is not None and row.own_node.isdigit() else None
    return GpuFacts(None, numa=(home,), memory_node=own, label=f"GPU{row.gpu}")


def _limits(hidden: bool, missing: int, guessed: bool) -> Iterator[Note]:
    """What such text cannot tell."""
    text = (
        "nvidia-smi text tells neither addresses, link speeds, packages (sockets), guest or bare metal, nor CUDA's "
        "order: GPUs are numbered as nvidia-smi does; PHB, NODE and SYS do not prove that GPUs share nothing"
    )
    yield Note("limit", "smi-text", text, "compare with the machine itself: offbench topo")
    if hidden:
        text = "NVLink (NV#) hides the PCIe distance of GPU pairs: which of them share a switch is not in this text"
        yield Note("limit", "nvlink-hides-pcie", text, "save `nvidia-smi topo -mp` instead")
    if missing > 0:
        text = f"{missing} of the GPUs in the header have no row"
        yield Note("limit", "rows-missing", text, "save the whole table")
    if guessed:
        text = "no NUMA column: nodes are told apart by their CPU lists and numbered by their first CPU"
        yield Note("limit", "node-numbers", text, "check the numbers with lscpu")
