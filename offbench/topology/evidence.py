"""From what several sources say to one NUMA node with a confidence; nothing is averaged and nothing is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offbench.topology.facts import NodeClaim
from offbench.topology.model import Claim, Evidence, NumaNode

TRUST = (
    "measured",
    "machine itself",
    "NVML memory affinity",
    "sysfs numa_node",
    "sysfs ancestor",
    "sysfs local_cpulist",
    "NVML CPU affinity",
    "CUDA host_numa_id",
)
"""Most trusted first. What is not named here (files) comes last."""


def weigh(claims: Iterable[NodeClaim], nodes: Sequence[NumaNode]) -> Evidence:
    """The most trusted node that is one node, and whether the others agree.

    -1, `every node with CPUs` and silence are all unknown; unknown is node 0 only where no other node has CPUs. Of a
    list that mixes CPU nodes and memory-only nodes the CPU nodes count. Readings of one witness (several sysfs files)
    agree with each other without adding confidence, but may contradict each other.
    """
    ordered = sorted(claims, key=lambda claim: _trust(claim.source))
    words = [(claim.source, claim, _single(claim.nodes, nodes)) for claim in ordered]
    kept = tuple(Claim(source, claim.written) for source, claim, _ in words)
    known = [(source.split()[0], node) for source, _, node in words if node is not None]
    if not known:
        only = [node.id for node in nodes if node.kind == "cpu"]
        if len(only) != 1:
            return Evidence(None, "none", kept)
        return Evidence(only[0], "medium", (*kept, Claim("only node with CPUs", str(only[0]))))
    best = known[0][1]
    if any(node != best for _, node in known):
        return Evidence(best, "conflict", kept)
    return Evidence(best, "high" if len({witness for witness, _ in known}) > 1 else "medium", kept)


def node_of_cpus(cpus: frozenset[int], nodes: Sequence[NumaNode]) -> frozenset[int]:
    """The nodes that own those CPUs; a single one where a job's cpuset or an offline CPU shortened the list."""
    return frozenset(node.id for node in nodes if cpus & frozenset(node.cpus))


def _trust(source: str) -> int:
    return next((place for place, name in enumerate(TRUST) if source.startswith(name)), len(TRUST))


def _single(claimed: frozenset[int], nodes: Sequence[NumaNode]) -> int | None:
    if not nodes:
        return next(iter(claimed)) if len(claimed) == 1 else None
    with_cpus = claimed & {node.id for node in nodes if node.kind == "cpu"}
    candidates = with_cpus or claimed
    return next(iter(candidates)) if len(candidates) == 1 else None
