"""Updates queued while the host waits for the device: all of them once, no bit changed, and none queued elsewhere."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbench.device import CpuDevice, ScalarReader, Stamp
from offbench.offload import OffloadedAdamW, flow, meanwhile
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.engine import Engine, Work
from offbench.offload.flow import BURST_HERE, FlowEngine
from offbench.offload.flow_step import FlowStep
from offbench.offload.fsdp import param_groups
from offbench.offload.schedule import Schedule
from offbench.workload.experts import ExpertParallel
from offbench.workload.kernels import Kernels
from tests.offload import sharded, trainer
from tests.offload.test_look_ahead import WIDTH, net, parameter_groups, train
from tests.offload.trainer import stream
from tests.ranks import on_ranks

OVERLAP = Schedule("overlap", offloaded=True, chunk_bytes=trainer.CAP, slots=2, deferred=True, lead=1, ahead=99)
SCHEDULES = {
    "stream": stream(lead=3, ahead=99),
    "stream, some of it resident": stream(lead=3, ahead=99, resident_bytes=3 * trainer.CAP),
    "overlap": OVERLAP,
    "zerocopy": dataclasses.replace(OVERLAP, name="zerocopy", update="host_memory"),
}


class Passes:
    """An event that has passed when it is asked for the `after`-th time."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.waited = False

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.waited = True


def test_it_asks_for_more_until_the_event_has_passed_or_there_is_no_more() -> None:
    asked: list[str] = []

    def more(name: str, there_is: int):
        left = [there_is]

        def queue_more() -> bool:
            asked.append(name)
            left[0] -= 1
            return left[0] >= 0

        return queue_more

    withdraw = [meanwhile.offer(more("first", 2)), meanwhile.offer(more("second", 1))]
    try:
        for after in (0, 1):
            event = Passes(after)
            meanwhile.wait(event)
            assert event.waited
            assert asked == ["first", "second"] * after, "each of them in every look"
        event = Passes(99)
        meanwhile.wait(event)
        assert asked == ["first", "second"] * 3, "until none has any left"
        assert (event.waited, event.left) == (True, 99 - 2)
    finally:
        for each in withdraw:
            each()
    meanwhile.wait(Passes(5))
    assert len(asked) == 6, "withdrawn"


def as_calls(works: list[Work]) -> None:
    """Give works what lets resident ones be updated in one go, as the optimizer's have it."""
    for work in works:
        work.calls = lambda state, work=work: [lambda: work.update(state)]  # type: ignore[misc,assignment]
        work.run = lambda calls: [call() for call in calls]  # type: ignore[assignment,func-returns-value]


