"""Which GPUs share a way to the CPU: shared, not shared, or unverified; never more than the evidence carries.

shared        a common real bridge on bare metal
not_shared    different root ports through real bridges, on bare metal
unverified    everything else: emulated bridges, a guest, a flat bus, files. The groups suspected are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from offbench.topology.facts import HOSTBRIDGE, MULTIPLE, SINGLE
from offbench.topology.links import Bridge, Group, Sharing
from offbench.topology.model import Gpu, Note, Source

Ground = Literal["bare metal", "guest", "unknown", "file"]
"""What the evidence stands on. Only on bare metal does a bridge prove anything."""

_DOUBT: dict[Ground, str] = {
    "guest": "this is a guest: its PCI tree is the hypervisor's drawing",
    "unknown": "nothing tells whether this is bare metal or a guest",
    "file": "known from a file only",
}


def ground_of(source: Source, hypervisor: bool | None) -> Ground:
    """What there is to stand on: files are claims, and only a CPU without a hypervisor flag means bare metal."""
    if source.kind not in ("live", "root"):
        return "file"
    return "unknown" if hypervisor is None else ("guest" if hypervisor else "bare metal")


def uplink_id(bridge: Bridge) -> str:
    """The id of the link a bridge's group shares."""
    return f"uplink {bridge.bdf}"


def find_groups(
    gpus: Sequence[Gpu], bridges: Sequence[Bridge], levels: Mapping[tuple[int, int], int], ground: Ground
) -> tuple[tuple[Group, ...], tuple[Note, ...]]:
    """Groups by size of their first GPU, larger before smaller, and conflicts between bridges and NVML's distances.

    Bridges with the same GPUs are one group, named after the one nearest the CPU; groups nest. Every GPU is in at
    least one group, alone where it shares nothing or nothing is known. Levels are by index of `gpus`.
    """
    notes: list[Note] = []
    found: dict[tuple[int, ...], Group] = {}
    for members, same in by_members(bridges).items():
        if _cards(gpus, members) > 1:
            found[members] = _below_bridge(members, same[0], same, levels, ground, notes)
        elif len(members) > 1:
            found[members] = Group(members, "shared", None, ("MIG instances of one GPU share its link",))
    for members, level in _components(len(gpus), levels):
        if any(set(members) <= set(group) for group in found):
            continue  # the bridges say so too, and in more detail
        if any(gpus[member].chain for member in members):
            notes.append(_no_bridge(members, level))
        word = "one PCIe bridge" if level == SINGLE else "PCIe bridges"
        evidence = (f"PCIe distance of the pair: {word}, no host bridge", "the bridge itself is not visible")
        found[members] = Group(members, "unverified", _level_id(members), (*evidence, *_doubts(ground, ())))
    grouped = {member for members in found for member in members}
    lone = [gpu for gpu in gpus if gpu.index not in grouped]
    everything = [*found.values(), *_ungrouped(lone, bridges, ground)]
    return tuple(sorted(everything, key=lambda group: (group.gpus[0], -len(group.gpus)))), tuple(notes)


def by_members(bridges: Iterable[Bridge]) -> dict[tuple[int, ...], list[Bridge]]:
    """Bridges that could hold traffic back, by the GPUs below them. Inner levels of a non-blocking chip cannot,
    unless a single GPU hangs there: then it is the port of that GPU."""
    found: dict[tuple[int, ...], list[Bridge]] = {}
    for bridge in bridges:
        inner = bridge.chip is not None and bridge.chip != bridge.bdf
        members = tuple(sorted(bridge.gpus))
        if inner and len(members) > 1 and members not in found:
            continue
        found.setdefault(members, []).append(bridge)
    return found


def _cards(gpus: Sequence[Gpu], members: tuple[int, ...]) -> int:
    return len({gpus[member].bdf for member in members})


def _level_id(members: tuple[int, ...]) -> str:
    return "uplink " + "-".join(f"gpu{member}" for member in members)


