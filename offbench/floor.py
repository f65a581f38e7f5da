"""The least time the copies of one training step can take: bytes over capacity, for the link that binds.

Rank i moves d_i bytes in (host to device, "down") and u_i bytes out ("up") over a fixed path of links. For a link l

    T_l = max( sum d_i / C_down, sum u_i / C_up, sum (d_i + u_i) / C_both )        floor = max over l of T_l

with each sum over the ranks whose path crosses l. Routes are fixed, so constant rates bytes / floor satisfy every
link: the bound is tight and needs no linear program. A link with no both-ways figure is taken as full duplex. A link
without any figure for bytes that cross it is left out and named; the floor is then marked incomplete, never infinite.
Rates are bytes/s, times seconds. Pure: no files, no hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from offbench.record import Floor as FloorRow
from offbench.record import Link, Moved
from offbench.topology.links import Direction, Rate, RateKind

GPU_LINK = "gpu_link"


@dataclass(frozen=True)
class Capacity:
    """What one link carries; None is unknown."""

    link: str
    down: Rate | None = None
    up: Rate | None = None
    both: Rate | None = None
    """Both directions at once, summed; None: full duplex, each direction keeps its own."""

    @staticmethod
    def of(
        link: str,
        down: float | None = None,
        up: float | None = None,
        both: float | None = None,
        kind: RateKind = "measured",
        source: str = "measured here",
    ) -> Capacity:
        """From plain figures of one kind, bytes/s."""

        def rate(direction: Direction, figure: float | None) -> Rate | None:
            return None if figure is None else Rate(direction, figure, kind, source)

        return Capacity(link, rate("in", down), rate("out", up), rate("both", both))


@dataclass(frozen=True)
class Flow:
    """What one rank moves in a step, and over which links."""

    rank: int
    bytes_in: float
    bytes_out: float
    path: tuple[str, ...]
    """Names of links; those without a Capacity are unknown."""


Tree = tuple[Sequence[Capacity], Mapping[int, tuple[str, ...]]]
"""Capacities, and the path of each rank over them."""


@dataclass(frozen=True)
class Use:
    """One link in a step: the time it needs, and for which bytes."""

    link: str
    seconds: float
    direction: Direction
    bytes: float
    """Bytes that cross it in that direction."""
    rate: Rate
    """Its capacity in that direction."""


@dataclass(frozen=True)
class Floor:
    """The floor of one variant, with every link that was considered."""

    variant: str
    uses: tuple[Use, ...]
    """Slowest first; the first one binds."""
    missing: tuple[str, ...]
    """Links whose capacity is unknown for bytes that cross them."""
    flows: tuple[Flow, ...]
    ends_s: float = 0.0
    """Of a pipeline: seconds on top, while only one direction has anything to move."""

    @property
    def bound_by(self) -> Use | None:
        """The link that binds; None when no capacity is known."""
        return self.uses[0] if self.uses else None

    @property
    def seconds(self) -> float | None:
        """Least seconds; 0 when nothing moves, None when no link that is crossed has a known capacity."""
        if not any(flow.bytes_in or flow.bytes_out for flow in self.flows):
            return 0.0
        return self.uses[0].seconds + self.ends_s if self.uses else None

    @property
    def complete(self) -> bool:
        """Whether every link that is crossed was counted."""
        return not self.missing

    def slack(self, use: Use) -> float:
        """Share of the floor in which this link could rest: 0 for the one that binds."""
        return 1 - use.seconds / self.uses[0].seconds if self.uses[0].seconds else 0.0

    @property
    def rank_rate(self) -> float | None:
        """Bytes/s each way of the busiest rank and direction at the floor; None without a floor."""
        if not self.seconds:
            return None
        return max(max(flow.bytes_in, flow.bytes_out) for flow in self.flows) / self.seconds


def least_time(
    capacities: Iterable[Capacity], flows: Sequence[Flow], variant: str = "duplex", *, serial: bool = False
) -> Floor:
    """The floor of these flows. With `serial` nothing ever moves both ways at once: T_l = d / C_down + u / C_up."""
    known = {capacity.link: capacity for capacity in capacities}
    uses, missing = [], []
    for link, (down, up) in loads(flows).items():
        capacity = known.get(link)
        if capacity is None or not _covers(capacity, down, up):
            missing.append(link)
        if capacity is not None and (use := (_serial if serial else _duplex)(capacity, down, up)) is not None:
            uses.append(use)
    uses.sort(key=lambda use: -use.seconds)
    return Floor(variant, tuple(uses), tuple(missing), tuple(flows))


def pipelined(floor: Floor, capacities: Iterable[Capacity], chunk_bytes: float) -> Floor:
    """That floor and the ends of a pipeline of chunks: nothing can go out while the first chunk comes in, and nothing
    is left to come in while the last one goes out. Both cross at the rate a rank has alone; the slowest rank counts.
    Gaps between chunks would come on top. It holds for chunks of that size: with smaller ones the ends shrink.
    """
    known = list(capacities)
    alone = 0.0
    for flow in floor.flows:
        down, up = min(chunk_bytes, flow.bytes_in), min(chunk_bytes, flow.bytes_out)
        ends = (replace(flow, bytes_in=down, bytes_out=0.0), replace(flow, bytes_in=0.0, bytes_out=up))
        alone = max(alone, sum(least_time(known, [end]).seconds or 0.0 for end in ends))
    return replace(floor, variant="pipeline", ends_s=alone)


def loads(flows: Iterable[Flow]) -> dict[str, tuple[float, float]]:
    """Bytes (in, out) that cross each link, in order of first appearance; links nothing crosses are left out."""
    found: dict[str, tuple[float, float]] = {}
    for flow in flows:
        for link in dict.fromkeys(flow.path):
            down, up = found.get(link, (0.0, 0.0))
            found[link] = down + flow.bytes_in, up + flow.bytes_out
    return {link: load for link, load in found.items() if any(load)}


def _covers(capacity: Capacity, down: float, up: float) -> bool:
    """Whether some figure holds for the bytes of each direction."""
    return not (
        (down and capacity.down is None and capacity.both is None)
        or (up and capacity.up is None and capacity.both is None)
    )


def _duplex(capacity: Capacity, down: float, up: float) -> Use | None:
    parts = ((down, capacity.down), (up, capacity.up), (down + up, capacity.both))
    # A link that did not bind when it was measured cannot bind now: its parts do, at the same time or before.
    found = [
        Use(capacity.link, size / rate.bytes_s, rate.direction, size, rate)
        for size, rate in parts
        if rate is not None and size and not rate.at_least
    ]
    return max(found, key=lambda use: use.seconds, default=None)


def _serial(capacity: Capacity, down: float, up: float) -> Use | None:
    """One way at a time. A both-ways figure bounds each way as well, where it is the smaller one."""
    seconds, slowest = 0.0, None
    for size, way in ((down, capacity.down), (up, capacity.up)):
        rates = [rate for rate in (way, capacity.both) if rate is not None and not rate.at_least]
        if rates and size:
            least = min(rates, key=lambda rate: rate.bytes_s)
            seconds += size / least.bytes_s
            slowest = least if slowest is None or least.bytes_s < slowest.bytes_s else slowest
    if slowest is None:
        return None
    return Use(capacity.link, seconds, slowest.direction, down + up, slowest)


def of_launch(moved: Moved, link: Link, tree: Tree | None = None, chunk_bytes: float | None = None) -> FloorRow:
    """The floor a launch's record carries, from the link rates measured in that launch.

    moved: bytes per step and rank; link: worst rank's rates, bytes/s; tree: measured capacities of what the local
    ranks share and each one's path, where known; it only ever raises the floor; chunk_bytes: the largest chunk, for
    the ends of the pipeline. Every rank is taken to move as much.
    Empty when nothing moves or no rate was measured: a figure that is not known is null.
    """
    down, up = moved.in_bytes_per_step or 0.0, moved.out_bytes_per_step or 0.0
    if not (down or up):
        return FloorRow()
    own = Capacity.of(GPU_LINK, link.in_bytes_per_s, link.out_bytes_per_s, link.both_bytes_per_s)
    alone = [Flow(0, down, up, (GPU_LINK,))]
    found = [least_time([own], alone)]
    if tree is not None:
        capacities, paths = tree
        found.append(least_time(capacities, [Flow(rank, down, up, path) for rank, path in paths.items()]))
    bound = max((floor.bound_by for floor in found if floor.bound_by), key=lambda use: use.seconds, default=None)
    serial = least_time([own], alone, "serial", serial=True)
    if bound is None:
        return FloorRow()
    way = "duplex" if bound.direction == "both" else bound.direction
    pipeline = None if chunk_bytes is None else bound.seconds + pipelined(found[0], [own], chunk_bytes).ends_s
    return FloorRow(
        seconds=bound.seconds,
        bound_by=f"{bound.link} {way}",
        serial_seconds=serial.seconds,
        pipeline_seconds=pipeline,
    )
