"""The notes say what was measured of streams that wait, and of the versions before and after that was known."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from offbench.offload.replay import Replay
from offbench.offload.schedule import Schedule
from offbench.planner.inputs import Links
from offbench.planner.sources import compute_of_records, links_of_records, schedule_of
from offbench.units import GIB
from tests.test_hiding_copies import NOTES, ROOT, TWELFTH, of, phases, same, table
from tests.test_hiding_copies_pairs import SHAPE, layers_ms, lead_ms

PROSE = " ".join(NOTES.split())
BARE = json.loads((ROOT / "results" / "h200-waiting-streams.json").read_text())
STEPS = json.loads((ROOT / "results" / "h200-copy-rates.json").read_text())
FIRST_S = 0.012
"""Copies that begin before this come in while gradients are clipped, and nothing is behind them."""


class Copy(NamedTuple):
    """One copy of a step."""

    nbytes: int
    begin: float
    end: float

    @property
    def rate(self) -> float:
        return self.nbytes / GIB / (self.end - self.begin)


def mean_rate(copies: list[Copy]) -> float:
    return sum(copy.nbytes for copy in copies) / GIB / sum(copy.end - copy.begin for copy in copies)


def split(step: dict[str, Any]) -> tuple[list[Copy], list[Copy], list[Copy], list[Copy]]:
    """Copies in: the first, later ones alone, those beside others on their way out. And those out after the last."""
    into, out = ([Copy(*copy) for copy in step[way]] for way in ("in", "out"))

    def beside(copy: Copy) -> float:
        shared = sum(max(0.0, min(copy.end, other.end) - max(copy.begin, other.begin)) for other in out)
        return shared / (copy.end - copy.begin)

    alone = [copy for copy in into if beside(copy) < 0.05]
    first = [copy for copy in alone if copy.begin < FIRST_S]
    both = [copy for copy in into if beside(copy) > 0.9]
    return first, alone[len(first) :], both, [copy for copy in out if copy.begin > into[-1].end + 0.1]


def test_copies_of_one_step() -> None:
    later: list[float] = []
    for line, step in zip(table("copies of one step"), STEPS["copies"], strict=True):
        first, alone, both, out = split(step)
        found = [step["in"][-1][2], *map(mean_rate, (first, alone, both))]
        assert all(map(same, line, found)), (line, found)
        later += [copy.rate for copy in out]
    assert f"state leaves at {min(later):.0f} to {max(later):.0f} GiB/s by turns" in PROSE
    probed = [(r.link.in_bytes_per_s or 0) / GIB for r in of("stream-eleventh") if r.spec.arm.name == "stream"]
    probed += [(r.link.in_bytes_per_s or 0) / GIB for r in TWELFTH[0] if not r.spec.mode.emulate_link]
    assert f"on other machines probed {min(probed):.1f} to {max(probed):.1f} GiB/s in" in PROSE
    slowest = min(mean_rate(split(step)[1]) for step in STEPS["copies"])
    page = " ".join((ROOT / "docs" / "plan.md").read_text().split())
    assert f"copies came in alone up to {100 * (1 - slowest / max(probed)):.0f} % slower" in page
    means = {name: [s["step_s"] for s in STEPS["steps"] if s["name"] == name] for name in ("eleventh", "twelfth")}
    words = "a first form of it: {:.3f} and {:.3f} s a step, the eleventh version {:.3f} and {:.3f}."
    assert words.format(*means["twelfth"], *means["eleventh"]) in PROSE


def bare(source: str, direction: str, **fields: object) -> Iterator[float]:
    for row in BARE:
        if (row["source"], row["direction"]) == (source, direction) and fields.items() <= row.items():
            yield from row["gib_s"]


def test_bare_copies_beside_streams_that_wait() -> None:
    lines = table("other streams")
    source = "first machine"
    for way, at in (("in", 0), ("out", 1)):
        assert same(lines[0][at], max(bare(source, way, waiting=0)))
        assert [lines[1][at]] == [f"{rate:.1f}" for rate in bare(source, way, waiting=1, behind="a kernel")]
        assert [lines[2][at]] == [f"{rate:.1f}" for rate in bare(source, way, waiting=3, behind="a kernel")]
        others = {
            f"{rate:.1f}"
            for r in BARE
            if r["behind"] not in ("a kernel",)
            for rate in r["gib_s"]
            if (r["source"], r["direction"], r["waiting"]) == (source, way, 1)
        }
        assert others == {lines[3][at]}
    lost = {way: [] for way in ("in", "out")}
    for source in ("first machine", "second machine"):
        for way, losses in lost.items():
            alone = max(
                r
                for row in BARE
                if "connections" not in row
                and not row["waiting"]
                and (row["source"], row["direction"]) == (source, way)
                for r in row["gib_s"]
            )
            rows = [r for r in BARE if r["behind"] == "a kernel" and r.get("connections") != 2]
            losses += [
                alone - rate for r in rows if (r["source"], r["direction"]) == (source, way) for rate in r["gib_s"]
            ]
    words = "it cost {:.1f} to {:.1f} GiB/s in and {:.1f} to {:.1f} out."
    assert words.format(*(pick(lost[way]) for way in ("in", "out") for pick in (min, max))) in PROSE
    third = [list(bare("third machine", "out", model="products", waiting=k)) for k in (1, 2, 4, 6)]
    more = [rate for rates in third[1:] for rate in rates]
    assert f"out at {min(more):.1f} to {max(more):.1f} GiB/s, with one at {min(third[0]):.1f}." in PROSE
    least = min(bare("third machine", "out", model="one kernel"))
    assert f"nothing is lost** on that third machine, out at {least:.1f} GiB/s or more" in PROSE
    others = [r for r in BARE if r["source"] == "first machine" and r["waiting"] and r["behind"] != "a kernel"]
    slower = [r for r in others if min(r["gib_s"]) < 51.3]
    assert (len(others), [(r["behind"], r["waiting"], r["direction"]) for r in slower]) == (
        16,
        [("a copy in", 3, "out")],
    )
    assert f"in behind their waits, out at {slower[0]['gib_s'][0]:.1f}." in PROSE
    assert "but for one of the sixteen rows" in PROSE
    two = {rate for row in BARE if row.get("connections") == 2 for rate in row["gib_s"]}
    assert max(two) - min(two) < 0.2


def test_the_reproducer_as_it_is_now() -> None:
    fourth = [r for r in BARE if r["source"] == "fourth machine" and r["model"] == "products"]
    rates = {(r["direction"], r["behind"], r["waiting"]): statistics.median(r["gib_s"]) for r in fourth}
    for way in ("in", "out"):
        assert rates[way, "a kernel", 1] == pytest.approx(rates[way, "nothing", 0], abs=0.1)
    words = (
        "with two and four out at {:.1f} and {:.1f} GiB/s, with four in at {:.1f}; with a copy behind four waits out"
    )
    found = [rates["out", "a kernel", 2], rates["out", "a kernel", 4], rates["in", "a kernel", 4]]
    assert words.format(*found) in PROSE
    assert f"behind four waits out at {rates['out', 'a copy', 4]:.1f}." in PROSE
    others = [rate for (_, behind, waiting), rate in rates.items() if behind != "a kernel" and waiting != 4]
    assert min(others) > 51


def test_what_is_said_of_the_eleventh_version() -> None:
    nones = [r.step_s or 0 for r in of("stream-eleventh") if r.spec.arm.name == "none"]
    streams = [r.step_s or 0 for r in of("stream-eleventh") if r.spec.arm.name == "stream"]
    ratios = [took / statistics.median(nones) for took in streams]
    assert "{:.3f} and {:.3f} x none with 4.4 GiB kept".format(*ratios) in PROSE
    steps = json.loads((ROOT / "results" / "h200-urgent.json").read_text())
    assert steps["urgent"] == streams
    words = "{:.3f} and {:.3f} s a step where urgent ones took {:.3f} and {:.3f}"
    assert words.format(*steps["not urgent"], *steps["urgent"]) in PROSE


def test_what_is_said_of_the_twelfth_version() -> None:
    none, first, emulated, second, auto = TWELFTH[0]
    base, kept = none.step_s or 1.0, (first.peak.state_at_backward_end_bytes or 0) / GIB
    assert f"has cost**: {(first.step_s or 0) / base:.3f}." in NOTES
    compute = compute_of_records([none])
    compute = replace(compute, loss=compute.forward - sum(layers_ms(none)) / 1e3)
    schedule = schedule_of(first)
    assert isinstance(schedule, Schedule)
    schedule = replace(schedule, loss_bytes=first.peak.staging_bytes)
    _, alone, both, out = split(STEPS["copies"][-1])
    seen = mean_rate(alone) * GIB, mean_rate(both) * GIB
    slower = Links(seen[0], mean_rate(out) * GIB, 2 * seen[1])
    said = [
        Replay(SHAPE, schedule, compute, links).run().step_s / compute.total
        for links in (links_of_records([first]), slower)
    ]
    words = "replay says {:.3f}, with those seen above ({:.1f} and {:.1f} GiB/s) {:.3f}."
    assert words.format(said[0], seen[0] / GIB, seen[1] / GIB, said[1]) in PROSE
    ms, alike = layers_ms(first), layers_ms(none)
    mean = statistics.fmean
    words = "layers 2 to 43 took {:.1f} ms each, `none` {:.1f}, and the last five {:.1f} to {:.1f}:"
    assert words.format(mean(ms[1:43]), mean(alike[1:43]), min(ms[43:]), max(ms[43:])) in PROSE
    late, usual = (statistics.median(lead_ms(r)) for r in (second, first))
    assert f"ahead by {late:.1f} ms in the median of the blocks, in the first by {usual:.1f}." in PROSE
    less = ((none.peak.steady_allocated_bytes or 0) - (auto.peak.steady_allocated_bytes or 0)) / GIB
    assert f"{(auto.step_s or 0) - base:.3f} s, with {less:.1f} GiB less on the GPU." in PROSE
    *tail, last = layers_ms(emulated)[37:]
    assert f"each takes {min(tail):.1f} to {max(tail):.1f} ms, the last one {last:.1f}." in PROSE
    assert max(layers_ms(emulated)[:37]) < min(tail)
    assert 4.3 < kept < 4.5
    assert phases(first)[-1] < 1e-4
