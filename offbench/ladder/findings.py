"""What the ladder's rates say about the machine: capacities, who really shares, and whether pair or socket limits.

A level binds only if its aggregate is below 0.95 of what its parts carry alone in the same direction; otherwise its
capacity is "this or more". Every aggregate is a best-observed figure, never a claim about physics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from offbench.ladder.health import notes_after, under_load
from offbench.ladder.plan import BINDS, DIRECTIONS, Layout, Outcome, Rates, Set
from offbench.topology.links import Group, Link, Rate, Sharing
from offbench.topology.model import Gpu, Machine, Measurement, PairOrSocket

HERE = "measured here"

SHARES = 0.75
"""Two GPUs together at less than this share of their rates alone have a common way: 0.5 shared, 1 independent."""
SEPARATES = 1.05
"""A pair alone must beat its share of the full socket by this much before the socket is blamed."""


def visible(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs to measure: those CUDA shows this process where that is known; hidden ones may be in use by others."""
    numbered = tuple(gpu for gpu in machine.gpus if gpu.cuda_ordinal is not None)
    return numbered or machine.gpus


def layout(machine: Machine) -> Layout:
    """Which sets of GPUs the ladder should run on this machine."""
    gpus = visible(machine)
    mine = {gpu.index for gpu in gpus}
    packages = {gpu.package for gpu in gpus if gpu.package is not None}
    memory_nodes = [node for node in machine.nodes if node.kind == "cpu" and node.cpus_allowed]
    remote = len(memory_nodes) > 1 and all(gpu.numa.value is not None for gpu in gpus)
    shared = {tuple(sorted(mine & set(group.gpus))) for group in machine.groups if group.sharing != "not_shared"}
    return Layout(
        gpus=tuple(gpu.index for gpu in gpus),
        groups=tuple(sorted((found for found in shared if len(found) > 1), key=lambda found: (len(found), found))),
        sockets=tuple(tuple(g.index for g in gpus if g.package == package) for package in sorted(packages)),
        hidden=len(gpus) > 2 and any(group.sharing == "unverified" for group in machine.groups),
        remote=remote,
        nodes=tuple(node.id for node in memory_nodes if node.id != gpus[0].numa.value) if remote and gpus else (),
    )


def learn(machine: Machine, outcomes: Sequence[Outcome]) -> Machine:
    """The machine with measured capacities, sharing, the pair-or-socket verdict and warnings added."""
    rates: Rates = {
        (frozenset(o.rung.gpus), o.rung.direction): o.aggregate
        for o in outcomes
        if o.rung.buffers == "local" and o.rung.kind != "equal"
    }
    groups = learn_groups(machine, outcomes, rates)
    links = [_with_rates(link, rates, groups) for link in machine.links]
    proven = {group.link: group.sharing for group in groups if group.link is not None}
    links = [replace(link, sharing=proven[link.id]) if link.id in proven else link for link in links]
    drawn = {frozenset(link.gpus) for link in links if link.kind == "uplink"}
    for group in groups:
        if group.sharing == "shared" and frozenset(group.gpus) not in drawn:
            found = Link(f"uplink of GPUs {_names(group.gpus)}", "uplink", group.gpus, sharing="shared")
            links.append(_with_rates(found, rates, groups))
    if any(outcome.rung.kind == "remote" for outcome in outcomes):
        sockets = [link for link in links if link.kind == "socket"]
        between = any(link.kind == "inter_socket" for link in links)
        links += [Link(f"{link.id} to others", "inter_socket", link.gpus) for link in sockets if not between]
    links = [_with_remote(link, outcomes) for link in links]
    return replace(
        machine,
        links=tuple(links),
        groups=tuple(groups),
        gpus=tuple(under_load(gpu, outcomes) for gpu in machine.gpus),
        notes=notes_after(machine, outcomes, rates),
        measurements=tuple(_measurement(outcome) for outcome in outcomes),
        pair_or_socket=pair_or_socket(layout(replace(machine, groups=tuple(groups))), rates),
    )


