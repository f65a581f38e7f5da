"""What the engine leaves out so that the host is not in the way, and that nothing else changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbench.offload.allowance import Allowance
from offbench.offload.extents import Extents
from offbench.offload.flow_step import FlowStep
from offbench.offload.streams import DeviceStream, DeviceStreams, Why
from tests.offload import trainer
from tests.offload.falling import Falling
from tests.offload.test_flow import event
from tests.offload.test_prefetch import SMALL, STATE


class Asked(DeviceStreams):
    """Counts how often the allocator is asked."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asks = 0

    def allocated(self) -> int:
        self.asks += 1
        return 1000


def allowance() -> tuple[Allowance, Extents, Asked]:
    streams, extents = Asked(), Extents()
    made = Allowance(streams, extents)
    made._headroom.peak = made._headroom.falling = 5000
    return made, extents, streams


def test_the_allocator_is_asked_once_at_a_modules_backward_while_no_memory_comes_or_goes() -> None:
    allowed, extents, streams = allowance()
    allowed.backward()
    assert (allowed.ahead_of_step(), streams.asks) == (4000, 1)
    extents.add(torch.empty(512, dtype=torch.uint8), Why.ARENA_READY, event())
    assert (allowed.ahead_of_step(), streams.asks) == (4000, 2)
    allowed.backward()
    allowed.backward_ends()
    assert (allowed.ahead_of_step(), streams.asks) == (4000, 4), "after the last one it is asked anew"


def test_whether_memory_is_crowded_is_asked_again_only_when_memory_came_or_went() -> None:
    allowed, _, streams = allowance()
    step: Any = SimpleNamespace(grown_bytes=0, freed_bytes=0, gradient_bytes=1)
    for asks in (1, 1, 2, 2):
        if asks > streams.asks:
            allowed.changed()
        assert (allowed.grows(step, 100), streams.asks) == (True, asks)
    assert {"grown_bytes", "freed_bytes", "gradient_bytes"} <= set(FlowStep.__dataclass_fields__)


def test_gradients_are_looked_at_until_those_still_to_come_are_too_many() -> None:
    def meanwhile(engine: Any, step: int) -> None:
        looked_at: list[int] = []

        def there(chunk: int) -> bool:
            looked_at.append(chunk)
            return False

        engine.has_gradients = there
        if step:
            first = engine.chunks[0].nbytes // 2
            assert first < engine.prefetch._coming(first) < STATE // 2
            assert looked_at == [0, 1]
            assert engine.prefetch._coming(STATE // 2) == STATE // 2

    streams = Falling()
    trainer.run(SMALL, streams, streams.watch, meanwhile=meanwhile)


class Module:
    """As torch.cuda: the current stream is set, not entered."""

    def __init__(self) -> None:
        self.now = SimpleNamespace(name="caller's", device_index=0)

    def current_stream(self) -> Any:
        return self.now

    def set_stream(self, stream: Any) -> None:
        self.now = stream


def test_an_operation_runs_on_its_stream_and_the_callers_comes_back() -> None:
    module: Any = Module()
    stream = DeviceStream("in", module, SimpleNamespace(name="in", device_index=0), timing=False)
    seen: list[str] = []

    def fails() -> None:
        seen.append(module.now.name)
        raise torch.OutOfMemoryError

    stream.run(lambda: seen.append(module.now.name))
    with pytest.raises(torch.OutOfMemoryError):
        stream.run(fails)
    assert seen == ["in", "in"]
    assert module.now.name == "caller's"


def test_an_operation_on_another_device_enters_its_context() -> None:
    module: Any = Module()
    entered: list[Any] = []

    @contextmanager
    def context(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    module.stream = context
    raw = SimpleNamespace(name="in", device_index=1)
    DeviceStream("in", module, raw, timing=False).run(lambda: entered.append("run"))
    assert entered == [raw, "run"]
    assert module.now.name == "caller's"
