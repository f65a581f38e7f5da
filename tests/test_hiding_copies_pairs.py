"""The notes say what the records of the latest version of stream say, and of the rows with five pairs each."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from offbench.compare import compare
from offbench.offload.replay import Replay, Replayed
from offbench.offload.schedule import Schedule
from offbench.planner.ideal import policy_ideal
from offbench.planner.sources import compute_of_records, links_of_records, schedule_of
from offbench.record import RunRecord
from offbench.units import GIB
from offbench.workload import presets
from tests.test_hiding_copies import ADAMW_BYTES, NOTES, ROOT, TENTH, of, phases, same, table

PAIRS = of("table-native")
NONES, STREAMS = ([r for r in PAIRS if r.spec.arm.name == arm] for arm in ("none", "stream"))
SHAPE = presets.find("qwen3-30b-a3b")


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
    median = statistics.median
    assert f"by {median(lead_ms(small)):.1f} ms in the median, {median(lead_ms(auto)):.1f} with `auto`" in prose
    later = [median(lead_ms(r)) for r in NONES]
    words = "by {:.1f} ms in the median here, and in the launches below by {:.1f}, {:.1f}, {:.1f}, {:.1f} and {:.1f},"
    assert words.format(median(lead_ms(none)), *later) in prose
    ratios = [(r.step_s or 0) / compute_of_records(NONES).total for r in STREAMS]
    assert f"where stream came to between {min(ratios):.3f} and {max(ratios):.3f} x none" in prose
    early = layers_ms(small)[:33]
    assert f"took {min(early):.1f} to {max(early):.1f} ms" in prose
    page = " ".join((ROOT / "docs" / "using-the-optimizer.md").read_text().split())
    before, after = ((r[1].step_s or 0) / (r[0].step_s or 1) for r in (of("stream-ninth-auto"), TENTH[0]))
    assert f"took {after:.3f} times as long as `none` with `--state-budget auto`, the one before {before:.3f}:" in page


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


def test_what_the_ideal_leaves_out() -> None:
    prose = " ".join(NOTES.split())
    ideals = [ideal.step_s for r in STREAMS if (ideal := policy_ideal(r, NONES))]
    above = [(r.step_s or 0) - ideal for r, ideal in zip(STREAMS, ideals, strict=True)]
    assert f"from {-min(above):.3f} s below to {max(above):.3f} s above" in prose
    rest = (NONES[1].phases_s.forward or 0) - sum(layers_ms(NONES[1])) / 1e3
    share = compute_of_records(NONES).loss
    assert f"takes {share:.3f} s for head and loss" in prose
    assert f"all that no block takes is {rest:.3f}." in prose


def replayed(kept_gib: float, slower: float = 1.0) -> tuple[Replay, Replayed, float]:
    """What the engine takes with so much state kept, and that by the step of `none`."""
    record, compute = STREAMS[1], compute_of_records(NONES)
    compute = replace(compute, loss=compute.forward - sum(layers_ms(NONES[1])) / 1e3)
    schedule = schedule_of(record)
    assert isinstance(schedule, Schedule)
    plan = replace(schedule, resident_bytes=int(kept_gib * GIB), loss_bytes=record.peak.staging_bytes)
    links = links_of_records([record])
    replay = Replay(SHAPE, plan, compute, links, update=slower * compute.update)
    found = replay.run()
    return replay, found, found.step_s / compute.total


def kept_gib(replay: Replay) -> float:
    return sum(state.numel() for state in replay._engine._resident.values()) / GIB


def test_what_the_engine_takes_against_the_clock() -> None:
    for line, slower in zip(table("replayed, 3.8 GiB kept"), (1, 4, 8), strict=True):
        replay, found, x_none = replayed(4.0, slower)
        assert kept_gib(replay) == pytest.approx(3.79, abs=0.01)
        assert all(map(same, line, [found.to_head_s, found.into_s, found.both_s, x_none])), (line, found)
    prose = " ".join(NOTES.split())
    (low, at_low, first), (more, _, second) = replayed(4.0), replayed(4.5)
    assert at_low.idle_s + at_low.out_s < 0.006
    words = "{:.3f} x none with {:.1f} GiB kept and {:.3f} with {:.1f} ({:.1f} GiB allocated, 24 less than `none`)"
    none, record = ((r.peak.steady_allocated_bytes or 0) / GIB for r in (NONES[0], STREAMS[0]))
    peak = record + kept_gib(more) - kept_gib(low)
    assert words.format(first, kept_gib(low), second, kept_gib(more), peak) in prose
    assert none - peak > 24
    tried = [replayed(gib) for gib in (4.8, 5.0, 5.4, 5.6)]
    begins = next(kept_gib(replay) for replay, _, x_none in tried if x_none < 1)
    assert f"1.00 begins at {begins:.1f} GiB; what `auto` takes, 8.4," in prose


@pytest.mark.parametrize("share", [0.22, 0.42])
def test_when_expert_counts_are_read_back_hardly_matters(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for slower in (1, 4, 8):
        _, before, _ = replayed(4.0, slower)
        with monkeypatch.context() as patch:
            patch.setattr("offbench.offload.replay.ATTENTION", share)
            _, after, _ = replayed(4.0, slower)
        assert after.step_s == pytest.approx(before.step_s, abs=1e-3)


def test_what_bounds_stream_layer_by_layer() -> None:
    prose = " ".join(NOTES.split())
    none, record = NONES[1], STREAMS[1]
    ms, mean = layers_ms(record), statistics.fmean
    step = (record.step_s or 0) / statistics.median(r.step_s or 0 for r in NONES)
    assert f"took {step:.3f} x the median `none`" in prose
    watched = sum(ms) / 1e3 + (record.phases_s.clip or 0)
    assert f"clipping and the blocks took {watched:.3f} s:" in prose
    assert f"27 {mean(ms[:27]):.1f} ms each, `none` {mean(layers_ms(none)[:27]):.1f}," in prose
    state = ADAMW_BYTES * (record.local_params or 0)
    layer = (state - ADAMW_BYTES * 2 * SHAPE.vocab * SHAPE.hidden / 8) / SHAPE.layers
    into, both = (record.link.in_bytes_per_s or 0) / GIB, (record.link.both_bytes_per_s or 0) / 2 / GIB
    rate = layer / GIB / mean(ms[27:47]) * 1e3
    assert f"to 47 {mean(ms[27:47]):.1f}, as state came in at {rate:.1f} GiB/s" in prose
    assert f"while as much left ({both:.1f})" in prose
    for late, launches in ((False, (0, 2)), (True, (1, 3, 4))):
        for launch in launches:
            early = mean(layers_ms(STREAMS[launch])[:27])
            assert (early < 10.0) == late, "the others' early layers take as long as those of `none` and an update"
    held, stays = record.peak.state_at_backward_end_bytes or 0, record.peak.staging_bytes or 0
    moves, leaves = (state - held) / GIB, (state - held - stays) / GIB
    assert (
        f"of {moves:.1f} GiB that moved in {stays / GIB:.1f} were staged at most. The other {leaves:.1f} leave"
        in prose
    )
    took = leaves / both + (moves - leaves) / into
    assert f"longer: {took:.3f} s in all, {moves / into:.3f} one way alone" in prose
