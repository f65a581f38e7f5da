"""Floors of a described machine: which links each rank's copies cross, what those carry, and which variants to show.

A link of an emulated bridge has only a claimed speed; it counts as unknown here, since such claims are off by factors
in both directions (aws p5: 16 GT/s x8 claimed above a Gen5 x16 GPU).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offbench.errors import UsageError
from offbench.floor import Capacity, Floor, Flow, Tree, least_time, pipelined
from offbench.topology.links import BEST_FIRST, Direction, Link, LinkKind, Rate, RateKind
from offbench.topology.model import Gpu, Machine

NEAR_GPU: tuple[LinkKind, ...] = ("gpu_link", "uplink", "c2c")
"""Links below the socket: what is left of the tree in the `uplink only` variant."""
PCIE: tuple[LinkKind, ...] = ("gpu_link", "uplink", "root_complex")
BETWEEN = "the link between sockets"
HIDDEN = "uplinks that are not visible"
UNPLACED = "memory of a node that is not known"
"""Names in a path that stand for what the machine's description lacks; they have no capacity, so floors name them."""
CHUNK_BYTES = 1 << 30
"""Chunks of the pipeline where nothing says how large they are."""
STEP_BYTES = 8
"""Least host memory traffic a parameter, each way, of fp32 AdamW on a CPU: both moments read and written. Parameters
and gradients add up to 12 more, as far as caches do not hold them."""
WAYS: tuple[Direction, ...] = ("in", "out", "both")


def floors(
    machine: Machine,
    bytes_in: float,
    bytes_out: float,
    ranks: int | None = None,
    remote: int | None = None,
    chunk_bytes: float = CHUNK_BYTES,
) -> list[Floor]:
    """Every variant for so many bytes per rank and step: duplex, uplink only, serial, link rate, a pipeline of chunks,
    and that many ranks (the first ones) whose host memory is on another socket.

    ranks: ranks on this machine, one per GPU in the machine's order; None: every GPU. remote: None: all of them where
    the link between sockets was measured, else that variant is left out.
    Raises UsageError when the machine has fewer GPUs than `ranks`, or fewer ranks than `remote`.
    """
    count = len(machine.gpus) if ranks is None else ranks
    if count > len(machine.gpus):
        raise UsageError(f"{count} ranks do not fit: this machine has {len(machine.gpus)} GPUs")
    if remote is not None and remote > count:
        raise UsageError(f"--remote {remote}: there are only {count} ranks on this machine")
    gpus = machine.gpus[:count]
    local = [Flow(gpu.index, bytes_in, bytes_out, path(machine, gpu)) for gpu in gpus]
    near = [Flow(f.rank, bytes_in, bytes_out, _only(machine, f.path, NEAR_GPU)) for f in local]
    pcie = [Flow(f.rank, bytes_in, bytes_out, _only(machine, f.path, PCIE)) for f in local]
    known = capacities(machine)
    found = [
        least_time(known, local, "duplex"),
        least_time(known, near, "uplink only"),
        least_time(known, local, "serial", serial=True),
        least_time(capacities(machine, ("line rate",)), pcie, "link rate"),
    ]
    found.append(pipelined(found[0], known, chunk_bytes))
    between = [link.rate("both", ("measured",)) for link in machine.links if link.kind == "inter_socket"]
    if remote is None and any(between):
        remote = count
    if remote:
        far = [Flow(g.index, bytes_in, bytes_out, path(machine, g, remote=i < remote)) for i, g in enumerate(gpus)]
        found.append(least_time(known, far, f"remote {remote}"))
    return found


def dram_floor(machine: Machine, bytes_in: float, bytes_out: float, params: float, rate: Rate, ranks: int) -> Floor:
    """The floor of host memory itself where CPUs run the optimizer step: the copies and STEP_BYTES a parameter each
    way, over what the memory of one NUMA node carries.

    params: parameters a rank updates; rate: one node's, reads and writes summed; ranks: the first so many GPUs.
    """
    gpus, step = machine.gpus[:ranks], STEP_BYTES * params
    names = [UNPLACED if gpu.numa.value is None else f"dram{gpu.numa.value}" for gpu in gpus]
    flows = [Flow(g.index, bytes_in + step, bytes_out + step, (name,)) for g, name in zip(gpus, names, strict=True)]
    known = [Capacity(name, both=rate) for name in dict.fromkeys(names) if name != UNPLACED]
    return least_time(known, flows, "DRAM")


