"""The README's opening table, and the figures below it, are those of its records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from offbench.compare import Row, compare
from offbench.record import RunRecord
from offbench.units import GIB
from tests.test_hiding_copies import KERNEL, ROOT, STOCK, inside_step, of, one, same
from tests.test_hiding_copies_pairs import PAIRS

README = (Path(__file__).parent.parent / "README.md").read_text()
PROSE = " ".join(README.split())
RECORDS = of("all-arms")
EMULATED_PAIRS = of("table-emulated")
NATIVE, EMULATED = compare(RECORDS)
ROWS: list[tuple[str, str | None, str | None]] = [
    ("none", "kernel", "stock"),
    ("main", "stock", "stock"),
    ("chunked", "stock", "stock"),
    ("overlap", "stock", "stock"),
    ("overlap", "kernel", "kernel"),
    ("stream", "kernel", None),
    ("stream", None, "kernel"),
]
"""Arm of each line, and who makes its small copies on the native and on the emulated link; None: not in that line."""


def rows(arm: str, *copies: str | None) -> list[Row | None]:
    """The arm's rows on the native and on the emulated link."""
    return [
        next((row for row in group.rows if (row.arm, row.spec.arm.fsdp_copies) == (arm, way)), None)
        for group, way in zip((NATIVE, EMULATED), copies, strict=True)
    ]


def shown(row: Row | None) -> list[float | None]:
    if row is None:
        return [None] * 3
    assert row.step_s is not None
    return [row.step_s.median, row.x_none, row.exposed_s]


def peak_gib(row: Row | None) -> float:
    return (row.steady_peak_bytes or 0) / GIB if row else 0.0


def held_gib(record: RunRecord) -> float:
    """State on the GPU when the backward ends."""
    return (record.peak.state_at_backward_end_bytes or 0) / GIB