def _below_bridge(
    members: tuple[int, ...],
    top: Bridge,
    same: Sequence[Bridge],
    levels: Mapping[tuple[int, int], int],
    ground: Ground,
    notes: list[Note],
) -> Group:
    evidence = [f"common bridge {top.bdf}" + (f" ({top.vendor_device})" if top.vendor_device else "")]
    pairs = [(one, other) for one in members for other in members if one < other and (one, other) in levels]
    far = [pair for pair in pairs if levels[pair] >= HOSTBRIDGE]
    if pairs and not far:
        evidence.append("the PCIe distances agree: no host bridge between them")
    if far:
        one, other = far[0]
        text = f"GPU {one} and {other} hang below bridge {top.bdf}, but their PCIe distance crosses a host bridge"
        notes.append(Note("conflict", "sharing-conflict", text, "measure the pair: offbench topo --measure"))
    doubts = (*_doubts(ground, same), *(("sources differ",) if far else ()))
    sharing: Sharing = "unverified" if doubts else "shared"
    return Group(members, sharing, uplink_id(top), (*evidence, *doubts))


def _doubts(ground: Ground, bridges: Iterable[Bridge]) -> tuple[str, ...]:
    emulated = sorted({bridge.emulated for bridge in bridges if bridge.emulated is not None})
    found = [f"the bridge is emulated by {name}" for name in emulated]
    if ground != "bare metal":
        found.append(_DOUBT[ground])
    return tuple(found)


def _ungrouped(lone: Sequence[Gpu], bridges: Sequence[Bridge], ground: Ground) -> Iterable[Group]:
    """GPUs below no common bridge: apart on bare metal through real bridges, else suspected by root complex."""
    by_name = {bridge.bdf: bridge for bridge in bridges}
    suspected: dict[str, list[Gpu]] = {}
    for gpu in lone:
        above = [by_name[bdf] for bdf in gpu.chain]
        doubts = _doubts(ground, above)
        if above and not doubts:
            yield Group((gpu.index,), "not_shared", None, (f"own root port {gpu.chain[0]}, real bridges, bare metal",))
        elif gpu.root is None or not _same_root_is_suspect(gpu, above):
            why = "no bridge is visible" if not above else "its bridges prove nothing"
            yield Group((gpu.index,), "unverified", None, (why, *doubts))
        else:
            suspected.setdefault(gpu.root, []).append(gpu)
    for root, members in suspected.items():
        flat = "on the same root bus without a bridge" if not members[0].chain else "below the same root complex"
        text = f"{flat} ({root})" if len(members) > 1 else "no bridge is visible above it"
        yield Group(tuple(gpu.index for gpu in members), "unverified", None, (text, *_doubts(ground, ())))


def _same_root_is_suspect(gpu: Gpu, above: Sequence[Bridge]) -> bool:
    return not above or all(bridge.emulated is not None for bridge in above)


def _components(count: int, levels: Mapping[tuple[int, int], int]) -> Iterable[tuple[tuple[int, ...], int]]:
    """Sets of two or more GPUs no host bridge apart: below one bridge, then below several."""
    seen: set[tuple[int, ...]] = set()
    for bound in (SINGLE, MULTIPLE):
        label = list(range(count))
        for (one, other), level in levels.items():
            if level <= bound and label[one] != label[other]:
                low, high = sorted((label[one], label[other]))
                label = [low if name == high else name for name in label]
        for name in sorted(set(label)):
            members = tuple(index for index in range(count) if label[index] == name)
            if len(members) > 1 and members not in seen:
                seen.add(members)
                yield members, bound


def _no_bridge(members: tuple[int, ...], level: int) -> Note:
    names = ", ".join(str(member) for member in members)
    apart = "one bridge" if level == SINGLE else "several bridges"
    text = f"GPUs {names} are {apart} apart by NVML, but by sysfs they share none"
    return Note("conflict", "sharing-conflict", text, "measure them together and apart: offbench topo --measure")
