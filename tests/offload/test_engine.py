"""Every schedule against plain AdamW, bit for bit, under streams that do their worst; and every wait taken away."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offbench.offload.adversary import AdversarialEvent, AdversarialStreams
from offbench.offload.chunks import Staging
from offbench.offload.schedule import Schedule
from offbench.offload.streams import DeviceStreams, Why
from tests.offload import trainer
from tests.offload.falling import Falling

SCHEDULES = {
    "main": Schedule("main", offloaded=True, chunk_bytes=trainer.CAP, slots=None, copy_streams=False),
    "chunked": Schedule("chunked", offloaded=True, chunk_bytes=trainer.CAP, slots=2),
    "chunked, whole first step": Schedule(
        "chunked", offloaded=True, chunk_bytes=trainer.CAP, slots=2, first_step="whole"
    ),
    "overlap": Schedule("overlap", offloaded=True, chunk_bytes=trainer.CAP, slots=2, deferred=True, lead=3, ahead=1),
    "overlap, one slot": Schedule(
        "overlap", offloaded=True, chunk_bytes=trainer.CAP, slots=1, deferred=True, lead=1, ahead=0
    ),
    "overlap, all slots": Schedule(
        "overlap", offloaded=True, chunk_bytes=trainer.CAP, slots=99, deferred=True, lead=3, ahead=1
    ),
    "overlap, two resident": Schedule(
        "overlap",
        offloaded=True,
        chunk_bytes=trainer.CAP,
        resident_bytes=5000,
        slots=2,
        deferred=True,
        lead=2,
        ahead=1,
    ),
    "overlap, all resident": Schedule(
        "overlap", offloaded=True, chunk_bytes=trainer.CAP, resident_bytes=1 << 20, slots=2, deferred=True, lead=2
    ),
    "chunked, two resident": Schedule(
        "chunked", offloaded=True, chunk_bytes=trainer.CAP, resident_bytes=5000, slots=2
    ),
    "main, two resident": Schedule(
        "main", offloaded=True, chunk_bytes=trainer.CAP, resident_bytes=5000, slots=None, copy_streams=False
    ),
    "stream": trainer.stream(lead=3, ahead=2),
    "stream, two resident": trainer.stream(resident_bytes=5000, lead=1, ahead=0),
    "stream, no growth": trainer.stream(loss_bytes=0, lead=99),
    "stream, room for all": trainer.stream(staging_bytes=1 << 20, lead=99),
    "stream, ahead of step()": trainer.stream(lead=1, ahead=1),
    "stream, ahead of step(), one resident": trainer.stream(resident_bytes=2048, lead=1, ahead=0),
    "zerocopy": Schedule(
        "zerocopy", offloaded=True, chunk_bytes=trainer.CAP, deferred=True, update="host_memory", lead=3, ahead=1
    ),
    "zerocopy, two resident": Schedule(
        "zerocopy",
        offloaded=True,
        chunk_bytes=trainer.CAP,
        resident_bytes=5000,
        deferred=True,
        update="host_memory",
        lead=1,
        ahead=0,
    ),
    "zerocopy, synchronous": Schedule("zerocopy", offloaded=True, chunk_bytes=trainer.CAP, update="host_memory"),
    "overlap, whole first step": Schedule(
        "overlap", offloaded=True, chunk_bytes=trainer.CAP, slots=3, deferred=True, lead=99, first_step="whole"
    ),
}
WAITS = {
    "main": set(),
    "chunked": {Why.ARENA_READY, Why.SLOT_FREE, Why.LOADED, Why.UPDATED, Why.WRITTEN_BACK, Why.READ},
    "overlap": {Why.ARENA_READY, Why.SLOT_FREE, Why.HOST_CURRENT, Why.LOADED, Why.UPDATED, Why.READ},
    "overlap, all slots": {Why.ARENA_READY, Why.HOST_CURRENT, Why.LOADED, Why.UPDATED, Why.READ},
    "overlap, all resident": {Why.GRADIENTS_READY, Why.READ},
    "stream": set(Why) - {Why.HOST_CURRENT},
    "stream, ahead of step()": set(Why) - {Why.GRADIENT_FREE},
    "zerocopy": {Why.GRADIENTS_READY, Why.READ},
    "zerocopy, two resident": {Why.GRADIENTS_READY, Why.READ},
    "zerocopy, synchronous": {Why.READ},
    "stream, no growth": set(Why) - {Why.HOST_CURRENT, Why.GRADIENT_FREE},
}
# Where updates run on the compute stream a reader has nothing to wait for, and where few chunks fit, waiting for a
# slot implies that the previous step's write-back is over. Staged state follows the gradients through its arena.
IMPLIED = {
    ("chunked", Why.READ),
    ("zerocopy, synchronous", Why.READ),
    ("overlap", Why.HOST_CURRENT),
    ("stream", Why.GRADIENTS_READY),
    ("stream, no growth", Why.GRADIENTS_READY),
}
FOR_SPEED = {Why.LINK_FREE}
NEEDED = [
    (name, why) for name in WAITS for why in sorted(WAITS[name]) if (name, why) not in IMPLIED and why not in FOR_SPEED
]
NEEDED.append(("stream, two resident", Why.GRADIENTS_READY))


def streams_for(name: str, *args: Any, **kwargs: Any) -> AdversarialStreams:
    """State moves in ahead of step() only where activations make the peak."""
    return (Falling if "ahead of step()" in name else AdversarialStreams)(*args, **kwargs)


def run(name: str, streams: AdversarialStreams) -> trainer.Result:
    return trainer.run(SCHEDULES[name], streams, streams.watch if isinstance(streams, Falling) else None)


def worst() -> Iterator[dict[str, str]]:
    """Each stream as late or as early as it can be."""
    for paces in itertools.product(("lazy", "eager"), repeat=4):
        yield dict(zip(("in", "update", "out", "compute"), paces, strict=True))


@pytest.fixture(scope="module")
def reference() -> trainer.Result:
    return trainer.plain()


@pytest.mark.parametrize("name", SCHEDULES)
def test_bitwise_whatever_the_streams_do(name: str, reference: trainer.Result) -> None:
    for paces in worst():
        streams = streams_for(name, paces)
        assert run(name, streams).equals(reference), paces
        assert streams.order.violations == []
    for seed in range(8):
        streams = streams_for(name, dict.fromkeys(("in", "update", "out", "compute"), "random"), seed=seed)
        assert run(name, streams).equals(reference), seed
        assert streams.order.violations == []


def test_bitwise_on_the_cpu_device(reference: trainer.Result) -> None:
    for schedule in SCHEDULES.values():
        assert trainer.run(schedule, DeviceStreams(torch.device("cpu"))).equals(reference)


@pytest.mark.parametrize("name", WAITS)
def test_the_engine_makes_exactly_these_waits(name: str) -> None:
    streams = streams_for(name)
    run(name, streams)
    assert streams.waits == WAITS[name]


@pytest.mark.parametrize(("name", "why"), NEEDED)
def test_a_dropped_wait_changes_values(name: str, why: Why, reference: trainer.Result) -> None:
    wrong = 0
    for paces in worst():
        streams = streams_for(name, paces, drop=why)
        wrong += not run(name, streams).equals(reference)
        assert streams.order.violations, f"the order checker missed the dropped wait ({paces})"
    assert wrong, f"no pace of the streams shows that this wait is needed: {why}"


class Stale:
    """Gives each waiter the event of the previous such wait: an event of the wrong chunk."""

    def __init__(self) -> None:
        self.last: AdversarialEvent | None = None

    def __call__(self, event: AdversarialEvent) -> AdversarialEvent:
        previous, self.last = self.last, event
        return previous or event


@pytest.mark.parametrize(("name", "why"), [(n, w) for n, w in NEEDED if w not in (Why.ARENA_READY, Why.WRITTEN_BACK)])
def test_an_event_of_another_chunk_changes_values(name: str, why: Why, reference: trainer.Result) -> None:
    results = [run(name, streams_for(name, paces, swap=(why, Stale()))).equals(reference) for paces in worst()]
    assert not all(results)


@pytest.mark.parametrize("name", ["chunked", "overlap"])
def test_a_stale_slot_changes_values(name: str, reference: trainer.Result) -> None:
    def overlap_slots(engine) -> None:  # every chunk believes the start of the arena is its own and nobody is there
        starts = tuple(0 for _ in engine._staging.starts)

        class Blind(Staging):
            def displaced(self, chunks, index) -> range:
                return range(0)

        engine._staging = Blind(engine._staging.nbytes, starts)

    results = [
        trainer.run(SCHEDULES[name], AdversarialStreams(paces), overlap_slots).equals(reference) for paces in worst()
    ]
    assert not all(results)


def test_deferred_steps_queue_lead_then_stay_ahead() -> None:
    schedule = dataclasses.replace(SCHEDULES["overlap"], lead=2, ahead=1)
    queued = []

    def watch(engine) -> None:
        before_read = engine.before_read

        def spy(chunks):
            events = before_read(chunks)
            queued.append((max(chunks), engine.ledger.in_copies))
            return events

        engine.before_read = spy

    trainer.run(schedule, AdversarialStreams(), watch)
    n = max(chunk for chunk, _ in queued) + 1
    second_step = queued[2 * n : 3 * n]  # the first forward and backward read before any step
    assert second_step[0] == (0, 2)
    assert second_step[2] == (2, 4)
    assert second_step[-1] == (n - 1, n)


def test_every_wait_is_shown_to_be_needed() -> None:
    assert {why for _, why in NEEDED} == set(Why) - FOR_SPEED


def test_lead_counts_the_chunks_that_move() -> None:
    schedule = dataclasses.replace(SCHEDULES["overlap, two resident"], lead=2, ahead=0)
    after_step = []

    def watch(engine) -> None:
        step = engine.step

        def spy(works):
            before = engine.ledger.in_copies
            step(works)
            after_step.append(engine.ledger.in_copies - before)

        engine.step = spy

    trainer.run(schedule, AdversarialStreams(), watch)
    assert after_step[0] == 2
