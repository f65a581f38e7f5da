"""The engines against the clock: streams that keep time, and what an engine's schedule costs on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from offbench.arms import ARMS
from offbench.offload import meanwhile
from offbench.offload.replay import STEPS, Replay
from offbench.offload.schedule import Schedule
from offbench.offload.streams import Why
from offbench.offload.timed import TimedCopier, TimedEvent, TimedStreams
from offbench.planner.inputs import Compute, Links
from offbench.workload import presets

MIB = 1 << 20
LINKS = Links(100 * MIB, 80 * MIB, 120 * MIB)


def test_operations_take_their_time_and_wait_for_each_other() -> None:
    streams = TimedStreams(LINKS)
    copier, into, update = TimedCopier(streams), streams.side("in"), streams.side("update")
    memory = torch.empty(50 * MIB, dtype=torch.uint8)
    into.run(lambda: copier.copy(memory, memory))
    loaded = into.record()
    update.wait(loaded, Why.LOADED)
    update.run(lambda: setattr(streams, "work", 2.0))
    end = update.record()
    assert not loaded.query()
    loaded.synchronize()
    assert (streams.now, loaded.query(), end.query()) == (0.5, True, False)
    streams.side("out").wait(end, Why.UPDATED)
    behind = streams.side("out").record()
    assert not behind.query()
    end.synchronize()
    assert streams.now == 2.5
    behind.synchronize()
    assert (streams.now, behind.query()) == (2.5, True)
    assert streams.spans == [(0.0, 0.5, True, False), (0.5, 2.5, False, False)]


def test_a_span_goes_on_while_the_link_does_the_same() -> None:
    streams = TimedStreams(LINKS)
    streams.side("in").push(50 * MIB)
    streams.side("in").push(50 * MIB)
    streams.side("out").wait(TimedEvent(streams.side("in").queue[1], streams), Why.UPDATED)
    last = streams.side("out").push(80 * MIB)
    for late in (0.2, 0.6):  # whoever looks in between cuts nothing
        streams.run_until(streams.side("host").push(late))
    streams.run_until(last)
    assert streams.spans == [(0.0, 1.0, True, False), (1.0, pytest.approx(2.0), False, True)]


def test_both_directions_share_the_link_and_one_has_it_alone() -> None:
    """Beside each other 66.7 and 53.3 MiB/s; what is left comes in at 100."""
    streams = TimedStreams(LINKS)
    copier, memory = TimedCopier(streams), torch.empty(80 * MIB, dtype=torch.uint8)
    ends = []
    for way, nbytes in (("in", 80 * MIB), ("out", 40 * MIB)):
        streams.side(way).run(lambda nbytes=nbytes: copier.copy(memory[:nbytes], memory[:nbytes]))  # type: ignore[misc]
        ends.append(streams.side(way).record())
    ends[1].synchronize()
    assert streams.now == pytest.approx(0.75)
    ends[0].synchronize()
    assert streams.now == pytest.approx(0.75 + 0.3)


def test_what_can_never_run_is_an_error() -> None:
    streams = TimedStreams(LINKS)
    late = streams.side("out").push(1.0)
    streams.side("in").wait(TimedEvent(late, streams), Why.SLOT_FREE)
    blocked = streams.side("in").push(1.0)
    late.after.append(blocked)
    with pytest.raises(RuntimeError, match="deadlock: what in waits for never runs"):
        streams.run_until(blocked)


SHAPE = presets.find("tiny")
LAYERS = 12
STATE = 8 * SHAPE.local_params(8, 8, LAYERS)
COMPUTE = Compute(forward=1.3, backward=2.0, update=0.1, clip=0.05, loss=0.1)
CHUNK = STATE // LAYERS // 2


def schedule(arm: str, **options: Any) -> Schedule:
    found = ARMS[arm].schedule(ARMS[arm].resolve(chunk_bytes=CHUNK, pieces=1, lead=2, ahead=4))
    return replace(found, **options)


def links(seconds: float) -> Links:
    """Carries all state in so many seconds, and is half as fast both ways."""
    rate = STATE / seconds
    return Links(rate, rate, rate)


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_copies_that_take_no_time_cost_nothing(arm: str) -> None:
    """AdamW runs beside the forward, but for the part that the first layers wait for."""
    found = Replay(SHAPE, schedule(arm), COMPUTE, links(1e-6), layers=LAYERS).run()
    rest = COMPUTE.total - COMPUTE.update
    assert rest < found.step_s < rest + 0.3 * COMPUTE.update
    assert found.to_head_s == pytest.approx(found.step_s - COMPUTE.loss - COMPUTE.backward)


@pytest.mark.parametrize("kept", [0.0, 0.3])
def test_on_a_slow_link_all_that_moves_has_come_in_before_the_head(kept: float) -> None:
    slow = links(2.0)
    plan = schedule("stream", resident_bytes=int(kept * STATE), staging_bytes=STATE // 8, loss_bytes=STATE // 2)
    replay = Replay(SHAPE, plan, COMPUTE, slow, layers=LAYERS)
    found = replay.run()
    moved = sum(chunk.nbytes for chunk in replay._chunks) - sum(
        state.numel() for state in replay._engine._resident.values()
    )
    assert found.into_s * slow.into + found.both_s * slow.both / 2 == pytest.approx(moved, rel=1e-3)
    parts = found.into_s + found.both_s + found.out_s + found.idle_s
    assert parts == pytest.approx(found.to_head_s)
    assert found.to_head_s > moved / slow.into
    assert found.idle_s < 0.02 * found.to_head_s, "the link is what all wait for"
    assert found.staging_bytes <= STATE // 2 + STATE // 8 + 2 * CHUNK


def test_memory_that_may_not_stay_leaves_beside_what_comes_in() -> None:
    steps = []
    for share in (0.1, 0.25, 0.4):
        plan = schedule("stream", staging_bytes=STATE // 8, loss_bytes=int(share * STATE))
        steps.append(Replay(SHAPE, plan, COMPUTE, links(2.0), layers=LAYERS).run())
    assert steps[0].step_s > steps[1].step_s > steps[2].step_s
    assert min(steps[0].both_s, steps[1].both_s) > 1.1 * steps[2].both_s
    assert steps[0].staging_bytes < steps[1].staging_bytes < steps[2].staging_bytes


def test_updates_that_take_long_beside_the_model_hold_up_the_next_copy() -> None:
    plan = schedule("stream", staging_bytes=STATE // 8, loss_bytes=STATE // 2)
    fast, slow = (
        Replay(SHAPE, plan, COMPUTE, links(2.0), layers=LAYERS, update=update).run() for update in (None, 1.0)
    )
    assert slow.to_head_s > fast.to_head_s + 0.02
    assert slow.into_s + slow.both_s == pytest.approx(fast.into_s + fast.both_s, rel=0.02), "and the link waits"


def test_without_waits_of_the_host_reads_queue_the_updates() -> None:
    plan = schedule("stream", staging_bytes=STATE // 8, loss_bytes=STATE // 2)
    before = meanwhile.waits()
    found = Replay(SHAPE, plan, COMPUTE, links(2.0), layers=LAYERS, host_waits=False).run()
    assert meanwhile.waits() == before
    waited = Replay(SHAPE, plan, COMPUTE, links(2.0), layers=LAYERS).run()
    assert meanwhile.waits() - before == STEPS * (LAYERS + 1), "for clipping, and in every layer"
    assert found.step_s == pytest.approx(waited.step_s, rel=0.05)
    assert not meanwhile._offers


def test_a_replay_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(SHAPE, schedule("stream"), COMPUTE, links(2.0), layers=LAYERS)

    def fail(works: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(replay._engine, "step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        replay.run()
    assert not meanwhile._offers
