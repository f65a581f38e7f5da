"""The measurement ladder: which GPUs copy at the same time, in which direction, to which memory, and what that tells.

Each rung answers one question about the machine; a level of the machine limits the copies only if it carries less
than its parts carry alone. Pure: whoever runs the copies is a `Crew`, so tests bring machines of their own making.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, Protocol

from offbench.topology.links import Direction
from offbench.topology.model import PageBytes

Kind = Literal["alone", "group", "socket", "all", "remote", "node", "matrix", "equal"]

Set = frozenset[int]
Rates = dict[tuple[Set, Direction], float]
"""(GPUs that copied together from local memory, direction) -> aggregate, bytes/s."""

DIRECTIONS: tuple[Direction, ...] = ("in", "out", "both")
BINDS = 0.95
"""A level that carries less than this share of what its parts carry alone limits the copies."""
REPEATS = 3
WINDOW_S = 1.0
"""Shortest window of one repeat."""
MATRIX_WINDOW_S = 0.3
SETTLE_S = 0.3
"""From the go to the window's start: the link leaves its idle state and all copies are under way."""
PREPARE_S = 25.0
"""Starting the processes, their CUDA contexts and pinning their buffers: about this long, all at the same time."""
WORST_RATE = 10 * 2**30
"""Rate to assume when telling beforehand how long the equal-bytes rung takes, bytes/s each way and GPU."""

ANSWERS: dict[Kind, str] = {
    "alone": "each GPU's own link",
    "group": "uplinks shared by several GPUs",
    "socket": "what one socket carries",
    "all": "what the host carries",
    "remote": "the price of memory on the other socket",
    "node": "what each node's memory is to one GPU",
    "matrix": "groups that the tree does not show",
    "equal": "the workload itself: equal bytes both ways",
}


@dataclass(frozen=True)
class Rung:
    """GPUs (indices of the machine's list) that copy at the same time, the others idle."""

    kind: Kind
    gpus: tuple[int, ...]
    direction: Direction
    buffers: str = "local"
    """Which host memory: `local`, `remote` (another socket), or `node K`."""
    window_s: float = WINDOW_S
    repeats: int = REPEATS
    each_way_bytes: int | None = None
    """Bytes each way per GPU to move until all are done; None: copy for the length of the window."""

    @property
    def title(self) -> str:
        """`socket, GPUs 0-3, both`."""
        names = ",".join(map(str, self.gpus))
        return f"{self.kind}, GPU{'s' if len(self.gpus) > 1 else ''} {names}, {self.direction}"


@dataclass(frozen=True)
class Layout:
    """What the ladder must know about the machine: who may share what. Indices of the machine's GPU list."""

    gpus: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    """GPUs below a common bridge, or suspected to be."""
    sockets: tuple[tuple[int, ...], ...] = ()
    hidden: bool = False
    """Whether the tree may hide sharing: then every pair is tried."""
    remote: bool = False
    """Whether there is another NUMA node to place buffers on."""
    nodes: tuple[int, ...] = ()
    """Nodes other than the first GPU's own whose memory that one is to copy to, one after the other."""


@dataclass(frozen=True)
class Sample:
    """What one GPU did in one repeat of a rung."""

    gpu: int
    nbytes: Mapping[Literal["in", "out"], float]
    """Bytes that arrived inside the window."""
    seconds: float
    link: str | None = None
    """PCIe link read while copying, as `Gen5 x16`."""
    replays: int | None = None
    """PCIe replays counted during the repeat; None where there is no counter."""
    copied: Mapping[Literal["in", "out"], float] = field(default_factory=dict)
    """Bytes of the whole repeat, window or not."""
    counted: Mapping[Literal["in", "out"], float | None] = field(default_factory=dict)
    """The same by the GPU's PCIe byte counters; None where there is none."""
    placement: Mapping[str, int] | None = None
    """Fields of PageBytes for the buffers; None where they were not looked at."""

    @property
    def rate(self) -> float:
        """Bytes/s, directions summed."""
        return sum(self.nbytes.values()) / self.seconds


class Crew(Protocol):
    """One process per GPU that copies when told to."""

    def run(self, rung: Rung) -> list[Sample]:
        """One repeat of a rung; a sample for each of its GPUs."""