def path(machine: Machine, gpu: Gpu, remote: bool = False) -> tuple[str, ...]:
    """Ids of the links between a GPU and its host memory, on its own socket or, if `remote`, on another.

    Parts whose data path is not PCIe (C2C, NVLink to the CPU) do not cross PCIe links.
    """
    crossed: list[Link] = []
    for link in machine.links_of(gpu.index):
        skipped = PCIE if gpu.data_path != "pcie" else ("c2c",)
        wrong_side = link.kind == ("dram" if remote else "inter_socket")
        if link.kind not in skipped and not wrong_side:
            crossed.append(link)
    ids = [link.id for link in crossed]
    if remote:
        others = [link.id for link in machine.links if link.kind == "dram" and gpu.index not in link.gpus]
        between = any(link.kind == "inter_socket" for link in crossed)
        ids += [*([] if between else [BETWEEN]), *others[:1]]
    if len(machine.gpus) > 1 and gpu.data_path == "pcie" and _unseen(machine, gpu.index):
        ids.append(HIDDEN)
    return tuple(ids)


def _unseen(machine: Machine, gpu: int) -> bool:
    """Whether the GPU may share a way to the CPU that the tree does not show."""
    mine = [group for group in machine.groups if gpu in group.gpus]
    return any(group.sharing == "unverified" and group.link is None for group in mine)


def _only(machine: Machine, ids: Iterable[str], kinds: Sequence[LinkKind]) -> tuple[str, ...]:
    wanted = {link.id for link in machine.links if link.kind in kinds} | {HIDDEN}
    return tuple(link for link in ids if link in wanted)


def capacities(machine: Machine, kinds: tuple[RateKind, ...] = BEST_FIRST) -> list[Capacity]:
    """The most trusted figures of those kinds for each link; claims of emulated bridges are left out."""

    def trusted(link: Link, direction: Direction) -> Rate | None:
        allowed = tuple(kind for kind in kinds if kind == "measured" or link.emulated is None)
        return link.rate(direction, allowed) if allowed else None

    found = []
    for link in machine.links:
        down, up, both = (trusted(link, direction) for direction in WAYS)
        # What arithmetic gives for both ways is the sum of the two: full duplex, no limit of its own.
        if both is not None and both.kind != "measured" and (down or up):
            both = None
        found.append(Capacity(link.id, down, up, both))
    return found


def measured_tree(machine: Machine, ranks: int) -> Tree:
    """Measured capacities of what several GPUs share, and the paths over them of the first `ranks` GPUs.

    For the floor of a launch, which measures each GPU's own link itself.
    """
    shared = {link.id for link in machine.links if len(link.gpus) > 1}
    known = [capacity for capacity in capacities(machine, ("measured",)) if capacity.link in shared]
    paths = {g.index: tuple(link for link in path(machine, g) if link in shared) for g in machine.gpus[:ranks]}
    return known, paths


def floor_json(floor: Floor) -> dict[str, object]:
    """One entry of `floors[]` in `topo --json`; rates in GiB/s, null where unknown."""
    bound = floor.bound_by
    rate = floor.rank_rate
    return {
        "variant": floor.variant,
        "seconds": floor.seconds,
        "bound_by": None if bound is None else {"link": bound.link, "direction": bound.direction},
        "per_rank_gib_s": None if rate is None else rate / 2**30,
        "slack": [
            {
                "link": use.link,
                "direction": use.direction,
                "seconds": use.seconds,
                "slack": floor.slack(use),
                "capacity_gib_s": use.rate.bytes_s / 2**30,
                "kind": use.rate.kind,
                "source": use.rate.source,
            }
            for use in floor.uses
        ],
        "complete": floor.complete,
        "missing": list(floor.missing),
        "bytes_in": floor.flows[0].bytes_in if floor.flows else None,
        "bytes_out": floor.flows[0].bytes_out if floor.flows else None,
        "ranks": len(floor.flows),
        "ends_s": None if floor.seconds is None else floor.ends_s,
    }
