"""Floors, measurements and notes of a machine as lines for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from offbench.floor import Floor, Use
from offbench.topology.links import Direction, LinkKind
from offbench.topology.model import Machine, Measurement, Note
from offbench.units import count, gib

KINDS: dict[LinkKind, str] = {
    "gpu_link": "GPU link",
    "uplink": "uplink",
    "root_complex": "root bus",
    "socket": "socket",
    "inter_socket": "link between sockets",
    "dram": "memory",
    "c2c": "C2C link",
}
DIFFERS = 0.05
"""The equal-bytes rung and the formula should agree this closely."""


def floor_lines(machine: Machine, floors: Sequence[Floor]) -> Iterator[str]:
    """The variants with what binds each, the slack of the rest, and what is missing."""
    flow = floors[0].flows[0]
    ranks = count(len(floors[0].flows), "rank")
    yield f"least time to move {gib(flow.bytes_in)} GiB in and {gib(flow.bytes_out)} GiB out a rank, {ranks} here"
    yield _row("floor", "seconds", "bound by", "its GiB/s", "a rank")
    for floor in floors:
        yield _floor_line(floor)
        rest = _slack(machine, floor)
        if floor.ends_s:
            yield _row("", "", f"{floor.ends_s:.2g} s of it: first chunk in, last one out")
        elif rest:
            yield _row("", "", f"slack: {rest}")
    missing = dict.fromkeys(link for floor in floors if floor.variant != "link rate" for link in floor.missing)
    if missing:
        yield f"* incomplete, the true floor may be higher: capacity not known of {_kinds(machine, missing)}"
        yield "  -> to know it, run offbench topo --measure on that machine"


def _row(name: str, seconds: str, bound: str, capacity: str = "", rate: str = "") -> str:
    return f"  {name:<12}{seconds:>7}  {bound:<33}{capacity:<16}{rate:>6}".rstrip()


def _floor_line(floor: Floor) -> str:
    bound, rate = floor.bound_by, floor.rank_rate
    if floor.seconds is None:
        return _row(floor.variant, "-*", "no link it crosses has a known capacity")
    if bound is None or rate is None:
        return _row(floor.variant, "0 ", "nothing moves")
    alike = sum(1 for use in floor.uses if use.seconds == bound.seconds)
    way = "in turn" if floor.variant == "serial" else bound.direction
    what = f"{_call(bound.link)}, {way}" + (f", {alike} alike" if alike > 1 else "")
    seconds = f"{floor.seconds:#.3g}".rstrip(".") + (" " if floor.complete else "*")
    # What crosses host memory in a step is not only copies.
    each = gib(rate) if floor.variant != "DRAM" else ""
    return _row(floor.variant, seconds, what, f"{gib(bound.rate.bytes_s)} {bound.rate.kind}", each)


def _call(link: str) -> str:
    """A link's id as people say it: `socket 0`, `GPU 3`, `uplink 44:00.0`."""
    spaced = re.sub(r"^(socket|gpu|dram)(?=\d)", r"\1 ", link)
    return spaced.replace("gpu ", "GPU ").replace("dram ", "memory of node ").replace(" 0000:", " ")


def _slack(machine: Machine, floor: Floor) -> str:
    """Least slack by kind of link, without the links that bind: `uplink 25 %, gpu_link 67 %`."""
    least: dict[str, float] = {}
    for use in floor.uses:
        if floor.slack(use) > 0:
            kind = _kind(machine, use)
            least[kind] = min(least.get(kind, 1.0), floor.slack(use))
    return ", ".join(f"{kind} {share:.0%}" for kind, share in least.items())


def _kind(machine: Machine, use: Use) -> str:
    """Memory that only --dram speaks of is no link of the machine."""
    return next((KINDS[link.kind] for link in machine.links if link.id == use.link), KINDS["dram"])


def _kinds(machine: Machine, links: Iterable[str]) -> str:
    """`4 uplinks, 2 sockets`; what is no link of the machine by its name."""
    known = {link.id: KINDS[link.kind] for link in machine.links}
    found = Counter(known[link] for link in links if link in known)
    return ", ".join([*(count(n, kind) for kind, n in found.items()), *(link for link in links if link not in known)])


def measurement_lines(machine: Machine) -> Iterator[str]:
    """One line a rung: aggregates in GiB/s, the range over the sets of GPUs it ran on, and the workload's own time."""
    rungs: dict[str, list[Measurement]] = {}
    for row in machine.measurements:
        rungs.setdefault(row.rung, []).append(row)
    ways: tuple[Direction, ...] = ("in", "out", "both")
    if any(name != "equal" for name in rungs):
        yield f"{'measured, GiB/s':<24}" + "".join(way.rjust(16) for way in ways)
    for name, rows in rungs.items():
        if name != "equal":
            sizes = sorted({len(row.gpus) for row in rows})
            label = f"  {name} ({'/'.join(map(str, sizes))} GPU{'s' if sizes[-1] > 1 else ''})"
            yield f"{label:<24}" + "".join(_range(rows, way).rjust(16) for way in ways)
    for row in rungs.get("equal", []):
        yield _equal_line(row)


def _range(rows: Sequence[Measurement], way: Direction) -> str:
    found = sorted(row.aggregate_bytes_s for row in rows if row.direction == way)
    if not found:
        return "-"
    return gib(found[0]) if gib(found[0]) == gib(found[-1]) else f"{gib(found[0])} to {gib(found[-1])}"


def each_way_bytes(row: Measurement) -> float:
    """Bytes each GPU moved each way in the equal-bytes rung."""
    return row.aggregate_bytes_s * row.seconds / len(row.gpus) / 2


def _equal_line(row: Measurement) -> str:
    gpu = gib(row.aggregate_bytes_s / len(row.gpus))
    return (
        f"  equal bytes: {gib(each_way_bytes(row))} GiB in and out on {count(len(row.gpus), 'GPU')} took "
        f"{row.seconds:.3g} s, {gpu} GiB/s a GPU, both ways summed"
    )


def disagreement(row: Measurement, formula: Floor) -> str | None:
    """A line when the workload's own time leaves the formula's by more than 5 %."""
    if not formula.seconds or abs(row.seconds / formula.seconds - 1) <= DIFFERS:
        return None
    return (
        f"equal bytes took {row.seconds:.3g} s where the formula says {formula.seconds:.3g} s: trust the measurement "
        "(both-ways rates need not be what equal bytes get)"
    )


def note_lines(notes: Iterable[Note]) -> Iterator[str]:
    """Each note with what to do about it."""
    for note in notes:
        yield f"{note.kind}: {note.text}"
        if note.todo:
            yield f"  -> {note.todo}"
