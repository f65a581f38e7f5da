"""A machine as a tree in the terminal: one line per part, capacities in columns, 80 columns enough.

Levels that say nothing are left out (a socket with one NUMA node, a root complex with one child); above 8 GPUs, equal
neighbours share a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from offbench.placement import format_cpulist
from offbench.topology.capacity import generation
from offbench.topology.links import BEST_FIRST, Direction, Link
from offbench.topology.model import Gpu, Machine, NumaNode
from offbench.topology.tree import Branch, tree
from offbench.units import gib

WAYS: tuple[Direction, ...] = ("in", "out", "both")
COLUMNS = (8, 8, 8, 12)
"""Widths of in, out, both, and of how the figures are known."""
WIDEST = 100
MISSING = "-"
FOLD_ABOVE = 8
"""With more GPUs than this, equal ones below one bridge share a line."""
SHARING = {"shared": "shared", "not_shared": "not shared", "unverified": "shared?"}
GLYPHS = {True: ("├─ ", "└─ ", "│  "), False: ("|- ", "`- ", "|  ")}
"""Branch, last branch, and the line beside a branch; plain ones where the terminal's encoding lacks the others."""


@dataclass(frozen=True)
class Knot:
    """One line of the drawing and what hangs below it."""

    label: str
    link: Link | None = None
    children: tuple[Knot, ...] = ()
    gpus: tuple[int, ...] = ()
    """Only on lines that stand for GPUs."""


def draw(machine: Machine, console: Console) -> None:
    """Print the tree, the suspected groups and the legend."""
    console.print(headline(machine), markup=False, highlight=False, soft_wrap=True)
    root = knots(machine)
    if not machine.gpus:
        for prefix, knot in lines(root, _glyphs(console)):
            console.print(prefix + knot.label, markup=False, highlight=False, soft_wrap=True)
        return
    width = min(console.width, WIDEST)
    room = width - sum(COLUMNS) - 1
    heads = (*WAYS, "GiB/s by")
    console.print(Text(" " * room + _columns(heads), "dim"))
    for prefix, knot in lines(root, _glyphs(console)):
        label = Text.assemble((prefix, "dim"), (knot.label, "bold" if knot.gpus else ""))
        label.truncate(room, overflow="ellipsis", pad=True)
        row = label + _columns(figures(knot.link))
        row.rstrip()
        console.print(row, highlight=False)
    for line in remarks(machine):
        console.print(line, markup=False, highlight=False)


def _columns(texts: Sequence[str]) -> str:
    *numbers, kind = texts
    return "".join(text.rjust(size) for text, size in zip(numbers, COLUMNS[:3], strict=True)) + f"  {kind}"


def headline(machine: Machine) -> str:
    """What is drawn and, when it is not this host, where it comes from."""
    title, source = machine.title or "a machine", machine.source
    return title if source.kind == "live" else f"{title}\nfrom {source.name or source.kind}: not this machine"


def knots(machine: Machine) -> Knot:
    """The machine as it is drawn."""
    host = machine.host
    parts = [host.product or "host", host.cpu_model, "guest" if host.hypervisor else None]
    fold = len(machine.gpus) > FOLD_ABOVE
    sockets = [_socket(machine, branch, fold) for branch in tree(machine).children]
    between = [Knot(link.id, link) for link in machine.links if link.kind == "inter_socket"]
    return Knot(", ".join(filter(None, parts)), children=(*sockets, *between))


def _socket(machine: Machine, branch: Branch, fold: bool) -> Knot:
    name = "socket unknown" if branch.key == "socket?" else branch.key.replace("socket", "socket ")
    link = branch.links[0] if branch.links else None
    nodes = branch.children
    if len(nodes) == 1 and not nodes[0].links:
        label = f"{name}, {_node_label(machine, nodes[0])}"
        return Knot(label, link, _below(machine, nodes[0].children, fold))
    below = tuple(
        Knot(_node_label(machine, node), _node_link(machine, node), _below(machine, node.children, fold))
        for node in nodes
    )
    return Knot(name, link, below)


def _node_label(machine: Machine, branch: Branch) -> str:
    node = next((node for node in machine.nodes if f"node{node.id}" == branch.key), None)
    if node is None:
        return "NUMA node unknown" if branch.key == "node?" else branch.key.replace("node", "node ")
    return ", ".join(filter(None, [f"node {node.id}", _memory(node), _cpus(node)]))


def _node_link(machine: Machine, branch: Branch) -> Link | None:
    """The node's memory or, where the package is not known, the socket it is on."""
    if branch.links:
        return branch.links[0]
    return next((link for link in machine.links if link.id == f"socket of {branch.key}"), None)


def _cpus(node: NumaNode) -> str | None:
    return f"CPUs {format_cpulist(node.cpus)}" if node.cpus else None


def _memory(node: NumaNode) -> str | None:
    return None if node.memory_bytes is None else f"{node.memory_bytes / 2**30:.0f} GiB"


def _below(machine: Machine, branches: Sequence[Branch], fold: bool) -> tuple[Knot, ...]:
    found: list[Knot] = []
    for branch in branches:
        if branch.kind == "gpu" and branch.gpu is not None:
            link = branch.links[0] if branch.links else _own_link(machine, branch.gpu)
            found.append(Knot(_gpu_label(branch.gpu, link), link, gpus=branch.gpus))
            continue
        inside = _below(machine, branch.children, fold)
        if branch.kind == "root" and len(inside) == 1:
            found += inside
            continue
        link = branch.links[0] if branch.links else None
        if branch.kind == "bridge":
            shared = f", {SHARING[link.sharing]}" if link is not None and link.sharing else ""
            label = f"uplink {short(branch.key.removeprefix('uplink '))}{shared}"
        else:
            label = f"root bus {branch.key.removeprefix('pci').removeprefix('0000:')}"
        found.append(Knot(label, link, inside))
    return tuple(_folded(machine, found) if fold else found)


