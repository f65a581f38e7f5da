"""A machine nested as people draw it: machine > socket > NUMA node > root complex > switch > GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offbench.topology.links import Bridge, Link
from offbench.topology.model import Gpu, Machine

BranchKind = Literal["machine", "socket", "node", "root", "bridge", "gpu"]


@dataclass(frozen=True)
class Branch:
    """One knot of the drawing with what hangs below it."""

    kind: BranchKind
    key: str
    """`socket0`, `node1`, `pci0000:44`, a bridge's address, `gpu3`; `socket?` and `node?` where it is unknown."""
    gpus: tuple[int, ...]
    links: tuple[Link, ...] = ()
    """Links that end here: the socket's, an uplink, the GPU's own."""
    children: tuple[Branch, ...] = ()
    bridge: Bridge | None = None
    gpu: Gpu | None = None

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Branch]]:
        """(depth, branch) of this and everything below, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def tree(machine: Machine) -> Branch:
    """Nest the machine. Sockets and CPU nodes without a GPU are shown too; root complexes only above GPUs, and of
    bridges those that several GPUs go through. A GPU whose node or package is not known hangs below `node?` of
    `socket?`."""
    packages = {node.package for node in machine.nodes if node.kind == "cpu"} | {gpu.package for gpu in machine.gpus}
    sockets = tuple(_socket(machine, package) for package in sorted(packages, key=_unknown_last))
    wide = tuple(link for link in machine.links if link.kind == "inter_socket")
    return Branch("machine", "machine", tuple(gpu.index for gpu in machine.gpus), wide, sockets)


def _unknown_last(number: int | None) -> tuple[bool, int]:
    return number is None, number or 0


def _socket(machine: Machine, package: int | None) -> Branch:
    gpus = [gpu for gpu in machine.gpus if gpu.package == package]
    known = {node.id for node in machine.nodes if node.kind == "cpu" and node.package == package}
    ids = sorted(known | {gpu.numa.value for gpu in gpus}, key=_unknown_last)
    nodes = tuple(_node(machine, [gpu for gpu in gpus if gpu.numa.value == node], node) for node in ids)
    members = tuple(gpu.index for gpu in gpus)
    key = "socket?" if package is None else f"socket{package}"
    return Branch("socket", key, members, _ending(machine, ("socket",), members), nodes)


def _node(machine: Machine, gpus: list[Gpu], node: int | None) -> Branch:
    roots: dict[str | None, list[Gpu]] = {}
    for gpu in gpus:
        roots.setdefault(gpu.root, []).append(gpu)
    children: list[Branch] = []
    for root, below in roots.items():
        inside = _below(machine, below)
        if root is None:
            children += inside  # text without addresses names no root complex
            continue
        members = tuple(gpu.index for gpu in below)
        children.append(Branch("root", root, members, _ending(machine, ("root_complex",), members), inside))
    members = tuple(gpu.index for gpu in gpus)
    key = "node?" if node is None else f"node{node}"
    return Branch("node", key, members, _ending(machine, ("dram",), members), tuple(children))


def _below(machine: Machine, gpus: list[Gpu], inside: frozenset[str] = frozenset()) -> tuple[Branch, ...]:
    """GPUs by the uplinks they share, the widest first, in the order of the GPUs; `inside` are uplinks above."""
    left = {gpu.index: gpu for gpu in gpus}
    shared = [link for link in machine.links if link.kind == "uplink" and link.id not in inside and len(link.gpus) > 1]
    branches: dict[int, Branch] = {}
    for link in sorted(shared, key=lambda link: -len(link.gpus)):
        if not left.keys() >= set(link.gpus):
            continue  # a narrower one of an uplink already drawn, or one that leaves this part of the machine
        members = [left.pop(index) for index in link.gpus]
        below = _below(machine, members, inside | {link.id})
        bridge = next((bridge for bridge in machine.bridges if bridge.bdf == link.bdf), None)
        branches[link.gpus[0]] = Branch("bridge", link.bdf or link.id, link.gpus, (link,), below, bridge)
    branches.update((index, _gpu(machine, gpu)) for index, gpu in left.items())
    return tuple(branch for _, branch in sorted(branches.items()))


def _gpu(machine: Machine, gpu: Gpu) -> Branch:
    links = tuple(link for link in machine.links_of(gpu.index) if link.kind in ("gpu_link", "c2c"))
    return Branch("gpu", f"gpu{gpu.index}", (gpu.index,), links, gpu=gpu)


def _ending(machine: Machine, kinds: tuple[str, ...], members: tuple[int, ...]) -> tuple[Link, ...]:
    return tuple(link for link in machine.links if members and link.kind in kinds and link.gpus == members)