def queued(
    schedule: Schedule, more: int, here: bool = True, together: bool = False
) -> tuple[trainer.Result, list[tuple[str, int]], list[str]]:
    """What a run comes to whose every read is followed by a wait in which the host asks so often for more (0: none
    is); what queued how many updates, in its last two steps; and broken orders."""
    streams = AdversarialStreams({"in": "eager", "update": "eager", "out": "eager"} if here else {})
    calls: list[tuple[str, int]] = []

    def watch(engine: Engine) -> None:
        before_read, look_ahead, step, queue_more = (
            engine.before_read,
            engine.look_ahead,
            engine.step,
            engine.queue_more,
        )

        def left() -> int:
            return len(engine._waiting())

        def spy_ahead(at_leisure=False) -> None:
            there = left()
            look_ahead(at_leisure)
            calls.append(("ahead", there - left()))

        def spy_read(chunks, look_ahead=True):
            there, needed = left(), engine._up_to(max(chunks))
            events = before_read(chunks, look_ahead=False)
            calls.append(("read", there - left()))
            assert there - left() == needed
            spy_ahead()
            if more:
                meanwhile.wait(Passes(more))
            return events

        def spy_more() -> bool:
            there, step = left(), getattr(engine, "_step", None)
            staged = len(step.staged) if isinstance(step, FlowStep) else 0
            found = queue_more()
            calls.append(("wait", there - left()))
            if staged and not there:
                assert found
                calls.append(("back", staged - len(step.staged)))
            return found

        def spy_step(works) -> None:
            if together:
                as_calls(works)
            step(works)
            calls.append(("step", len(works) - left()))

        withdraw.append(meanwhile.offer(spy_more))
        engine.before_read, engine.look_ahead, engine.step = spy_read, spy_ahead, spy_step  # type: ignore[method-assign]

    withdraw: list[Callable[[], None]] = []
    try:
        result = trainer.run(schedule, streams, watch)
    finally:
        withdraw[0]()
    last = [at for at, (kind, _) in enumerate(calls) if kind == "step"][-2]
    return result, calls[last:], streams.order.violations


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("more", [1, 3])
def test_what_is_queued_in_waits_changes_no_bit_and_is_queued_nowhere_else(name: str, more: int) -> None:
    result, calls, violations = queued(SCHEDULES[name], more)
    assert result.equals(trainer.plain())
    assert violations == []
    in_waits, ahead = ([count for kind, count in calls if kind == which] for which in ("wait", "ahead"))
    assert sum(in_waits) + sum(ahead) > 0
    assert sum(in_waits) > 0 or (more, name) == (1, "stream"), "one look is spent on making room"
    assert max(ahead) <= (BURST_HERE if name.startswith("stream") else 0), "of stream a few whose state is there"
    by_step = [count for kind, count in calls if kind == "step"]
    assert max(by_step) == 1 if name.startswith("stream") else min(by_step) > 0
    if more == 3:
        assert sum(count for kind, count in calls if kind == "read") <= 2, "reads find their updates queued"


@pytest.mark.parametrize("resident_bytes", [0, 3 * trainer.CAP])
def test_while_state_is_still_coming_only_reads_queue_its_updates(resident_bytes: int) -> None:
    """A stream with an update that waits would slow the copies, and what is on its way keeps them going."""
    schedule = stream(lead=3, ahead=99, resident_bytes=resident_bytes)
    result, calls, violations = queued(schedule, more=9, here=False)
    assert result.equals(trainer.plain())
    assert violations == []
    kinds = {which: sum(count for kind, count in calls if kind == which) for which in ("wait", "ahead", "read")}
    kept = resident_bytes // trainer.CAP
    assert kinds["read"] > 0
    assert kinds["wait"] + kinds["ahead"] <= 2 * kept, "in two steps: what stays has nothing to wait for"
    assert (kinds["wait"] > 0) == (kept > 0)


@pytest.mark.parametrize(
    ("chunk", "staged", "here"),
    [(0, 1, True), (1, 1, True), (2, 1, False), (3, 1, False), (3, 0, True)],
    ids=["resident", "has come in", "comes", "has no room", "can be given none by write-back"],
)
def test_an_update_is_queued_in_waits_once_it_waits_for_no_copy(chunk: int, staged: int, here: bool) -> None:
    """One for whose state there is no room, and nothing to write back for it, brings its memory about itself."""
    moved = {1: (None, Passes(0)), 2: (None, Passes(9))}
    step: Any = SimpleNamespace(
        waiting=[SimpleNamespace(chunk=SimpleNamespace(index=chunk))], moved=moved, staged=[None] * staged
    )
    engine: Any = SimpleNamespace(_resident={0: None}, _has_come=lambda step: FlowEngine._has_come(engine, step))
    assert FlowEngine._is_here(engine, step) == here