def test_the_table_of_latest_rows() -> None:
    lines = README[README.index("| arm | link GiB/s |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (pairs,) = compare(PAIRS)
    none, *rest = pairs.rows
    for line, row in zip(cells, rest, strict=False):
        low, high = row.x_none_interval or (0, 0)
        assert line[1:3] == ["native", f"{row.x_none:.3f} ({low:.3f} to {high:.3f})"]
        assert same(line[3], peak_gib(row))
        assert line[4] == "[five pairs](results/h200-table-native.md), two machines"
        assert row.pairs == 5
    kept = held_gib(next(r for r in PAIRS if r.spec.arm.name == "stream"))
    assert cells[1][0].startswith(f"stream, {kept:.1f} GiB of state kept;")
    alone = [
        ("stream-twelfth", 7, True),
        ("stream-twelfth", 4, True),
    ]
    worse: list[list[float]] = []
    for line, (name, about, native) in zip(cells[2:4], alone, strict=True):
        found = [r for r in of(name) if r.spec.arm.name == "stream" and int(held_gib(r)) == about]
        base = median(r.step_s or 0 for r in of(name) if r.spec.arm.name == "none")
        ratios = [(r.step_s or 0) / base for r in found]
        worse.append(ratios)
        peak = max(r.peak.steady_allocated_bytes or 0 for r in found) / GIB
        assert f"{held_gib(found[0]):.1f} GiB kept" in line[0]
        assert ("auto" in line[0]) == (found[0].spec.arm.state_budget == "auto")
        assert line[1:4] == ["native" if native else "38.8", ", ".join(f"{x:.3f}" for x in ratios), f"{peak:.1f}"]
        assert (found[0].spec.mode.emulate_link is None) == native
        assert line[4].startswith(f"[{'two' if len(found) == 2 else 'one'}](results/h200-{name}.md)")
    (none,) = (r for r in of("stream-twelfth") if r.spec.arm.name == "none")
    whole = (none.peak.steady_allocated_bytes or 0) / GIB
    less = [whole - float(cells[at][3]) for at in (2, 3)]
    percent = [100 * (x - 1) for x in (*worse[0], *worse[1])]
    words = "with {:.1f} GiB less, one launch took {:.1f} % longer, less than steps differ"
    assert words.format(less[0], percent[0]) in PROSE
    steps = [step.step_s for step in none.steps if step.step_s]
    assert (max(steps) - min(steps)) / median(steps) > percent[0] / 100
    assert f"with {less[1]:.1f} GiB less two took {percent[1]:.1f} and {percent[2]:.1f} %" in PROSE
    emulated_pairs(cells[4:6])
    long_batches(cells[6])
    rows = json.loads((ROOT / "results" / "h200-waiting-streams.json").read_text())
    assert (
        "in by {} to {} % and out by {} to {} %".format(*lost_percent(rows, "in"), *lost_percent(rows, "out")) in PROSE
    )


def emulated_pairs(lines: list[list[str]]) -> None:
    """The lines of five pairs on the emulated link, and what is said of the first."""
    (pairs,) = compare(EMULATED_PAIRS)
    none, small, auto = pairs.rows
    for line, row, ways in zip(lines, (auto, small), ("one machine", "the same"), strict=True):
        low, high = row.x_none_interval or (0, 0)
        assert line[1:3] == ["38.8", f"{row.x_none:.3f} ({low:.3f} to {high:.3f})"]
        assert same(line[3], peak_gib(row))
        assert line[4] == f"[five pairs](results/h200-table-emulated.md), {ways}"
        assert row.pairs == 5
        alike = [r for r in EMULATED_PAIRS if r.spec.arm == row.spec.arm]
        kept = sorted({f"{held_gib(r):.1f}" for r in alike})
        assert f"{' to '.join(dict.fromkeys((kept[0], kept[-1])))} GiB kept" in line[0]
        assert ("auto" in line[0]) == (row is auto)
    percent = 100 * ((auto.x_none or 1) - 1)
    less = peak_gib(none) - peak_gib(auto)
    assert f"with {less:.1f} GiB less on the GPU takes {percent:.1f} % longer than `none`" in PROSE


def long_batches(line: list[str]) -> None:
    """The line of five samples a step, where activations make the peak."""
    none, stream, chunked, *_ = of("long")
    assert none.step_s
    assert stream.step_s
    assert f"{(stream.state.device_bytes or 0) / GIB:.1f} GiB kept, five samples a step" in line[0]
    peaks = [f"{(r.peak.steady_allocated_bytes or 0) / GIB:.1f}" for r in (stream, none, chunked)]
    assert line[1:4] == ["native", f"{stream.step_s / none.step_s:.3f}", peaks[0]]
    assert line[4] == f"[one](results/h200-long.md); `none` {peaks[1]}, chunked {peaks[2]}"


def lost_percent(rows: list[dict[str, Any]], direction: str) -> tuple[int, int]:
    """Least and most that a waiting kernel cost the copies of two machines."""
    lost = []
    for machine in ("first machine", "second machine"):
        there = [r for r in rows if (r["source"], r["direction"]) == (machine, direction) and "connections" not in r]
        alone = max(rate for r in there if not r["waiting"] for rate in r["gib_s"])
        lost += [1 - rate / alone for r in there if r["behind"] == "a kernel" for rate in r["gib_s"]]
    return round(100 * min(lost)), round(100 * max(lost))


def test_the_opening_table() -> None:
    lines = README[README.index("| arm | step s |") :].split("\n\n")[0].splitlines()[2:]
    for line, (arm, *copies) in zip(lines, ROWS, strict=True):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        native, emulated = found = rows(arm, *copies)
        assert name.startswith(arm)
        assert ("by kernels" in name) == (arm != "none" and "kernel" in copies)
        for written, figure in zip(cells, [*shown(native), *shown(emulated), max(map(peak_gib, found))], strict=True):
            assert written == "-" if figure is None else same(written, figure), line


def test_none_loses_nothing_to_small_copies_by_kernels() -> None:
    """So they are the default on a GPU, and its fastest launch is everyone's baseline."""
    by_kernels, stock = (rows("none", way, "stock")[0] for way in ("kernel", "stock"))
    assert by_kernels
    assert stock
    assert by_kernels.step_s
    assert stock.step_s
    assert by_kernels.step_s.median <= 1.005 * stock.step_s.low
    assert by_kernels.x_none == 1
    assert f"with stock copies took {stock.step_s.low:.3f} and {stock.step_s.high:.3f} s" in PROSE


def part(record: RunRecord, name: str) -> float:
    """Seconds of a traced step."""
    assert record.split
    return float(getattr(record.split.total, name))


def test_what_the_overhead_is() -> None:
    (stream, _), (_, slow) = (rows(arm, *copies) for arm, *copies in ROWS[-2:])
    stock, kernel = rows("overlap", "stock", "stock"), rows("overlap", "kernel", "kernel")
    gained = [
        (a.step_s.median - b.step_s.median)
        for a, b in zip(stock, kernel, strict=True)
        if a and b and a.step_s and b.step_s
    ]
    assert "cost `overlap` {:.2f} and {:.2f} s a step".format(*gained) in PROSE
    over, left = ([row.gap_s for row in found if row] for found in (stock, kernel))
    ideals, close = ([row.ideal_s for row in found if row] for found in (stock, kernel))
    assert (
        "took {:.3f} and {:.3f} s more than the ideal of its policy ({:.3f} and {:.3f} s".format(*over, *ideals)
        in PROSE
    )
    assert "it is {:.3f} and {:.3f} s ({:.3f} and {:.3f} s), less than 5 %".format(*left, *close) in PROSE
    assert stream
    assert slow
    least = "The ideal of stream is {:.3f} and {:.3f} s, so a step took {:.3f} s more and {:.3f} s less."
    assert least.format(stream.ideal_s, slow.ideal_s, stream.gap_s, -(slow.gap_s or 0)) in PROSE
    assert all(gap and ideal and gap < 0.05 * ideal for gap, ideal in zip(left, close, strict=True))


def test_what_the_traces_say() -> None:
    native, emulated = (one(RECORDS, "overlap", link, **STOCK) for link in (False, True))
    for record, words in (
        (native, "for {:.3f} s of a traced step of {:.3f} s"),
        (emulated, "for {:.3f} s of {:.3f} s"),
    ):
        assert words.format(part(record, "behind_bulk_s"), part(record, "step_s")) in PROSE
    none, stream, overlap = (one(RECORDS, arm, **KERNEL) for arm in ("none", "stream", "overlap"))
    late = [part(record, "launch_s") - part(none, "launch_s") for record in (stream, overlap)]
    assert "{:.3f} and {:.3f} s more than in those of `none` for launches".format(*late) in PROSE
    for record in (stream, overlap):
        assert [part(record, name) for name in ("move_in_s", "slot_s", "tail_s", "behind_bulk_s")] == pytest.approx(
            4 * [0], abs=5e-4
        )
    for record in RECORDS:
        if record.spec.arm.fsdp_copies == "kernel":
            assert record.small_copies
            assert (record.small_copies.longest_wait_s or 1) < 8e-4
    native, emulated = ([inside_step(arm, link) for arm in ("main", "chunked")] for link in (False, True))
    two = "{:.3f} and {:.3f} s"
    inside = [row[column] for found in (native, emulated) for column in (3, 1) for row in found]
    words = f"takes {two} on the GPU, of which copies are {two}, emulated {two}, of which {two};"
    assert words.format(*inside) in PROSE
    assert f"that of `none` takes {one(RECORDS, 'none', **KERNEL).phases_s.step:.3f} s." in PROSE
    least = [row[6] for found in (native, emulated) for row in found]
    assert "cannot come below {:.2f} and {:.2f} x none, emulated {:.2f} and {:.2f} (".format(*least) in PROSE
    chunked = one(RECORDS, "chunked")
    assert f"{part(chunked, 'move_in_s'):.3f} s of a traced native step of chunked are waits" in PROSE


def test_all_rows_train_the_same_on_one_machine() -> None:
    def apart(name: str, pairs: Iterable[tuple[RunRecord, RunRecord]]) -> str:
        """Root mean square of the difference of two launches in one step."""
        squares = [
            (getattr(a, name) - getattr(b, name)) ** 2 for x, y in pairs for a, b in zip(x.steps, y.steps, strict=True)
        ]
        return f"{fmean(squares) ** 0.5:.1e}".replace("e-0", "e-")

    both = [(record.link.native_both_bytes_per_s or 0) / GIB for record in RECORDS]
    assert f"{min(both):.0f} to {max(both):.0f} GiB/s both ways; one memory node" in PROSE
    assert {record.env["numa_nodes"] for record in RECORDS} == {1}
    bare = [r for r in RECORDS if r.spec.arm.name == "none"]
    moved = [r for r in RECORDS if r not in bare]
    (loss, same_loss), (norm, same_norm) = (
        (apart(name, product(moved, bare)), apart(name, combinations(bare, 2))) for name in ("loss", "grad_norm")
    )
    assert f"From the four `none` a row's losses (of 12.3) differ by {loss} a step (root mean square)" in PROSE
    assert f"(of about 2) by {norm}, the four among each other by {same_loss} and {same_norm}." in PROSE
    assert len(bare) == 4
