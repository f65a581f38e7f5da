"""A machine as JSON and back, exactly. This is `offbench topo --json`, what `--save` writes, and what `--from` reads.

One object. Every key is present; null is unknown, never zero. Units are in the names of the keys: bytes_s bytes per
second, gib_s 2^30 bytes per second, gt_s GT/s per lane. The keys are the fields of the dataclasses in
`offbench.topology.model` and `offbench.topology.links`, where each is documented, with tuples as arrays; `nodes` is
called `numa`. Beside them, for readers only (not read back, since they follow from the rest):

schema        version of this layout; a reader refuses any other. Keys for readers only may join without a new version
tool_version  offbench that wrote it
time          when, UTC, ISO 8601; null in machines shipped with the package
degraded      texts of the notes of kind `degraded`
warnings      the notes of the other kinds: code, text, todo
floors        what `offbench topo` computed for given bytes; [] where none was asked for
numa[]        has_cpu
gpus[]        rank: of the job that the floors are of, the rank whose copies it carries; without floors, of a launch
              here, which puts rank n on CUDA's device n. null: no rank is on it, or nobody knows its number
              vendor: NVIDIA, AMD, or the PCI vendor id of another
gpus[].link   current, max (gt_s, width), expected_gib_s (line rate of its own link), path_min_gib_s (lowest line rate
              its whole chain claims), read_under_load (whether `current` is)
links[]       speed_gt_s, width (what both ends can do), arithmetic_gib_s (line rate each way), measured_gib_s {in,
              out, both}, bound (exact, or ">=" where the link was never seen to limit), limits (whether it was;
              null: not measured)
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from offbench import __version__
from offbench.topology.capacity import line_rate
from offbench.topology.facts import AMD, NVIDIA
from offbench.topology.links import UNDER_LOAD, Direction, Link
from offbench.topology.model import Gpu, Machine
from offbench.units import GIB

SCHEMA = 1
RENAMED = {"nodes": "numa"}
VENDORS = {NVIDIA: "NVIDIA", AMD: "AMD"}
_UUID = re.compile(r"(GPU|MIG)-[^,\s]+")


def to_dict(machine: Machine, time: str | None = None, floors: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The documented object. `time` is ISO 8601 in UTC; `floors` are shown as given."""
    body = {RENAMED.get(key, key): value for key, value in _plain(machine).items()}
    body["numa"] = [{**row, "has_cpu": row["kind"] == "cpu"} for row in body["numa"]]
    ranks = floors[0]["ranks"] if floors else None
    body["gpus"] = [
        {**row, "rank": _rank(gpu, ranks), "vendor": _vendor(gpu), "link": _gpu_link(machine, gpu)}
        for row, gpu in zip(body["gpus"], machine.gpus, strict=True)
    ]
    body["links"] = [{**row, **_figures(link)} for row, link in zip(body["links"], machine.links, strict=True)]
    return {
        "schema": SCHEMA,
        "tool_version": __version__,
        "time": time,
        **body,
        "degraded": [note.text for note in machine.noted("degraded")],
        "warnings": [
            {"code": note.code, "text": note.text, "todo": note.todo}
            for note in machine.notes
            if note.kind != "degraded"
        ],
        "floors": [dict(floor) for floor in floors],
    }


def _rank(gpu: Gpu, ranks: int | None) -> int | None:
    """Floors put one rank on each of the first GPUs, in the machine's order."""
    if ranks is None:
        return gpu.cuda_ordinal
    return gpu.index if gpu.index < ranks else None


def _vendor(gpu: Gpu) -> str | None:
    """By the PCI id or, where that is hidden, by the first word of the name."""
    if gpu.vendor_device is not None:
        number = gpu.vendor_device.partition(":")[0]
        return VENDORS.get(number, number)
    first = (gpu.name or "").partition(" ")[0]
    return first if first in VENDORS.values() else None


