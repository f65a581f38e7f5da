"""Step time against peak memory as figures: one for each table of a report that has two rows with both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from offbench.compare import Group, Row
from offbench.errors import UsageError
from offbench.naming import describe
from offbench.planner.chart import Chart, Series, draw
from offbench.planner.plots import CHUNKED, MAIN, MEMORY, OVERLAP, STREAM, ZEROCOPY
from offbench.units import GIB

COLOURS = {"main": MAIN, "chunked": CHUNKED, "overlap": OVERLAP, "stream": STREAM, "zerocopy": ZEROCOPY}
"""As in a plan's figures; `none` and published rows have the colour of their own."""
STEM = "step-memory"
KERNELS = ("fsdp copies kernel, readbacks kernel", "by kernels")
"""Small copies, as the README calls them."""


def write(folder: Path, groups: Sequence[Group]) -> Iterator[Path]:
    """Write `step-memory-1.svg` and so on into the folder, numbered as the tables are, and name each. Raises
    UsageError when a file cannot be written, or when no table has two such rows."""
    figures = {number: text for number, group in enumerate(groups, 1) if (text := figure(group)) is not None}
    if not figures:
        raise UsageError("--plot: no table has two rows with a step time and a peak; give files of runs on a GPU")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, text in figures.items():
            path = folder / f"{STEM}-{number}.svg"
            path.write_text(text)
            yield path
    except OSError as error:
        raise UsageError(f"cannot write figures to {folder}: {error.strerror}; choose another --plot") from error


def figure(group: Group) -> str | None:
    """The figure of one table as an SVG document: a dot a row at its median, a line from its fastest to its slowest
    launch. None for fewer than two rows with both figures."""
    rows = [row for row in group.rows if row.step_s is not None and row.steady_peak_bytes]
    if len(rows) < 2:
        return None
    names = _names(rows)
    least = min(row.step_s.low for row in rows if row.step_s is not None)
    return draw(
        Chart(
            "Step time against peak GPU memory",
            tuple(describe(group.caption)[1:4]),
            "GiB of GPU memory allocated at most in the measured steps",
            "s a step",
            tuple(_series(row, name) for row, name in zip(rows, names, strict=True)),
            y_from=math.floor(10 * least) / 10,
            scattered=True,
        )
    )


def _series(row: Row, name: str) -> Series:
    assert row.step_s is not None
    at = (row.steady_peak_bytes or 0) / GIB
    ends = (row.step_s.low, row.step_s.high) if row.step_s.n > 1 else ()
    points = tuple((at, seconds) for seconds in (*ends, row.step_s.median))
    return Series(name, points, COLOURS.get(row.arm, MEMORY), dots=True)


def _names(rows: Sequence[Row]) -> list[str]:
    """Arms, with the axes that not all rows share."""
    axes = [row.axes.split(", ") if row.axes else [] for row in rows]
    shared = set(axes[0]).intersection(*axes[1:])
    kept = [", ".join(axis for axis in mine if axis not in shared).replace(*KERNELS) for mine in axes]
    return [f"{row.label or row.arm} {own}".strip() for row, own in zip(rows, kept, strict=True)]