def _own_link(machine: Machine, gpu: Gpu) -> Link | None:
    """Of several MIG instances on one card: the card's link."""
    kinds = ("gpu_link", "c2c")
    return next((link for link in machine.links_of(gpu.index) if link.kind in kinds), None)


def _folded(machine: Machine, siblings: Sequence[Knot]) -> Iterator[Knot]:
    """Neighbouring GPUs with equal links as one line, without their addresses."""
    run: list[Knot] = []
    for knot in [*siblings, Knot("")]:
        if run and (not knot.gpus or _likeness(machine, knot) != _likeness(machine, run[0])):
            if len(run) > 1:
                indices = format_cpulist(gpu for member in run for gpu in member.gpus)
                yield replace(run[0], label=f"GPUs {indices}  {pcie(machine.gpus[run[0].gpus[0]], run[0].link)}")
            else:
                yield run[0]
            run = []
        if knot.gpus:
            run.append(knot)
        elif knot.label:
            yield knot


def _likeness(machine: Machine, knot: Knot) -> tuple[object, ...]:
    return (pcie(machine.gpus[knot.gpus[0]], knot.link), *figures(knot.link)) if knot.gpus else ()


def _gpu_label(gpu: Gpu, link: Link | None) -> str:
    name = f"GPU {gpu.index}" + (" (MIG)" if gpu.mig_parent else "")
    return "  ".join(filter(None, [name, pcie(gpu, link), short(gpu.bdf) if gpu.bdf else None]))


def pcie(gpu: Gpu, link: Link | None) -> str:
    """`Gen5 x16`, of the GPU's whole way alone where that is known; the name of another data path; or `unknown`."""
    if gpu.data_path != "pcie":
        return {"c2c": "C2C", "nvlink": "NVLink to the CPU", "unified": "unified memory"}[gpu.data_path]
    found = link.pcie if link is not None and link.pcie is not None else gpu.pcie
    number, width = generation(found.max_gt_s), found.max_width
    return f"Gen{number} x{width}" if number and width else "link unknown"


def short(bdf: str) -> str:
    """An address without the domain 0000."""
    return bdf.removeprefix("0000:")


def figures(link: Link | None) -> tuple[str, str, str, str]:
    """GiB/s in, out and both, all of the most trusted kind there is, and that kind; `>=` where it never limited."""
    rates = [] if link is None else [rate for way in WAYS if (rate := link.rate(way)) is not None]
    if link is None or not rates:
        return (*([MISSING if link else ""] * 3), "unknown" if link else "")  # type: ignore[return-value]
    kind = min((rate.kind for rate in rates), key=BEST_FIRST.index)
    shown = [link.rate(way, (kind,)) for way in WAYS]
    texts = [MISSING if r is None else (">=" if r.at_least else "") + gib(r.bytes_s) for r in shown]
    return texts[0], texts[1], texts[2], kind + ("?" if link.emulated and kind != "measured" else "")


def lines(root: Knot, glyphs: tuple[str, str, str]) -> Iterator[tuple[str, Knot]]:
    """(prefix, knot) from the top down."""
    yield "", root
    yield from _children(root, "", glyphs)


def _children(knot: Knot, prefix: str, glyphs: tuple[str, str, str]) -> Iterator[tuple[str, Knot]]:
    branch, last, beside = glyphs
    for child in knot.children:
        is_last = child is knot.children[-1]
        yield prefix + (last if is_last else branch), child
        yield from _children(child, prefix + ("   " if is_last else beside), glyphs)


def _glyphs(console: Console) -> tuple[str, str, str]:
    return GLYPHS["utf" in console.encoding.lower()]


def remarks(machine: Machine) -> Iterable[str]:
    """Groups without a bridge to draw them at, nodes nobody binds to, and what the columns mean."""
    for group in machine.groups:
        if len(group.gpus) > 1 and group.link is None:
            why = f" ({group.evidence[-1]})" if group.evidence else ""
            word = "share a way" if group.sharing == "shared" else "may share a way"
            yield f"GPUs {format_cpulist(group.gpus)} {word} to the CPU{why}"
    if len(machine.gpus) > 1 and all(len(g.gpus) == 1 and g.sharing == "unverified" for g in machine.groups):
        yield "which GPUs share an uplink is not visible here"
    for kind, name in (("gpu", "GPU memory"), ("memory_only", "memory without CPUs")):
        ids = [node.id for node in machine.nodes if node.kind == kind]
        if ids:
            yield f"NUMA nodes {format_cpulist(ids)}: {name}, never bound to"
    yield "GiB/s; in: host to device, both: in and out at once" + _marks(machine)


def _marks(machine: Machine) -> str:
    shown = [figures(link) for link in machine.links]
    texts = []
    if any(text.startswith(">=") for row in shown for text in row[:3]):
        texts.append(">=: never seen to limit")
    if any(row[3].endswith("?") for row in shown):
        texts.append("assumed?: an emulated bridge says so")
    if any(link.sharing == "unverified" for link in machine.links):
        texts.append("shared?: not verified")
    return "".join(f"; {text}" for text in texts)
