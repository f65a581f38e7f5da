"""Where one rank runs and where its pinned memory lies, seen from its GPU: bound if asked to, and looked at again
after everything that may change it. No torch here.

Libraries reset CPU masks (NCCL restores the launcher's, Megatron-Bridge#4630), full nodes send pages elsewhere without
a word: what counts is what is found afterwards, with --numa and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbench import hardware, placement
from offbench.pages import Ask, Ranges, look, memory_home
from offbench.placement import PROC, SYSFS, Placement, format_cpulist, page_nodes
from offbench.record import RankPages
from offbench.topology import sysfs as kernel
from offbench.topology.evidence import weigh
from offbench.topology.facts import NodeClaim
from offbench.topology.model import NumaNode, PageBytes
from offbench.topology.nvml import claims_of
from offbench.units import count, gib

NEAR = 0.99
"""A bound rank with less than this share of its pinned memory on its own node gets a warning."""


def home_node(bus_id: str, nodes: Sequence[NumaNode], sysfs: Path = SYSFS, nvml: Any = None) -> int | None:
    """NUMA node of the GPU at that address, NVML's word before the kernel's; None where neither knows one."""
    own = placement.gpu_node(bus_id, sysfs)
    by_kernel = () if own is None else (NodeClaim("sysfs numa_node", frozenset({own})),)
    return weigh((*claims_of(nvml or hardware.load_nvml(), bus_id, nodes), *by_kernel), nodes).value


@dataclass
class Whereabouts:
    """One rank's place. Call joined(), planned(), pinned() and close() in the order of a launch."""

    rank: int
    bus_id: str | None
    """The GPU's address; None on a CPU device."""
    node: int | None
    """Its NUMA node."""
    nodes: Sequence[NumaNode]
    bound: Placement | None
    """What --numa did; None where it was not given."""
    rebind: Callable[[], Placement]
    mates: int = 1
    """Ranks of this host whose GPU is on the same node, this one counted."""
    proc: Path = PROC
    ask: Ask = page_nodes
    warnings: list[str] = field(default_factory=list)
    _after_pinning: PageBytes | None = None

    @staticmethod
    def take(rank: int, bus_ids: Sequence[str], numa: bool) -> Whereabouts:
        """Find the rank's place and, with --numa, bind to it: before any other thread or pinned page exists.

        bus_ids: GPUs of this host's ranks in their order; empty on a CPU device.
        """
        nodes = kernel.read_nodes(SYSFS, PROC)
        homes = [home_node(bus_id, nodes) for bus_id in bus_ids]
        bus_id, node = (bus_ids[rank], homes[rank]) if bus_ids else (None, None)

        def bind() -> Placement:
            return placement.bind(bus_id, node=node)

        return Whereabouts(rank, bus_id, node, nodes, bind() if numa else None, bind, max(1, homes.count(node)))

    def seen(self, bus_id: str) -> None:
        """The GPU's address as CUDA says it, which counts where NVML gave none."""
        if self.bus_id is None:
            self.bus_id, self.node = bus_id, home_node(bus_id, self.nodes)

    def joined(self) -> None:
        """After process-group start and before anything is pinned: bind again what a library has set free."""
        strayed = self._strayed()
        if strayed:
            self.bound = self.rebind()
            self._warn(f"{self._left(strayed)} at process-group start; bound again before pinning")

    def planned(self, nbytes: int) -> None:
        """Before a rank pins so many bytes: a full node sends pages elsewhere without a word. Page cache counts as
        full, since the kernel takes another node's free pages before it drops it."""
        if self.bound is None or self.node is None:
            return
        home = memory_home(self.node, self.nodes)
        free = next((node.free_bytes for node in self.nodes if node.id == home), None)
        if len(self.nodes) > 1 and free is not None and nbytes * self.mates > free:
            ranks = count(self.mates, "rank")
            self._warn(
                f"{gib(nbytes * self.mates)} GiB are to be pinned on node {home} by {ranks}, {gib(free)} GiB are free "
                "there: the rest will lie on other nodes; free memory there (page cache too), or run fewer ranks"
            )

    def pinned(self, ranges: Ranges) -> None:
        """After pinning."""
        self._after_pinning = self._look(ranges)

    def close(self, ranges: Ranges) -> RankPages:
        """After the window: the record's row."""
        strayed, pages = self._strayed(), self._look(ranges)
        if strayed:
            self._warn(f"{self._left(strayed)} by the end of the window")
        if pages is not None:
            self._judge(pages)
        return RankPages(
            rank=self.rank,
            gpu_node=self.node,
            numa=self.bound.describe() if self.bound is not None else None,
            memory_policy=self.bound.memory if self.bound is not None else None,
            strayed_threads=len(strayed) if strayed is not None else None,
            **(vars(pages) if pages is not None else {}),
        )

    def _judge(self, pages: PageBytes) -> None:
        first = self._after_pinning.local_bytes if self._after_pinning is not None else 0
        if pages.local_bytes < NEAR * first:
            self._warn(f"pinned memory has left its node: {gib(first)} GiB were local after pinning")
        if self.bound is not None and self.bound.status == "bound" and pages.local_bytes < NEAR * pages.total:
            rest = f"{gib(pages.same_socket_bytes)} on its socket, {gib(pages.remote_bytes)} remote"
            self._warn(
                f"only {gib(pages.local_bytes)} of {gib(pages.total)} GiB of pinned memory are on the node of its GPU "
                f"({rest}, {gib(pages.unknown_bytes)} unknown)"
            )

    def _look(self, ranges: Ranges) -> PageBytes | None:
        """Host memory of a CPU device has no GPU to be near to."""
        return look(ranges, self.node, self.nodes, self.proc, self.ask) if self.bus_id is not None else None

    def _strayed(self) -> list[int] | None:
        """Threads outside the CPUs of a bound rank; None where the rank is not bound."""
        if self.bound is None or self.bound.status != "bound":
            return None
        return placement.strayed_threads(self.bound.cpus, self.proc)

    def _left(self, strayed: Sequence[int]) -> str:
        cpus = format_cpulist(self.bound.cpus if self.bound is not None else ())
        return f"{count(len(strayed), 'thread')} outside the CPUs that --numa gave ({cpus})"

    def _warn(self, text: str) -> None:
        self.warnings.append(f"rank {self.rank}: {text}")