def _gpu_link(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    own = line_rate(gpu.pcie.max_gt_s, gpu.pcie.max_width)
    least = next((link.path_min for link in machine.links_of(gpu.index) if link.path_min is not None), None)
    return {
        "current": {"gt_s": gpu.pcie.current_gt_s, "width": gpu.pcie.current_width},
        "max": {"gt_s": gpu.pcie.max_gt_s, "width": gpu.pcie.max_width},
        "expected_gib_s": None if own is None else own / GIB,
        "path_min_gib_s": None if least is None else least.bytes_s / GIB,
        "read_under_load": gpu.pcie.source == UNDER_LOAD,
    }


def _figures(link: Link) -> dict[str, Any]:
    ways: tuple[Direction, ...] = ("in", "out", "both")
    computed = link.rate("in", ("line rate",))
    measured = {way: link.rate(way, ("measured",)) for way in ways}
    found = [rate for rate in measured.values() if rate is not None]
    limits = not all(rate.at_least for rate in found) if found else None
    return {
        "speed_gt_s": None if link.pcie is None else link.pcie.max_gt_s,
        "width": None if link.pcie is None else link.pcie.max_width,
        "arithmetic_gib_s": None if computed is None else computed.bytes_s / GIB,
        "measured_gib_s": {way: None if rate is None else rate.bytes_s / GIB for way, rate in measured.items()},
        "bound": None if limits is None else ("exact" if limits else ">="),
        "limits": limits,
    }


def anonymous(machine: Machine) -> Machine:
    """The machine without what names this very computer (UUIDs), to be attached to a public report."""
    gpus = tuple(
        replace(gpu, uuid=None, mig_parent=None if gpu.mig_parent is None else "not shown") for gpu in machine.gpus
    )
    if machine.process is None:
        return replace(machine, gpus=gpus)
    hidden = tuple((name, _UUID.sub(r"\1-not-shown", value)) for name, value in machine.process.visible)
    return replace(machine, gpus=gpus, process=replace(machine.process, visible=hidden))


def to_json(machine: Machine, time: str | None = None, floors: Sequence[Mapping[str, Any]] = ()) -> str:
    """The object as text, two spaces deep, with a newline at the end."""
    return json.dumps(to_dict(machine, time, floors), indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> Machine:
    """The machine that `to_json` wrote. Raises ValueError, naming the place, for anything else."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("no key `schema`: not written by offbench topo")
    if data["schema"] is True or data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r}; this offbench ({__version__}) reads schema {SCHEMA}")
    written = {key: data[name] for key, name in RENAMED.items() if name in data}
    machine = _typed(Machine, {**data, **written}, "machine")
    assert isinstance(machine, Machine)
    _check(machine)
    return machine


def _check(machine: Machine) -> None:
    """What the rest of the program relies on, said where a hand-written file breaks it."""
    count = len(machine.gpus)
    for place, gpu in enumerate(machine.gpus):
        if gpu.index != place:
            raise ValueError(f"gpus[{place}].index is {gpu.index}: GPUs are numbered from 0 in order")
    for what, gpus in _memberships(machine):
        if not all(0 <= member < count for member in gpus):
            raise ValueError(f"{what} names a GPU that is not listed")
        if len(set(gpus)) < len(gpus):
            raise ValueError(f"{what} names a GPU twice")
    for link in machine.links:
        if any(rate.bytes_s < 1 for rate in link.rates):
            raise ValueError(f"link {link.id} has a rate that is not above zero; leave unknown rates out")
    for place, row in enumerate(machine.measurements):
        if not row.gpus or len(row.per_gpu_bytes_s) != len(row.gpus):
            raise ValueError(f"measurements[{place}] has not one rate for each of its GPUs")
    if len({link.id for link in machine.links}) < len(machine.links):
        raise ValueError("two links have the same id")


def _memberships(machine: Machine) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Whatever names GPUs, and which."""
    yield from ((f"link {link.id}", link.gpus) for link in machine.links)
    yield from ((f"bridge {bridge.bdf}", bridge.gpus) for bridge in machine.bridges)
    yield from ((f"groups[{place}]", group.gpus) for place, group in enumerate(machine.groups))
    yield from ((f"measurements[{place}]", row.gpus) for place, row in enumerate(machine.measurements))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _typed(kind: Any, value: Any, place: str) -> Any:
    """`value` from JSON as the annotated type `kind`; ValueError with the place where it does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _typed(next(item for item in arguments if item is not type(None)), value, place)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{place} is {value!r}, not one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        return _tuple(arguments, value, place)
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, place)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise ValueError(f"{place} is not a finite number")
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{place} is {value!r}, not {kind.__name__}")
    return value


def _tuple(arguments: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{place} is {value!r}, not a list")
    if arguments[-1] is Ellipsis:
        return tuple(_typed(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if len(value) != len(arguments):
        raise ValueError(f"{place} has {len(value)} items, not {len(arguments)}")
    return tuple(
        _typed(kind, item, f"{place}[{index}]")
        for index, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _object(kind: Any, value: Any, place: str) -> Any:
    """A dataclass; keys it does not know are skipped, keys left out take their default."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {value!r}, not an object")
    hints = typing.get_type_hints(kind)
    given = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            given[field.name] = _typed(hints[field.name], value[field.name], f"{place}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place} has no key {field.name}")
    return kind(**given)
