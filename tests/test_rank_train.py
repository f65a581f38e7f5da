"""A rank up to its window: which gradient pool it makes, and that what only the first steps needed goes back, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offbench import rank
from offbench.device import CpuDevice
from offbench.window import WindowRecorder


def test_each_gradient_pool_that_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "GradientPool", lambda model, nbytes: ("pool", nbytes))
    found = [rank.pool_of(how, nn.Identity()) for how in ("stock", "compute", "auto")]
    assert found == [None, ("pool", None), ("pool", "auto")]


class Counted(CpuDevice):
    """A device that says when it was trimmed."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__(torch.device("cpu"))
        self.said = said

    def trim(self) -> None:
        self.said.append("trim")


@pytest.mark.parametrize(("warmup", "before"), [(1, None), (2, None), (3, 2), (5, 4)])
@pytest.mark.parametrize("has_auto", [False, True])
def test_memory_goes_back_before_the_last_warm_up_step(
    monkeypatch: pytest.MonkeyPatch, warmup: int, before: int | None, has_auto: bool
) -> None:
    said: list[Any] = []
    recorder = WindowRecorder(Counted(said), warmup, 2)

    def train_step(*arguments: Any) -> None:
        said.append(arguments[5])
        recorder.done += 1

    monkeypatch.setattr(rank, "train_step", train_step)
    monkeypatch.setattr(rank.gc, "disable", lambda: None)
    monkeypatch.setattr(WindowRecorder, "finished_step_s", lambda self: None)
    job: Any = SimpleNamespace(model=SimpleNamespace(norm=nn.Identity()), spec=SimpleNamespace(tokens_per_step=1))
    log: Any = SimpleNamespace(note=lambda *_: None)
    recorder._boundaries.append(recorder.device.stamp())
    auto: Any = SimpleNamespace(before=lambda step: None) if has_auto else None
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    progress: Any = SimpleNamespace(enter=lambda *_: None)
    rank.train(job, optimizer, recorder, log, None, progress, {}, auto)
    steps: list[Any] = list(range(warmup + 2))
    if before is not None and not has_auto:
        steps.insert(before, "trim")
    assert said == steps
