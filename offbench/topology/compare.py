"""A file held against the machine itself: its word is added to the evidence, never put above a live source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from offbench.placement import format_cpulist
from offbench.topology.evidence import weigh
from offbench.topology.facts import NodeClaim
from offbench.topology.model import Claim, Evidence, Gpu, Machine, Note


def with_claims(machine: Machine, claimed: Machine) -> Machine:
    """`machine` with what `claimed` (read from a file) says of the same GPUs, joined by address.

    A node the machine did not know is filled in, one that agrees raises the confidence, one that differs is a
    conflict and does not win. GPUs or shared uplinks that only one of the two has are conflicts too.
    """
    theirs = {gpu.bdf: gpu for gpu in claimed.gpus if gpu.bdf is not None}
    gpus = tuple(_joined(machine, gpu, theirs.get(gpu.bdf or ""), claimed) for gpu in machine.gpus)
    notes = (*_nodes(machine, gpus), *_listed(machine, claimed), *_shared(machine, claimed))
    return replace(machine, gpus=gpus, notes=(*machine.notes, *notes))


def _name(claimed: Machine) -> str:
    return claimed.source.name or claimed.source.detail


def _joined(machine: Machine, gpu: Gpu, other: Gpu | None, claimed: Machine) -> Gpu:
    if other is None or other.numa.value is None:
        return gpu
    word = NodeClaim(f"file {_name(claimed)}", frozenset({other.numa.value}))
    # What was decided stands for all that was said before, as the most trusted word.
    settled = [] if gpu.numa.value is None else [NodeClaim("machine itself", frozenset({gpu.numa.value}))]
    verdict = weigh([*settled, word], machine.nodes)
    confidence = gpu.numa.confidence if gpu.numa.confidence == "conflict" else verdict.confidence
    home = next((node for node in machine.nodes if node.id == verdict.value), None)
    numa = Evidence(verdict.value, confidence, (*gpu.numa.claims, Claim(word.source, word.written)))
    return replace(gpu, numa=numa, package=home.package if home else gpu.package)


def _nodes(machine: Machine, gpus: Iterable[Gpu]) -> Iterable[Note]:
    before = {gpu.index: gpu.numa.confidence for gpu in machine.gpus}
    differ = [gpu for gpu in gpus if gpu.numa.confidence == "conflict" and before[gpu.index] != "conflict"]
    if differ:
        said = ", ".join(
            f"GPU {gpu.index}: {gpu.numa.value} here, {gpu.numa.claims[-1].value} there" for gpu in differ
        )
        text = f"{differ[0].numa.claims[-1].source} names other NUMA nodes ({said}); those of the machine are used"
        yield Note("conflict", "numa-conflict", text, "do not use the file, or measure: offbench topo --measure")


def _listed(machine: Machine, claimed: Machine) -> Iterable[Note]:
    here, there = ({gpu.bdf for gpu in side.gpus if gpu.bdf is not None} for side in (machine, claimed))
    for what, some in (("lists GPUs this machine lacks", there - here), ("lacks GPUs of this machine", here - there)):
        if some:
            text = f"file {_name(claimed)} {what}: {', '.join(sorted(some))}"
            yield Note("conflict", "gpu-list", text, "the file describes another machine, or is wrong")


def _shared(machine: Machine, claimed: Machine) -> Iterable[Note]:
    """Groups below bridges, compared where both sides see one or the other side sees the GPUs at all."""
    here, there = _groups(machine), _groups(claimed)
    index = {gpu.bdf: gpu.index for gpu in machine.gpus}
    for group in sorted(there - here, key=sorted):
        if group <= index.keys():
            names = format_cpulist(index[bdf] for bdf in group)
            text = f"file {_name(claimed)} puts GPUs {names} below one bridge; this machine shows none they share"
            yield Note(
                "conflict", "sharing-conflict", text, "measure them together and apart: offbench topo --measure"
            )


def _groups(machine: Machine) -> set[frozenset[str]]:
    found = set()
    for group in machine.groups:
        members = [machine.gpus[index].bdf for index in group.gpus]
        if group.link is not None and len(members) > 1:
            found.add(frozenset(bdf for bdf in members if bdf is not None))
    return found