def pair_or_socket(layout: Layout, rates: Rates) -> PairOrSocket:
    """Which limit survives, from both-ways rates: a pair alone against its share of the full socket."""
    verdicts: set[PairOrSocket] = set()
    for socket in map(frozenset, layout.sockets):
        full = rates.get((socket, "both"))
        inside = [Set(group) for group in layout.groups if frozenset(group) < socket]
        if full is None or len(inside) < 2:
            continue
        for pair in inside:
            alone, parts = rates.get((pair, "both")), [rates.get((Set({gpu}), "both")) for gpu in pair]
            share = full * len(pair) / len(socket)
            if alone is not None and alone > SEPARATES * share:
                verdicts.add("socket")
            elif any(part is not None and part > SEPARATES * share for part in parts):
                verdicts.add("socket")  # even one GPU of the pair carries more than the pair's limit would be
            elif alone is not None and all(parts) and alone < BINDS * sum(part or 0 for part in parts):
                verdicts.add("pair")
    return verdicts.pop() if len(verdicts) == 1 else "not_separated"


def explain(machine: Machine) -> str:
    """The verdict for people."""
    if machine.pair_or_socket == "socket":
        return "pair or socket: the socket limits (a pair alone carries more than its share of a full socket)"
    if machine.pair_or_socket == "pair":
        return "pair or socket: the pair limits (a pair alone carries no more than beside a busy neighbour)"
    if machine.measurements:
        return "pair or socket: not separated (nothing, or nothing that a pair alone could tell apart, limits here)"
    return "pair or socket: not separated; `offbench topo --measure` runs one pair alone to tell"


def learn_groups(machine: Machine, outcomes: Sequence[Outcome], rates: Rates) -> list[Group]:
    """The groups with measured evidence; pairs of the matrix that share are joined into new groups."""
    groups = [_judged(group, rates) for group in machine.groups]
    ratios = {tuple(o.rung.gpus): _together(Set(o.rung.gpus), rates) for o in outcomes if o.rung.kind == "matrix"}
    if not ratios:
        return groups
    sharing = [pair for pair, ratio in ratios.items() if ratio is not None and ratio < SHARES]
    sharing += [group.gpus for group in groups if len(group.gpus) == 2 and group.sharing == "shared"]
    for cluster in _clusters(sharing):
        if not any(cluster <= set(group.gpus) and len(group.gpus) > 1 for group in groups):
            groups = [group for group in groups if not set(group.gpus) <= cluster]
            worst = max(r for pair, r in ratios.items() if r is not None and set(pair) <= cluster)
            text = f"measured: together {worst:.0%} of their rates alone"
            groups.append(Group(tuple(sorted(cluster)), "shared", None, (text,)))
    return sorted((_cleared(group) for group in groups), key=lambda group: group.gpus)


def _cleared(group: Group) -> Group:
    """A GPU that no pair of the matrix slowed down shares nothing."""
    if len(group.gpus) > 1 or group.sharing != "unverified":
        return group
    return replace(group, sharing="not_shared", evidence=(*group.evidence, "measured: no other GPU slows it"))


def _judged(group: Group, rates: Rates) -> Group:
    """A group of several with what running it alone says."""
    ratio = _together(Set(group.gpus), rates) if len(group.gpus) > 1 else None
    if ratio is None:
        return group
    sharing: Sharing = "shared" if ratio < SHARES else "not_shared"
    text = f"measured: together {ratio:.0%} of their rates alone"
    return replace(group, sharing=sharing, evidence=(*group.evidence, text))


def _together(gpus: Set, rates: Rates) -> float | None:
    """Least ratio, over directions, of the GPUs' rate together to the sum of their rates alone."""
    found = []
    for direction in DIRECTIONS:
        both, alone = rates.get((gpus, direction)), [rates.get((Set({gpu}), direction)) for gpu in gpus]
        if both is not None and all(rate is not None for rate in alone):
            found.append(both / sum(rate or 0 for rate in alone))
    return min(found, default=None)