def test_room_is_made_in_waits_until_enough_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    filled: list[int] = []
    keep_coming, move_one = FlowEngine._keep_coming, FlowEngine._move_one

    def spy(self: FlowEngine, step: FlowStep) -> None:
        before = len(step.staged), len(step.to_move)
        coming = sum(
            one.stop - one.start for place, loaded in step.moved.values() if not loaded.query() for one in place.ranges
        )
        keep_coming(self, step)
        wrote = before[0] - len(step.staged)
        assert wrote == int(min(before) > 0 and coming < flow.COMING * self._moving_bytes)
        assert step.has_room == bool(wrote), "the next look has a chunk move in"
        assert len(step.to_move) == before[1]
        made.append(wrote)

    def spy_one(self: FlowEngine, step: FlowStep) -> bool:
        before = len(step.to_move)
        moved = move_one(self, step)
        filled.append(before - len(step.to_move))
        assert moved == filled[-1]
        return moved

    monkeypatch.setattr(FlowEngine, "_keep_coming", spy)
    monkeypatch.setattr(FlowEngine, "_move_one", spy_one)
    result, _, violations = queued(stream(lead=3, ahead=99), more=9)
    assert result.equals(trainer.plain())
    assert violations == []
    assert any(made)
    assert set(filled) == {0, 1}
    made.clear()
    monkeypatch.setattr(flow, "COMING", 0.0)
    result, _, _ = queued(stream(lead=3, ahead=99), more=9)
    assert result.equals(trainer.plain())
    assert made
    assert not any(made)


@pytest.mark.parametrize("has_room", [True, False])
def test_room_that_a_look_left_is_used_before_any_is_made(has_room: bool) -> None:
    """By an update whose state has not come, as one that a gather needs."""
    calls: list[str] = []
    step: Any = SimpleNamespace(has_room=has_room, moved={})

    def noted(name: str, moves: bool = False) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            calls.append(name)
            if moves:
                step.moved[7] = SimpleNamespace(state=None), Passes(9)
            return True

        return note

    stream = SimpleNamespace(wait=noted("wait"))
    engine: Any = SimpleNamespace(
        _resident={},
        _streams=SimpleNamespace(side=lambda name: stream),
        _go_on=noted("go on", moves=True),
        _make_place=noted("make place"),
        _move_ahead=noted("move", moves=True),
        _finish_update=noted("update"),
        _keep_staged=noted("keep"),
    )
    step.waiting = [SimpleNamespace(chunk=SimpleNamespace(index=7))]
    FlowEngine._queue_chunk(engine, step, goes_on=False)
    made = ["go on"] if has_room else ["make place", "move"]
    assert calls == [*made, "wait", "update", "keep"]
    assert step.has_room