@dataclass(frozen=True)
class Outcome:
    """A rung with all of its repeats."""

    rung: Rung
    repeats: tuple[tuple[Sample, ...], ...]

    @property
    def per_gpu(self) -> dict[int, float]:
        """GPU -> median rate over the repeats, bytes/s."""
        return {
            gpu: statistics.median(s.rate for samples in self.repeats for s in samples if s.gpu == gpu)
            for gpu in self.rung.gpus
        }

    @property
    def aggregate(self) -> float:
        """Median over the repeats of the sum over GPUs, bytes/s."""
        return statistics.median(sum(s.rate for s in samples) for samples in self.repeats)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the aggregate over the repeats."""
        totals = [sum(s.rate for s in samples) for samples in self.repeats]
        return (max(totals) - min(totals)) / statistics.median(totals)

    @property
    def seconds(self) -> float:
        """Median over the repeats of the time until the last GPU was done."""
        return statistics.median(max(s.seconds for s in samples) for samples in self.repeats)

    @property
    def replays(self) -> int | None:
        """PCIe replays of all repeats; None where nothing counts them."""
        counts = [s.replays for samples in self.repeats for s in samples if s.replays is not None]
        return sum(counts) if counts else None

    @property
    def copied(self) -> float | None:
        """Bytes of all repeats; None where nobody noted them."""
        return sum(b for samples in self.repeats for s in samples for b in s.copied.values()) or None

    @property
    def counted(self) -> float | None:
        """The same by PCIe byte counters; None where some GPU has none."""
        found = [s.counted.get(way) for samples in self.repeats for s in samples for way in s.copied]
        return sum(c for c in found if c is not None) if found and None not in found else None

    @property
    def placement(self) -> PageBytes | None:
        """Where the buffers of its GPUs are; None where some were not looked at."""
        found = [None if s.placement is None else PageBytes(**s.placement) for s in self.repeats[0]]
        return None if None in found else sum((p for p in found if p is not None), PageBytes())

    def way(self, direction: Literal["in", "out"]) -> float:
        """Median aggregate of one direction alone, bytes/s; in a both-ways rung its share."""
        totals = [sum(s.nbytes.get(direction, 0.0) / s.seconds for s in samples) for samples in self.repeats]
        return statistics.median(totals)


def plan(layout: Layout, each_way_bytes: int) -> list[Rung]:
    """The rungs for a machine, cheapest question first; equal sets of GPUs are measured once."""
    rungs = [Rung("alone", (gpu,), direction) for gpu in layout.gpus for direction in DIRECTIONS]
    seen: set[tuple[int, ...]] = {(gpu,) for gpu in layout.gpus}
    levels: list[tuple[Kind, Sequence[tuple[int, ...]]]] = [
        ("group", layout.groups),
        ("socket", layout.sockets),
        ("all", [layout.gpus]),
    ]
    for kind, sets in levels:
        for gpus in sets:
            if gpus not in seen:
                seen.add(gpus)
                rungs += [Rung(kind, gpus, direction) for direction in DIRECTIONS]
    if layout.remote:
        rungs += [Rung("remote", layout.gpus, direction, "remote") for direction in DIRECTIONS]
    rungs += [Rung("node", layout.gpus[:1], d, f"node {node}", repeats=1) for node in layout.nodes for d in DIRECTIONS]
    if layout.hidden:
        ways: tuple[Direction, ...] = ("in", "both")
        rungs += [
            Rung("matrix", pair, direction, window_s=MATRIX_WINDOW_S, repeats=1)
            for pair in combinations(layout.gpus, 2)
            for direction in ways
            if pair not in seen
        ]
    return [*rungs, Rung("equal", layout.gpus, "both", each_way_bytes=each_way_bytes)]


def estimate_s(rungs: Sequence[Rung]) -> float:
    """Seconds the rungs will take about, start-up included."""
    copying = sum(
        rung.repeats
        * (SETTLE_S + (rung.window_s if rung.each_way_bytes is None else rung.each_way_bytes / WORST_RATE))
        for rung in rungs
    )
    return PREPARE_S + copying


def climb(rungs: Sequence[Rung], crew: Crew, on_rung: Callable[[int, Rung], None]) -> Iterator[Outcome]:
    """Run the rungs in order; `on_rung` hears the number done so far and the rung that starts."""
    for number, rung in enumerate(rungs):
        on_rung(number, rung)
        yield Outcome(rung, tuple(tuple(crew.run(rung)) for _ in range(rung.repeats)))
