"""Nothing that a step leaves behind waits for the garbage collector: trainers switch it off, and it counts objects,
not the GiB of device memory that they hold on to."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from offbench.offload import OffloadedAdamW, meanwhile
from offbench.offload.streams import DeviceStreams
from offbench.verify.trainees import wrapped_mlp
from tests.offload import sharded
from tests.offload.alone import Alone
from tests.offload.test_meanwhile import Passes
from tests.offload.test_sharded import ARMS


def garbage(device: torch.device, label: str) -> dict[str, int]:
    """Objects in cycles that steps leave behind, by type: the optimizer's own, and tensors."""
    model = sharded.build(device)
    optimizer = sharded.optimizer_of(label.split(maxsplit=1)[0], model, DeviceStreams(device), **ARMS[label])
    sharded.train(model, optimizer, 0, device)  # what the first steps make and keep
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        sharded.train(model, optimizer, 0, device)
        gc.collect()
        kinds = [type(thing) for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    ours = (kind for kind in kinds if kind.__module__.startswith("offbench.offload") or issubclass(kind, torch.Tensor))
    return dict(Counter(kind.__name__ for kind in ours))


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """One process for all arms."""
    process = Alone("cpu")
    yield process
    process.close()


@pytest.mark.parametrize("label", ARMS)
def test_a_step_leaves_no_cycles_behind(alone: Alone, label: str) -> None:
    assert alone(garbage, label) == {}


class Trainer:
    """Holds itself, and an optimizer."""

    def __init__(self, optimizer: OffloadedAdamW) -> None:
        self.me, self.optimizer = self, optimizer


def collected(device: torch.device, inside: str | None) -> tuple[list[torch.Tensor], int, int]:
    """A model that waits in every block; its optimizer is in a cycle, and left there with updates owed. inside: the
    collector runs in that method, for the first time that the model's next forward calls it; None: behind the forward.
    Returns its parameters, staging memory left behind, and how often the collector ran inside."""
    torch.manual_seed(0)
    model = wrapped_mlp(init_device_mesh(device.type, (2,)), device, torch.float32, 8, 64)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: meanwhile.wait(Passes(4)))  # type: ignore[operator]
    schedule = sharded.schedule_of("stream", chunk_bytes=1 << 16, lead=1, ahead=4)
    trainer = Trainer(OffloadedAdamW(model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule))
    optimizer = trainer.optimizer
    gc.disable()
    for step in range(3):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine: Any = optimizer._engine
    del trainer, optimizer
    count = [0]
    if inside is not None:
        real = getattr(engine, inside)

        def spy(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            if not count[0]:
                count[0] += 1
                gc.collect()
            return found

        setattr(engine, inside, spy)
    with torch.no_grad():
        model(torch.ones(4, 64))
    gc.enable()
    gc.collect()
    model.reshard()  # the root keeps what it gathered  # type: ignore[operator]
    return [p.to_local().detach().clone() for p in model.parameters()], len(engine._extents.all), count[0]


@pytest.mark.parametrize("inside", ["_move_in", "_run_update", "_move_out", "_queue_chunk"])
def test_an_optimizer_that_is_collected_while_its_updates_are_queued_ends_behind_them(
    alone: Alone, inside: str
) -> None:
    expected, _, _ = alone(collected, None)
    found, left, count = alone(collected, inside)
    assert count == 1
    assert left == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