@pytest.mark.parametrize("kept", [0, 3 * trainer.CAP])
@pytest.mark.parametrize("more", [1, 2, 3, 9])
def test_a_look_queues_one_thing(more: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host waits for may come during it. An update's own write-back is part of it where its memory goes back
    to those that lent it, and an arena is written back at once as it retires."""
    calls: list[str] = []
    looks: list[list[str]] = []
    queue_more = FlowEngine.queue_more

    def spied(name: str) -> None:
        real = getattr(FlowEngine, name)

        def spy(self: FlowEngine, *arguments: Any) -> Any:
            calls.append(name)
            return real(self, *arguments)

        monkeypatch.setattr(FlowEngine, name, spy)

    def spy_more(self: FlowEngine) -> bool:
        calls.clear()
        there_is = queue_more(self)
        looks.append([*calls])
        return there_is

    for name in ("_update", "_update_together", "_move_in", "_write_back"):
        spied(name)
    monkeypatch.setattr(FlowEngine, "queue_more", spy_more)
    result, _, violations = queued(stream(lead=3, ahead=99, resident_bytes=kept), more, together=True)
    assert result.equals(trainer.plain())
    assert violations == []
    assert {len(look) for look in looks} == {0, 1}
    seen = {name for look in looks for name in look}
    if kept:
        assert "_update_together" in seen
    else:
        copies = {"_move_in", "_write_back"}  # with one look a wait, reads queue the updates
        assert seen == (copies | {"_update"} if more > 1 else copies)


@pytest.mark.parametrize("more", [0, 1])
def test_the_last_read_has_all_write_back_queued(more: int) -> None:
    """The loss is next, and then the backward, whose gradients want the memory."""
    left: list[tuple[bool, int, int]] = []
    owed: list[int] = []
    return_state, queue_all = FlowEngine._return_state, FlowEngine._queue_all

    def counted(self: FlowEngine) -> None:
        """In a backward, and before the next step."""
        owed.append(len(self._step.staged) + len(self._step.waiting) if self._step is not None else 0)
        queue_all(self)

    def spy(self: FlowEngine, most: int) -> None:
        step = self._step
        before = len(step.staged) if step is not None and not step.waiting else 0
        return_state(self, most)
        if step is not None and not step.waiting:
            left.append((most >= len(self.chunks), before, len(step.staged)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowEngine, "_return_state", spy)
        patch.setattr(FlowEngine, "_queue_all", counted)
        patch.setattr(flow, "BURST_BACK", 0)
        result, _, violations = queued(stream(lead=3, ahead=99, staging_bytes=4 * trainer.CAP), more, here=False)
    assert result.equals(trainer.plain())
    assert violations == []
    assert max(before for every, before, _ in left if every) > 1
    assert {after for every, _, after in left if every} == {0}
    assert set(owed[:-2]) == {0}, "the last step, with no forward behind it, is finished by whoever reads parameters"


@pytest.mark.parametrize("name", SCHEDULES)
def test_where_nobody_waits_updates_are_queued_ahead_by_reads(name: str) -> None:
    schedule = dataclasses.replace(SCHEDULES[name], lead=2)
    result, calls, _ = queued(schedule, more=0)
    assert result.equals(trainer.plain())
    assert sum(count for kind, count in calls if kind == "ahead") > 0
    assert min(count for kind, count in calls if kind == "step") >= 2


def experts_wait(rank: int) -> tuple[int, bool]:
    """How often updates are asked for while the experts wait for their counts, and whether they waited."""
    ep = ExpertParallel(torch.distributed.group.WORLD, 4, torch.device("cpu"))
    plan = ep.plan(torch.tensor([2, 1, 0, 3]), 6, Kernels())
    ready, asked = Passes(3), [0]

    def queue_more() -> bool:
        asked[0] += 1
        return True

    withdraw = meanwhile.offer(queue_more)
    rows = torch.arange(12.0).view(6, 2)
    same = ep.through(lambda rows, ends: rows, rows, dataclasses.replace(plan, ready=ready))
    withdraw()
    assert torch.equal(same, rows)
    return asked[0], ready.waited


def test_experts_and_losses_are_waited_for_so() -> None:
    assert on_ranks(1, experts_wait) == [(3, True)]
    asked: list[int] = []
    withdraw = meanwhile.offer(lambda: bool(asked.append(1)))
    device = CpuDevice(torch.device("cpu"))
    event = Passes(1)
    device.stamp = lambda: Stamp(event, 0.0)  # type: ignore[method-assign]
    reader = ScalarReader(device, most=1)
    reader.send([torch.tensor(3.0)])
    assert reader.read() == [3.0]
    withdraw()
    assert (asked, event.waited) == ([1], True)


def test_no_more_than_ahead_is_queued_in_front_of_the_forward() -> None:
    far = {name: queued(dataclasses.replace(SCHEDULES[name], ahead=1), more=9)[1] for name in ("stream", "overlap")}
    for calls in far.values():
        assert max(count for kind, count in calls if kind == "wait") == 1
        reads = [at for at, (kind, _) in enumerate(calls) if kind == "read"]
        for first, second in itertools.pairwise(reads):
            assert sum(count for kind, count in calls[first:second] if kind in ("wait", "ahead")) <= 2


def test_a_read_queues_nothing_beyond_ahead_though_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int, int]] = []
    look_ahead = FlowEngine.look_ahead

    def spy(self: FlowEngine, at_leisure: bool = False) -> None:
        before = len(self._waiting())
        look_ahead(self, at_leisure)
        if self._waiting():
            found.append((before - len(self._waiting()), self._waiting()[0].chunk.index - 1, self._furthest))

    monkeypatch.setattr(FlowEngine, "look_ahead", spy)
    monkeypatch.setattr(flow, "BURST_HERE", 9)
    result, _, violations = queued(stream(lead=1, ahead=1, staging_bytes=6 * trainer.CAP), more=1)
    assert result.equals(trainer.plain())
    assert violations == []
    assert max(count for count, _, _ in found) > 0
    assert all(last <= furthest + 1 for count, last, furthest in found if count)


def trained(rank: int, arm: str) -> tuple[list[str], int]:
    """Where bits differ from AdamW's in a model whose layers wait for a read-back, and updates queued meanwhile."""
    model = net(True)
    expected = train(model, torch.optim.AdamW(parameter_groups(model), **sharded.OPTIONS, fused=True), rank)
    model = net(True)
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda *_: meanwhile.wait(Passes(2)))
    schedule = dataclasses.replace(sharded.schedule_of(arm, lead=1, ahead=4), chunk_bytes=1, whole_bytes=1 << 30)
    if arm == "stream":  # some of it stays, and is updated together
        schedule = dataclasses.replace(schedule, resident_bytes=8 * 3 * WIDTH * WIDTH)
    streams = AdversarialStreams({"in": "eager", "update": "eager", "out": "eager"})
    optimizer = OffloadedAdamW(
        parameter_groups(model), **sharded.OPTIONS, model=model, schedule=schedule, streams=streams
    )
    engine = optimizer._engine
    assert engine is not None
    optimizer.detach()
    counted, queue_more = [0], engine.queue_more
    together: list[int] = []
    if isinstance(engine, FlowEngine):
        queue_kept = engine._queue_kept

        def spy_kept(step, works, goes_on=True) -> None:
            together.append(len(works))
            queue_kept(step, works, goes_on)

        engine._queue_kept = spy_kept  # type: ignore[method-assign]

    def spy() -> bool:
        there = len(engine._waiting())
        found = queue_more()
        counted[0] += there - len(engine._waiting())
        return found

    engine.queue_more = spy  # type: ignore[method-assign]
    optimizer._watch(engine)
    wrong = sharded.differences(expected, train(model, optimizer, rank))
    assert (max(together, default=0) > 1) == (arm == "stream"), "what stays is updated together in waits"
    return wrong + streams.order.violations, counted[0]


