"""Columns of a report about reserved memory: what it has beyond the most that tensors have at once, and why."""

from __future__ import annotations

from typing import Any

from offbench.compare import Group, Row
from offbench.naming import arm_name
from offbench.record import Reserved
from offbench.units import gib

HEADS = (
    "arm",
    "axes",
    "reserved GiB",
    "allocated at most",
    "held for streams",
    "pools apart in time",
    "spare in pools",
    "allocator flushes",
)
READ = (
    "reserved GiB: in one step after the window, by rank 0's allocator or that of the rank which reserves most; = "
    "allocated at most + held for streams (freed, not yet passed by another stream) + pools apart in time (the most "
    "of each stream's pool comes at another time) + spare in pools (between blocks, or needed outside that step); "
    "allocator flushes: most times of any launch in the window that it ran out, gave its cache back and tried again"
)
LEAST_POOL = 1 << 27
"""Bytes (128 MiB) a pool must have to get named."""


def lines(group: Group) -> list[list[str]]:
    """The cells of the rows that have such figures, as many a line as HEADS."""
    return [_line(row, row.reserved) for row in group.rows if row.reserved is not None]


def notes(group: Group) -> list[str]:
    """How to read them, and each row's pools; empty where there are none."""
    found = [
        f"{arm_name(row.spec, row.label)}: GiB by pool, reserved / most in use / in use at the peak: {_pools(known)}"
        for row in group.rows
        if (known := row.reserved) is not None
    ]
    return [READ, *found] if found else []


def figures(row: Row) -> dict[str, Any]:
    """For machines, bytes; null where nobody looked."""
    found = row.reserved
    names = ("reserved", "held", "apart", "spare")
    parts = {f"pools_{name}_bytes": getattr(found, f"{name}_bytes") if found is not None else None for name in names}
    return parts | {"alloc_retries": row.alloc_retries}


def _line(row: Row, found: Reserved) -> list[str]:
    sizes = (found.reserved_bytes, found.allocated_bytes, found.held_bytes, found.apart_bytes, found.spare_bytes)
    retries = "-" if row.alloc_retries is None else str(row.alloc_retries)
    return [row.label or row.arm, row.axes or "-", *map(gib, sizes), retries]


def _pools(found: Reserved) -> str:
    large = [pool for pool in found.pools if pool.reserved_bytes >= LEAST_POOL]
    return ", ".join(
        f"{pool.stream} {gib(pool.reserved_bytes)} / {gib(pool.most_bytes)} / {gib(pool.at_peak_bytes)}"
        for pool in large
    )
