"""Nothing that a step leaves behind waits for the garbage collector: trainers switch it off, and it counts objects,
not the GiB of device memory that they hold on to."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from offbench.offload.streams import DeviceStreams
from tests.offload import sharded
from tests.offload.alone import Alone
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