def all_trained(rank: int) -> dict[str, tuple[list[str], int]]:
    return {arm: trained(rank, arm) for arm in ("overlap", "stream", "zerocopy")}


def test_a_model_that_waits_in_every_layer_trains_to_the_same_bits() -> None:
    for found in on_ranks(2, all_trained):
        for arm, (wrong, count) in found.items():
            assert wrong == [], arm
            assert count > 5, arm


@pytest.mark.parametrize("in_layers", [True, False])
def test_what_step_leaves_of_its_lead_is_queued_in_waits_if_there_are_some_in_every_layer(in_layers: bool) -> None:
    """Also moving chunks behind more resident ones than are queued ahead. One wait a step is no time for all."""
    schedule = stream(lead=2, ahead=1, resident_bytes=3 * trainer.CAP)
    streams, found = AdversarialStreams({"in": "eager", "update": "eager", "out": "eager"}), []

    def watch(engine: Engine) -> None:
        step, before_read = engine.step, engine.before_read
        withdraw.append(meanwhile.offer(engine.queue_more))

        def spy_read(chunks, look_ahead=True):
            events = before_read(chunks, look_ahead)
            if in_layers:
                meanwhile.wait(Passes(1))
            return events

        def spy_step(works) -> None:
            meanwhile.wait(Passes(1))
            step(works)
            after = len(engine._waiting())
            meanwhile.wait(Passes(99))
            moving = [work.chunk.index for work in works if work.chunk.index not in engine._resident]
            left = [work.chunk.index for work in engine._waiting()]
            found.append((len(works) - after, moving.index(left[0])))

        engine.step, engine.before_read = spy_step, spy_read  # type: ignore[method-assign]

    withdraw: list[Callable[[], None]] = []
    try:
        assert trainer.run(schedule, streams, watch).equals(trainer.plain())
    finally:
        withdraw[0]()
    (by_step, moving), *others = set(found)
    assert (moving, others) == (2, []), "up to the second that moves"
    assert by_step == 1 if in_layers else by_step > 2