def _clusters(pairs: Iterable[tuple[int, ...]]) -> list[set[int]]:
    """Connected components."""
    clusters: list[set[int]] = []
    for pair in pairs:
        joined = [cluster for cluster in clusters if cluster & set(pair)]
        clusters = [cluster for cluster in clusters if cluster not in joined]
        clusters.append(set(pair).union(*joined))
    return clusters


def _with_rates(link: Link, rates: Rates, groups: Sequence[Group]) -> Link:
    """The link with what was measured for exactly its GPUs; of a new and an older figure the better one stays."""
    below = _below(link, groups)
    if below is None:
        return link
    new = []
    for direction in DIRECTIONS:
        aggregate = rates.get((Set(link.gpus), direction))
        if aggregate is None:
            continue
        parts = [rates.get((part, direction)) for part in below]
        loose = bool(parts) and (None in parts or aggregate >= BINDS * sum(part or 0 for part in parts))
        new.append(Rate(direction, aggregate, "measured", HERE, at_least=loose))
    return _raised(link, new)


def _raised(link: Link, new: Sequence[Rate]) -> Link:
    """The link with the best measured rate of each direction: what was seen once the link can carry."""
    best = {rate.direction: rate for rate in new}
    for old in (rate for rate in link.rates if rate.kind == "measured"):
        if old.direction not in best or old.bytes_s > best[old.direction].bytes_s:
            best[old.direction] = old
    return replace(link, rates=(*best.values(), *(rate for rate in link.rates if rate.kind != "measured")))


def _below(link: Link, groups: Sequence[Group]) -> list[Set] | None:
    """The sets of GPUs whose own limits add up to the most this link could show; None: no rung measures it."""
    if link.kind in ("gpu_link", "c2c"):
        return []
    if link.kind in ("uplink", "root_complex"):
        return [Set({gpu}) for gpu in link.gpus]
    return _parts(Set(link.gpus), groups) if link.kind == "socket" else None


def _parts(socket: Set, groups: Sequence[Group]) -> list[Set]:
    """The largest groups inside a socket, and its GPUs that are in none."""
    inside = [Set(group.gpus) for group in groups if group.sharing == "shared" and Set(group.gpus) < socket]
    largest = [part for part in inside if not any(part < other for other in inside)]
    return largest + [Set({gpu}) for gpu in sorted(socket - Set().union(*largest))]


def _with_remote(link: Link, outcomes: Sequence[Outcome]) -> Link:
    """The link between sockets carries what its GPUs moved to memory on the other one."""
    if link.kind != "inter_socket":
        return link
    near = {(o.rung.gpus, o.rung.direction): o.per_gpu for o in outcomes if o.rung.kind in ("alone", "socket", "all")}
    new = []
    for far in (o for o in outcomes if o.rung.kind == "remote"):
        mine = sum(far.per_gpu.get(gpu, 0.0) for gpu in link.gpus)
        local = near.get((far.rung.gpus, far.rung.direction), {})
        loose = mine >= BINDS * sum(local.get(gpu, 0.0) for gpu in link.gpus)
        new.append(Rate(far.rung.direction, mine, "measured", HERE, at_least=loose))
    return _raised(link, new)


def _measurement(outcome: Outcome) -> Measurement:
    rung, rates = outcome.rung, outcome.per_gpu
    return Measurement(
        rung=rung.kind,
        gpus=rung.gpus,
        direction=rung.direction,
        per_gpu_bytes_s=tuple(rates[gpu] for gpu in rung.gpus),
        aggregate_bytes_s=outcome.aggregate,
        seconds=outcome.seconds,
        repeats=len(outcome.repeats),
        spread=outcome.spread if len(outcome.repeats) > 1 else None,
        buffer_node={"local": "own", "remote": "other"}.get(rung.buffers, rung.buffers.removeprefix("node ")),
        in_bytes_s=outcome.way("in") if rung.direction != "out" else None,
        out_bytes_s=outcome.way("out") if rung.direction != "in" else None,
        replays=outcome.replays,
        placement=outcome.placement,
        bytes_copied=outcome.copied,
        bytes_counted=outcome.counted,
    )


def _names(gpus: Iterable[int]) -> str:
    return ",".join(map(str, gpus))
