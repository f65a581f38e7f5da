"""The notes say what the records of the latest version of stream say, and of the rows with five pairs each."""

from __future__ import annotations

import json
import statistics

import pytest

from offbench.compare import compare
from offbench.planner.sources import compute_of_records
from offbench.record import RunRecord
from offbench.units import GIB
from offbench.workload import presets
from tests.test_hiding_copies import ADAMW_BYTES, NOTES, ROOT, TENTH, of, phases, same, table

PAIRS = of("table-native")


def lead_ms(record: RunRecord) -> list[float]:
    assert record.host_lead
    return [1e3 * lead for lead in record.host_lead.lead_s]


def layers_ms(record: RunRecord) -> list[float]:
    assert record.host_lead
    return [1e3 * took for took in record.host_lead.forward_s]


def test_what_is_said_of_the_tenth_version() -> None:
    prose, (none, auto, small) = " ".join(NOTES.split()), TENTH[0]
    steps = [step.step_s for step in none.steps if step.step_s]
    assert f"steps of that `none` took {min(steps):.3f} to {max(steps):.3f} s" in prose
    (forward, _, _, adamw), (longer, _, _, step) = phases(none), phases(auto)
    assert f"The forward is {longer - forward:.3f} s longer" in prose
    assert step < 1e-4
    assert f"where AdamW took {adamw:.3f} s" in prose
    assert max(lead_ms(none)[1:-1]) == pytest.approx(0.1, abs=0.05)
    later = [statistics.median(lead_ms(r)) for r in PAIRS if r.spec.arm.name == "none"][-2:]
    assert "by {:.1f} and {:.1f} ms (median)".format(*later) in prose
    early = layers_ms(small)[:33]
    assert f"took {min(early):.1f} to {max(early):.1f} ms" in prose


def test_who_queues_makes_no_difference() -> None:
    prose = " ".join(NOTES.split())
    means: dict[str, dict[str, float]] = {}
    rows = json.loads((ROOT / "results" / "h200-queueing.json").read_text())
    for row in rows:
        same_way = [other["steps"] for other in rows if (other["tag"], other["name"]) == (row["tag"], row["name"])]
        means.setdefault(row["tag"], {})[row["name"]] = statistics.fmean(s for steps in same_way for s in steps)
    native, emulated = means.values()
    slow = native.pop("E waits kept+1 most2")
    assert f"took {min(native.values()):.3f} to {max(native.values()):.3f} s with 4.2 GiB" in prose
    assert f"and {min(emulated.values()):.3f} to {max(emulated.values()):.3f} s with 14.2 GiB" in prose
    assert f"was slower, {slow:.3f} s" in prose


def test_five_pairs_with_none() -> None:
    (group,) = compare(PAIRS)
    none = group.rows[0]
    assert none.step_s
    for line, row in zip(table("arm | step s"), group.rows, strict=True):
        assert row.step_s
        assert row.step_s.n == row.pairs == 5
        low, high = row.x_none_interval or (1, 1)
        assert row.ideal_s
        found = [row.ideal_s / none.ideal_s if none.ideal_s else 0.0]
        memory = (row.steady_peak_bytes, row.conditions.reserved_bytes, row.conditions.device_used_bytes)
        found += [(nbytes or 0) / GIB for nbytes in memory]
        assert same(line[0], row.step_s.median)
        assert line[1] == ("1" if row is none else f"{low:.3f} to {high:.3f}")
        assert all(map(same, line[2:], found)), (line, found)
    assert f"`none` took {none.step_s.low:.3f} to {none.step_s.high:.3f} s." in NOTES


def test_what_bounds_stream_layer_by_layer() -> None:
    prose = " ".join(NOTES.split())
    nones = [r for r in PAIRS if r.spec.arm.name == "none"]
    none, record = nones[1], [r for r in PAIRS if r.spec.arm.name == "stream"][1]
    ms, mean = layers_ms(record), statistics.fmean
    assert f"27 take {mean(ms[:27]):.1f} ms each, `none` {mean(layers_ms(none)[:27]):.1f}:" in prose
    assert (
        f"47 take {mean(ms[27:47]):.1f} ms each, and the last one, with the head's state behind it, {ms[47]:.1f}."
        in prose
    )
    shape = presets.find("qwen3-30b-a3b")
    state = ADAMW_BYTES * (record.local_params or 0)
    layer = (state - ADAMW_BYTES * 2 * shape.vocab * shape.hidden / 8) / shape.layers
    into, both = (record.link.in_bytes_per_s or 0) / GIB, (record.link.both_bytes_per_s or 0) / 2 / GIB
    assert (
        f"A layer has {layer / GIB:.3f} GiB, so it comes in at {layer / GIB / mean(ms[27:47]) * 1e3:.1f} GiB/s"
        in prose
    )
    assert f"({both:.1f} in that launch's probe), not the {into:.1f} of one way" in prose
    held, stays = record.peak.state_at_backward_end_bytes or 0, record.peak.staging_bytes or 0
    moves, leaves = (state - held) / GIB, (state - held - stays) / GIB
    assert (
        f"of {moves:.1f} GiB that moved in {stays / GIB:.1f} were staged at most, so {leaves:.1f} GiB leave" in prose
    )
    took = leaves / both + (moves - leaves) / into
    forward, _, clip, step = phases(none)
    room = clip + step + forward - compute_of_records(nones).loss
    assert f"that takes {moves / into:.3f} s, with {leaves:.1f} GiB leaving beside it {took:.3f};" in prose
    assert f"of `none` take {room:.3f}. The other {took - room:.3f} s are exposed" in prose
    median = statistics.median(r.step_s or 0 for r in nones)
    assert f"took {(record.step_s or 0) - median:.3f} s more than the median" in prose
    allowed = 0.01 * median
    assert f"1.01, {allowed:.3f} s," in prose
    kept = [held / GIB + into * (took - room - more) for more in (allowed, 0.0)]
    assert "takes {:.1f} GiB kept, and {:.1f} to hide everything".format(*kept) in prose
