"""The notes say what the records of five pairs on the emulated link say, and what was measured of the native one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from offbench.compare import compare
from offbench.planner.ideal import policy_ideal
from offbench.planner.sources import compute_of_records
from offbench.units import GIB
from tests.test_hiding_copies import NOTES, ROOT, of, phases, same, table
from tests.test_hiding_copies_streams import Copy

PROSE = " ".join(NOTES.split())
GUIDE = " ".join((ROOT / "docs" / "using-the-optimizer.md").read_text().split())
PAIRS = of("table-emulated")
NONES = [r for r in PAIRS if r.spec.arm.name == "none"]
SMALL, AUTO = (
    sorted(
        (r for r in PAIRS if r.spec.arm.name == "stream" and (r.spec.arm.state_budget == "auto") == auto),
        key=lambda r: r.launch,
    )
    for auto in (False, True)
)
BESIDE = json.loads((ROOT / "results" / "h200-copies-beside-none.json").read_text())
TRIED = json.loads((ROOT / "results" / "h200-twelfth-tried.json").read_text())
COMPUTE = compute_of_records(NONES)
Pick = Callable[[Iterable[float]], float]
ENDS: tuple[Pick, Pick] = (min, max)


def held_gib(records: Iterable[Any]) -> list[float]:
    return [(r.peak.state_at_backward_end_bytes or 0) / GIB for r in records]


def test_five_pairs_on_the_emulated_link() -> None:
    (group,) = compare(PAIRS)
    none, small, auto = group.rows
    held = "0", f"{held_gib(SMALL)[0]:.1f}", "{:.1f} to {:.1f}".format(*(pick(held_gib(AUTO)) for pick in ENDS))
    for line, row, kept in zip(table("emulated, five pairs"), group.rows, held, strict=True):
        assert row.step_s
        assert row.step_s.n == row.pairs == 5
        low, high = row.x_none_interval or (1, 1)
        assert line[0] == kept
        assert line[2] == ("1" if row is none else f"{low:.3f} to {high:.3f}")
        memory = (row.steady_peak_bytes, row.conditions.reserved_bytes, row.conditions.device_used_bytes)
        found = [row.step_s.median, (row.ideal_s or 0) / (none.ideal_s or 1), *((n or 0) / GIB for n in memory)]
        assert all(map(same, [line[1], *line[3:]], found)), (line, found)
    assert none.step_s
    assert f"`none` took {none.step_s.low:.3f} to {none.step_s.high:.3f} s." in NOTES
    low, high = ((x - 1) * 100 for x in auto.x_none_interval or (1, 1))
    words = f"costs {100 * ((auto.x_none or 1) - 1):.1f} %** ({low:.1f} to {high:.1f}) of a step"
    assert words in PROSE
    low, high = auto.x_none_interval or (1, 1)
    assert f"a later one took {auto.x_none:.3f} times as long ({low:.3f} to {high:.3f}, [five pairs]" in GUIDE
    less = [(none.steady_peak_bytes or 0) - (auto.steady_peak_bytes or 0)]
    less += [(none.conditions.device_used_bytes or 0) - (auto.conditions.device_used_bytes or 0)]
    assert "with {:.1f} GiB less allocated than `none` and {:.1f} GiB less".format(*(x / GIB for x in less)) in PROSE
    assert small.x_none_interval
    probed = [(r.link.native_both_bytes_per_s or 0) / GIB for r in SMALL]
    one_way = [(r.link.in_bytes_per_s or 0) / GIB for r in SMALL]
    words = "found {:.1f} to {:.1f} GiB/s, so {:.1f} to {:.1f} one way"
    assert words.format(*(pick(rates) for rates in (probed, one_way) for pick in ENDS)) in PROSE


def test_by_launch_it_is_the_link() -> None:
    above: list[tuple[float, ...]] = []
    for line, record, none in zip(table("launch"), SMALL, NONES, strict=True):
        assert record.launch == none.launch
        assert none.step_s
        forward, _, clip, step = phases(none)
        rate = record.link.in_bytes_per_s or 1
        moved = (record.moved.in_bytes_per_step or 0) / rate
        left = moved - forward - clip, moved - (forward + clip + step - compute_of_records([none]).loss)
        bound, knows_loss = (1 + max(0.0, seconds) / none.step_s for seconds in left)
        ideal = policy_ideal(record, NONES)
        assert ideal
        took = (record.step_s or 0) / none.step_s
        found = [rate / GIB, took, bound, knows_loss, ideal.step_s / COMPUTE.total]
        assert all(map(same, line, found)), (line, found)
        above.append(tuple(took - x for x in found[2:]))
    words = "it is {:.3f} above the bound that takes the whole forward for copies, {:.3f} above the one that knows of"
    assert words.format(*(statistics.fmean(column) for column in list(zip(*above, strict=True))[:2])) in PROSE
    assert f"and {statistics.fmean(row[2] for row in above):.3f} above its ideal." in PROSE


def beside(copies: list[str], way: str, gathers: str = "own streams") -> list[float]:
    """GiB/s that way while so many are copied beside the model."""
    return [r["gib_s"][way] for r in BESIDE if (r["copies"], r["gathers"]) == (copies, gathers)]


def test_copies_beside_the_model() -> None:
    own = [beside(["in"], "in"), beside(["out"], "out"), beside(["in", "out"], "in"), beside(["in", "out"], "out")]
    words = "{:.1f} to {:.1f} GiB/s in, {:.1f} to {:.1f} out; both ways {:.1f} to {:.1f} in and {:.1f} to {:.1f} out"
    assert words.format(*(pick(rates) for rates in own for pick in ENDS)) in PROSE
    others = beside(["in"], "in", "model's stream"), beside(["out"], "out", "model's stream")
    assert (
        "it would be {:.1f} in and {:.1f} to {:.1f} out".format(max(others[0]), *(p(others[1]) for p in ENDS)) in PROSE
    )
    assert min(others[0]) == max(others[0])
    engine = [r for r in BESIDE if r["source"] == "another machine" and not {"k1", "k2"} & set(r["copies"])]
    bare, busy = (
        [(r["attention_ms"], r["experts_ms"]) for r in engine[at:] if bool(r["copies"]) == some]
        for some, at in ((False, 3), (True, 0))
    )
    words = (
        "{:.1f} and {:.1f} ms with none beside it, between passes with some, which took {:.1f} to {:.1f}; "
        "the experts {:.1f} and {:.1f}"
    )
    first, second = ([row[at] for row in bare] for at in (0, 1))
    slow = [[row[at] for row in busy] for at in (0, 1)]
    assert words.format(*sorted(first), *(p(slow[0]) for p in ENDS), *sorted(second)) in PROSE
    assert "and {:.1f} to {:.1f}.".format(*(p(slow[1]) for p in ENDS)) in PROSE
    early = [(r["attention_ms"], r["experts_ms"]) for r in engine[:3]]
    assert not any(r["copies"] for r in engine[:3])
    words = "right after the warm-up, took {:.1f} to {:.1f} and {:.1f} to {:.1f}."
    assert words.format(*(p(column) for column in zip(*early, strict=True) for p in ENDS)) in PROSE
    percent = [round(100 * (pick(slow[0]) / pick(first) - 1)) for pick in ENDS]
    assert "by {} to {} %".format(*percent) in PROSE
    kernels = [r for r in BESIDE if {"k1", "k2"} & set(r["copies"])]
    out = [rate for r in kernels for way, rate in r["gib_s"].items() if way != "in"]
    into = [r["gib_s"]["in"] for r in kernels if "in" in r["gib_s"]]
    experts = [r["experts_ms"] for r in kernels]
    words = "{:.1f} to {:.1f} GiB/s beside the model, whose experts then take {:.1f} to {:.1f} ms, and what comes in"
    assert words.format(*(p(x) for x in (out, experts) for p in ENDS)) in PROSE
    assert "still slows to {:.1f} to {:.1f}.".format(*(p(into) for p in ENDS)) in PROSE


def rates(step: dict[str, Any]) -> tuple[float, float, float, float]:
    """Seconds in which state comes in alone and beside what leaves, and GiB/s of both, which fit all copies best."""
    into, out = ([Copy(*copy) for copy in step[way]] for way in ("in", "out"))
    rows = []
    for copy in into:
        took = copy.end - copy.begin
        shared = sum(max(0.0, min(copy.end, other.end) - max(copy.begin, other.begin)) for other in out)
        rows.append((took - min(shared, took), min(shared, took), copy.nbytes / GIB))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    scale = aa * bb - ab * ab
    alone, both = (sum(row[i] for row in rows) for i in (0, 1))
    return alone, both, (ay * bb - by * ab) / scale, (by * aa - ay * ab) / scale


def test_one_step_second_by_second() -> None:
    base, compute, reads = TRIED["copies"]
    alone, both, fast, slow = rates(base)
    whole = max(beside(["in"], "in", "model's stream"))
    moved = sum(copy[0] for copy in base["in"]) / GIB
    ends = base["in"][-1][2]
    left = sum(n * max(0.0, min(ends, end) - begin) / (end - begin) for n, begin, end in base["out"]) / GIB
    lines = table("one step, native, 4.4 GiB kept")
    idle = ends - alone - both
    found = [moved / whole, both * (1 - slow / whole), alone * (1 - fast / whole), idle, ends]
    assert all(same(line[0], figure) for line, figure in zip(lines, found, strict=True)), found
    assert abs(sum(found[:4]) - ends) < 0.003
    assert f"| {moved:.2f} GiB come in, alone at {whole:.1f} GiB/s |" in NOTES
    assert f"| {left:.1f} GiB leave meanwhile, for {both:.3f} s, in which {slow:.1f} GiB/s come in |" in NOTES
    assert f"| alone, for {alone:.3f} s, {fast:.1f} GiB/s come in |" in NOTES
    assert "They came in at {2:.1f} alone and {3:.1f} beside others".format(*rates(compute)) in PROSE
    assert f"came in at {rates(reads)[2]:.1f} GiB/s alone" in PROSE
    peaks = [p for p in TRIED["peaks"] if p["at_loss_gib"] == TRIED["peaks"][0]["at_loss_gib"]]
    assert f"{moved - peaks[0]['at_loss_gib']:.1f} GiB of the {left:.1f} have to" in PROSE
    beyond, leaving = ends - moved / whole, both * (1 - slow / whole)
    assert f"Of the {beyond:.3f} s beyond one way alone {leaving:.3f} are what leaves beside it" in PROSE


def test_what_was_tried_and_left_out() -> None:
    def took(source: str, name: str) -> str:
        return ", ".join(f"{s['step_s']:.3f}" for s in TRIED["steps"] if (s["source"], s["name"]) == (source, name))

    more = {s["more_at_loss_gib"]: s["step_s"] for s in TRIED["more_at_loss"]}
    found = [
        [took("first machine", "on the compute stream"), took("first machine", "twelfth")],
        [took("second machine", "on the compute stream"), took("second machine", "twelfth")],
        [took("second machine", "in the order of reads"), "before: " + took("second machine", "twelfth")],
        [f"{more[1.5]:.3f}, {more[3.0]:.3f}", f"{more[0.0]:.3f}"],
    ]
    assert table("tried") == found
    assert f"a step took {more[0.0] - more[1.5]:.3f} s less" in PROSE
    base, larger = ([p for p in TRIED["peaks"] if p["at_loss_gib"] == gib] for gib in (9.93, 11.43))
    most = max(p["peak_gib"] for p in base)
    (loss,) = (p["peak_gib"] for p in base if p["until"] == "after loss")
    assert f"shows {most - loss:.1f} GiB unused at the loss" in PROSE
    untils = [p["until"] for p in base]
    forward = [max(p["peak_gib"] for p in rows[: untils.index("before norm")]) for rows in (larger, base)]
    assert "the most in a forward was {:.1f} GiB, before {:.1f},".format(*forward) in PROSE
    assert most >= forward[0]