class Longer(AdversarialStreams):
    """Counts memory for a workload whose activations grow layer by layer, and in the last step by more."""

    def __init__(self, after: int | None) -> None:
        super().__init__()
        self.after = after
        """Every read and step is followed by a wait that passes when it is asked so often; None: by none."""
        self.own, self.steps, self.reads = 0, 0, 0
        self.at_loss: list[int] = []

    def allocated(self) -> int:
        allowance = self.engine._allowance
        return self.own + allowance.staged_bytes + allowance._kept_bytes

    def wait(self) -> None:
        if self.after is not None:
            meanwhile.wait(Passes(self.after))

    def watch(self, engine: FlowEngine) -> None:
        self.engine = engine
        before_read, step, before_backward = engine.before_read, engine.step, engine.before_backward

        def read(chunks, look_ahead=True):
            if len(self.at_loss) == self.steps:
                self.reads += 1
                more = 4000 * max(0, self.reads - 6) if self.steps == trainer.STEPS - 1 else 0
                owed = engine._step
                gradients = owed.gradient_bytes - owed.freed_bytes if owed is not None else 0
                self.own = 100_000 + 1000 * self.reads + more + gradients
            events = before_read(chunks, look_ahead)
            self.wait()
            return events

        def spy_step(works) -> None:
            self.own = 100_000 + sum(work.chunk.nbytes // 2 for work in works)
            step(works)
            self.steps, self.reads = self.steps + 1, 0
            self.wait()

        def backward(chunks) -> None:
            if len(self.at_loss) == self.steps:
                self.at_loss.append(engine._allowance.staged_bytes)
            before_backward(chunks)

        engine.before_read, engine.step, engine.before_backward = read, spy_step, backward  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [None, 0, 1, 2, 99])
def test_a_longer_batch_leaves_no_more_staging_at_its_loss_however_long_the_waits(after: int | None) -> None:
    streams = Longer(after)
    withdraw: list[Callable[[], None]] = []

    def watch(engine: Engine) -> None:
        assert isinstance(engine, FlowEngine)
        streams.watch(engine)
        withdraw.append(meanwhile.offer(engine.queue_more))

    try:
        assert trainer.run(stream(lead=4, ahead=4), streams, watch).equals(trainer.plain())
    finally:
        withdraw[0]()
    assert streams.at_loss[-2] > 0
    assert streams.at_loss[-1] == 0


def test_waits_that_have_passed_are_none() -> None:
    before = meanwhile.waits()
    meanwhile.wait(Passes(0))
    assert meanwhile.waits() == before
    meanwhile.wait(Passes(1))
    assert meanwhile.waits() == before + 1


def fails_to_drain(rank: int) -> int:
    model = net(True)
    schedule = sharded.schedule_of("stream")
    optimizer = OffloadedAdamW(model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule)
    assert optimizer._engine is not None

    def drain() -> None:
        raise torch.OutOfMemoryError

    optimizer._engine.drain = drain  # type: ignore[method-assign]
    assert optimizer._finalizer is not None
    with pytest.raises(torch.OutOfMemoryError):
        optimizer._finalizer()
    assert "unshard" not in param_groups(model)[0].__dict__, "the model is as it was"
    return len(meanwhile._offers)


def test_an_optimizer_that_cannot_drain_is_asked_no_more() -> None:
    assert on_ranks(1, fails_to_drain) == [0]


def test_an_optimizer_that_is_dropped_or_detached_is_asked_no_more() -> None:
    assert on_ranks(1, _offered) == [[0, 1, 0, 1, 0]]


def _offered(rank: int) -> list[int]:
    model = net(True)
    counts = [len(meanwhile._offers)]
    for end in ("drop", "detach"):
        schedule = sharded.schedule_of("stream")
        optimizer = OffloadedAdamW(model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule)
        counts.append(len(meanwhile._offers))
        if end == "detach":
            optimizer.detach()
        del optimizer
        gc.collect()
        counts.append(len(meanwhile._offers))
    return counts
