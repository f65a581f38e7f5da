"""What a report says of GPU and host under each row's launches, and of their losses: whether rows may be compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbench.record import RunRecord
from offbench.stats import largest
from offbench.units import gib

if TYPE_CHECKING:
    from offbench.compare import Group, Row

HEADS = (
    "arm",
    "axes",
    "peak GiB, reserved",
    "GPU's GiB, used",
    "SM MHz",
    "SM MHz, most",
    "W",
    "W, limit",
    "C",
    "throttled by",
    "loss, last step",
    "loss apart from none, rms",
)
HOST_AHEAD = "host ahead ms, least"
"""A head that only groups with such a figure have."""
READ = (
    "reserved: most that PyTorch's allocator had in the window; used: of the whole GPU, by its own count; clocks, "
    "power and temperature are those of one reading under load, in the last warm-up step of each launch"
)
READ_AHEAD = (
    f"{HOST_AHEAD}: the least by which rank 0's host was ahead of its GPU at the start of any block but the first, in "
    "one forward after the window; about 0: the GPU waited for the host there (docs/trace.md)"
)


@dataclass(frozen=True)
class Conditions:
    """Of the launches of one row that count; ranges are (least, most), None where no launch knows."""

    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """The most of any launch, as the one before it."""
    sm_mhz: tuple[float, float] | None = None
    sm_max_mhz: float | None = None
    power_w: tuple[float, float] | None = None
    power_limit_w: float | None = None
    temperature_c: tuple[float, float] | None = None
    throttled: tuple[str, ...] = ()
    """What slowed some launch's GPU down at that moment."""
    losses: tuple[float, ...] = ()
    """Of the measured steps of the first launch."""
    last_loss: tuple[float, float] | None = None
    host_ahead_s: tuple[float, float] | None = None
    """Of each launch the least lead of its host (`HostLead.least_s`)."""

    @staticmethod
    def of(records: Sequence[RunRecord]) -> Conditions:
        """From each record's `env` and steps."""
        reasons = {reason for record in records for reason in record.env.get("gpu_throttle_reasons") or ()}
        losses = [[step.loss for step in record.steps if step.loss is not None] for record in records]
        return Conditions(
            largest(record.peak.steady_reserved_bytes for record in records),
            largest(record.peak.device_used_bytes for record in records),
            _range(records, "gpu_sm_mhz"),
            _most(records, "gpu_sm_max_mhz"),
            _range(records, "gpu_power_w"),
            _most(records, "gpu_power_limit_w"),
            _range(records, "gpu_temperature_c"),
            tuple(sorted(reasons)),
            tuple(losses[0]) if losses else (),
            _ends(steps[-1] for steps in losses if steps),
            _ends(s for r in records if r.host_lead is not None and (s := r.host_lead.least_s) is not None),
        )


def apart(losses: Sequence[float], base: Sequence[float]) -> float | None:
    """Root mean square of the difference, step by step; None unless both have as many."""
    if not losses or len(losses) != len(base):
        return None
    return math.sqrt(statistics.fmean((one - other) ** 2 for one, other in zip(losses, base, strict=True)))


def heads(group: Group) -> tuple[str, ...]:
    """HEADS, and one more where some row with a line has its figure."""
    return (*HEADS, HOST_AHEAD) if any(row.conditions.host_ahead_s is not None for row in _read(group)) else HEADS


def lines(group: Group) -> list[list[str]]:
    """The cells of the rows whose GPU was read, as many a line as there are heads."""
    count = len(heads(group))
    return [_line(row)[:count] for row in _read(group)]


def notes(group: Group) -> list[str]:
    """How to read them; empty where there are none."""
    return [READ, READ_AHEAD][: 1 + (HOST_AHEAD in heads(group))] if lines(group) else []


def figures(row: Row) -> dict[str, Any]:
    """For machines, units in the names."""
    found = row.conditions
    ranges = {"sm_mhz": found.sm_mhz, "power_w": found.power_w, "temperature_c": found.temperature_c}
    named = {f"gpu_{name}_{end}": at and at[i] for name, at in ranges.items() for i, end in enumerate(("min", "max"))}
    memory = {"steady_peak_reserved_bytes": found.reserved_bytes, "device_used_bytes": found.device_used_bytes}
    rest = {"gpu_throttled_by": ", ".join(found.throttled) or None, "loss_apart_rms": row.loss_apart}
    ahead = found.host_ahead_s or (None, None)
    return named | memory | rest | {"host_ahead_least_s_min": ahead[0], "host_ahead_least_s_max": ahead[1]}


def _read(group: Group) -> list[Row]:
    return [row for row in group.rows if row.conditions.sm_mhz is not None]


def _line(row: Row) -> list[str]:
    found = row.conditions
    return [
        row.label or row.arm,
        missing(row.axes),
        *(missing(nbytes and gib(nbytes)) for nbytes in (found.reserved_bytes, found.device_used_bytes)),
        _show(found.sm_mhz, ".0f"),
        missing(found.sm_max_mhz, ".0f"),
        _show(found.power_w, ".0f"),
        missing(found.power_limit_w, ".0f"),
        _show(found.temperature_c, ".0f"),
        missing(", ".join(found.throttled)),
        _show(found.last_loss, ".5f"),
        missing(row.loss_apart, ".1e"),
        _show(found.host_ahead_s and (1e3 * found.host_ahead_s[0], 1e3 * found.host_ahead_s[1]), ".1f"),
    ]


def missing(value: float | str | None, form: str = "") -> str:
    """A cell; `-` for nothing."""
    return "-" if value is None or value == "" else format(value, form)


def _show(ends: tuple[float, float] | None, form: str) -> str:
    low, high = (format(end, form) for end in ends) if ends else ("-", "-")
    return low if low == high else f"{low}-{high}"


def _known(records: Iterable[RunRecord], key: str) -> list[float]:
    return [value for record in records if (value := record.env.get(key)) is not None]


def _range(records: Iterable[RunRecord], key: str) -> tuple[float, float] | None:
    return _ends(_known(records, key))


def _most(records: Iterable[RunRecord], key: str) -> float | None:
    return max(_known(records, key), default=None)


def _ends(values: Iterable[float]) -> tuple[float, float] | None:
    known = list(values)
    return (min(known), max(known)) if known else None
