"""An update that fails in its middle cannot be made up for: nothing is trained or saved after it. One that finds no
memory before it begins is made later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from offbench.errors import OffbenchError
from offbench.offload import OffloadedAdamW, flow_memory, meanwhile
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.chunks import Chunk
from offbench.offload.engine import Engine, Work
from offbench.offload.flow import FlowEngine
from offbench.offload.staged import Staged
from offbench.offload.streams import Event
from offbench.verify.trainees import wrapped_mlp
from tests.offload import sharded, trainer
from tests.offload.test_flow import Full
from tests.offload.test_meanwhile import Passes, as_calls
from tests.offload.trainer import stream
from tests.ranks import on_ranks

WAYS = {
    "moving, by a read": (stream(lead=1), False),
    "moving, in a wait": (stream(lead=1, ahead=99), True),
    "resident, by a read": (stream(lead=1, resident_bytes=1 << 30), False),
    "resident, in a wait": (stream(lead=1, ahead=99, resident_bytes=1 << 30), True),
    "overlap, by a read": (dataclasses.replace(stream(lead=1), write_back="forward", slots=2), False),
    "chunked": (dataclasses.replace(stream(), write_back="forward", slots=2, deferred=False), False),
}
SAID = (
    "an optimizer update failed before (OutOfMemoryError('no temporaries')): parameters and moments are those of no "
    "step; make model and optimizer anew and load a checkpoint"
)


def fails(state: Staged) -> None:
    """Runs out of memory after a part of the update has run, as one with temporaries can."""
    state.parts[0][1].fill_(1)
    raise torch.OutOfMemoryError("no temporaries")


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_trained_or_saved_after_an_update_that_failed(way: str) -> None:
    schedule, waits = WAYS[way]
    engines: list[Engine] = []
    withdraw: list[Callable[[], None]] = []

    def watch(engine: Engine) -> None:
        engines.append(engine)
        step, before_read, steps = engine.step, engine.before_read, [0]

        def spy_step(works: list[Work]) -> None:
            steps[0] += 1
            if steps[0] == 2:
                works[4].update = fails
            as_calls(works)
            step(works)

        def spy_read(chunks: Sequence[int], look_ahead: bool = True) -> list[Event]:
            events = before_read(chunks, look_ahead)
            if waits:
                meanwhile.wait(Passes(9))
            return events

        engine.step, engine.before_read = spy_step, spy_read  # type: ignore[method-assign,assignment]
        if waits:
            withdraw.append(meanwhile.offer(engine.queue_more))

    try:
        with pytest.raises(torch.OutOfMemoryError) as failure:
            trainer.run(schedule, AdversarialStreams(dict.fromkeys(("in", "update", "out"), "immediate")), watch)
        (engine,) = engines
        attempts: list[Callable[[], object]] = [engine.drain, lambda: engine.step([])]
        if schedule.deferred:
            attempts.append(lambda: engine.before_read([chunk.index for chunk in engine.chunks]))
        if waits:
            attempts.append(lambda: meanwhile.wait(Passes(9)))
        for attempt in attempts:
            with pytest.raises(OffbenchError) as error:
                attempt()
            assert str(error.value) == SAID
            assert error.value.__cause__ is failure.value
        engine.end()
    finally:
        for end in withdraw:
            end()


@pytest.mark.parametrize("waits", [False, True])
def test_an_update_that_finds_no_memory_for_its_state_is_made_later(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices that cannot reach the state in host memory either."""
    monkeypatch.setattr(flow_memory, "is_reachable", lambda store: False)
    streams = Full(dict.fromkeys(("in", "update", "out"), "immediate"))
    raised: list[str] = []
    withdraw: list[Callable[[], None]] = []

    def watch(engine: Engine) -> None:
        assert isinstance(engine, FlowEngine)
        stage, before_read = engine.stage, engine.before_read

        def spy_stage(chunk: Chunk) -> Any:
            return None if streams.is_full and chunk.index == 3 else stage(chunk)

        def spy_read(chunks: Sequence[int], look_ahead: bool = True) -> list[Event]:
            streams.is_full = not raised
            try:
                if waits:
                    meanwhile.wait(Passes(99))
                events = before_read(chunks, look_ahead)
            except torch.OutOfMemoryError as error:
                raised.append(str(error))
                events = None
            streams.is_full = False
            return before_read(chunks, look_ahead) if events is None else events

        engine.stage, engine.before_read = spy_stage, spy_read  # type: ignore[method-assign,assignment]
        withdraw.append(meanwhile.offer(engine.queue_more))

    try:
        found = trainer.run(stream(lead=1, ahead=99), streams, watch)
    finally:
        withdraw[0]()
    assert raised == ["none left"]
    assert found.equals(trainer.plain())
    assert streams.order.violations == []


def evaluated(rank: int, implementation: str) -> list[str]:
    """Steps of a model that waits in every block, with all state resident; an evaluation follows the first."""
    found = []
    for offloads in (False, True):
        model = wrapped_mlp(init_device_mesh("cpu", (1,)), torch.device("cpu"), torch.float32, 6, 64)
        for block in model.blocks:
            block.register_forward_hook(lambda *_: meanwhile.wait(Passes(4)))  # type: ignore[operator]
        how: dict[str, Any] = {implementation: True}
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, **how)
        if offloads:
            schedule = sharded.schedule_of("stream", chunk_bytes=1 << 16, lead=1, ahead=1, state_budget=1 << 30)
            optimizer = OffloadedAdamW(
                model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule, implementation=implementation
            )
        for step in range(3):
            model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                with torch.inference_mode():
                    model(torch.ones(4, 64))
        found.append(sharded.snapshot(model, optimizer))
    return sharded.differences(*found)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_an_evaluation_may_be_the_first_to_update_what_is_resident(implementation: str) -> None:
    """What it cuts out of resident state is kept for training."""
    assert on_ranks(1, evaluated, implementation) == [[]]
