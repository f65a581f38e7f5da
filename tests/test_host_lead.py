"""How far the host is ahead: on a device that does what is queued at a known pace, on a sharded model, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from offbench import rank
from offbench.config import RunSpec
from offbench.device import CpuDevice, Device, Stamp
from offbench.host_lead import TIES, HostClock, HostLeadWatch
from offbench.pools import PoolWatch
from offbench.record import HostLead
from offbench.results_file import read_records
from offbench.small_watch import SmallCopyWatch
from offbench.window import WindowRecorder
from offbench.workload.parallel import build
from tests.ranks import on_ranks
from tests.workload.jobs import spec

CPU = torch.device("cpu")
ONE = torch.ones(1)
RATE = 1.0001
"""Seconds that the device's clock counts in one of the host's."""


class Reached:
    """A stamp's event: the device comes to it at that time of the host's clock."""

    def __init__(self, device: BusyDevice, at: float) -> None:
        self.device, self.at = device, at

    def query(self) -> bool:
        return self.device.host >= self.at

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)


class BusyDevice(CpuDevice):
    """A device with a clock of its own, which works off what is queued and begins `launches` later if it is idle."""

    def __init__(self, launches: Sequence[float] = (1e-5,)) -> None:
        super().__init__(CPU)
        self.host, self.free = 100.0, 0.0
        self.launches = cycle(launches)

    def work(self, seconds: float) -> float:
        """Queue work; when it will be done."""
        self.free = max(self.free, self.host + next(self.launches)) + seconds
        return self.free

    def stamp(self) -> Stamp:
        return Stamp(Reached(self, self.work(0.0)), self.host)

    def seconds(self, earlier: Stamp, later: Stamp) -> float:
        return float(later.event.at - earlier.event.at) * RATE

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)


class Block(nn.Module):
    """Queues work for the device, then keeps the host busy."""

    def __init__(self, device: BusyDevice, work_s: float, host_s: float) -> None:
        super().__init__()
        self.device, self.work_s, self.host_s = device, work_s, host_s

    def forward(self) -> None:
        self.device.work(self.work_s)
        self.device.host += self.host_s


def run(recorder: WindowRecorder, forward: Callable[[], Any], step: Callable[[], Any] = lambda: None) -> None:
    """One training step of two micro-batches; the second one's blocks, as those computed again, are not seen."""
    recorder.begin()
    for _ in range(2):
        forward()
        recorder.mark("forward")
        forward()
        recorder.mark("backward")
    recorder.mark("clip")
    one = ONE.to(recorder.device.torch_device)
    recorder.report(one, one, None)
    with recorder.optimizer_step():
        step()
    recorder.end()


def test_leads_are_those_of_the_device_whatever_its_clock() -> None:
    """The second block keeps the host busy for longer than the device; the clocks part by 2 ms meanwhile."""
    device = BusyDevice()
    blocks = [Block(device, 0.03, 0.01), Block(device, 0.03, 0.06), Block(device, 0.04, 0.01), Block(device, 0.1, 0.0)]

    def forward() -> None:
        device.host += 10.0
        for block in blocks:
            block()

    recorder, clock = WindowRecorder(device, 1, 1), HostClock(device)
    run(recorder, forward)
    with HostLeadWatch(clock, recorder, blocks) as watch:
        run(recorder, forward, lambda: device.work(0.5))
    clock.close()
    found = watch.figures()
    assert found is not None
    assert found.lead_s == pytest.approx([0.0, 0.02, 0.0], abs=1e-5)
    assert min(found.lead_s) >= 0
    assert found.least_s == found.lead_s[2]
    assert found.forward_s == pytest.approx([0.03, 0.04, 0.04], rel=1e-3)
    assert (found.after_clip_lead_s, found.after_step_lead_s) == pytest.approx((0.13, 0.63), rel=1e-3)
    assert found.accuracy_s == pytest.approx(0.0, abs=1e-8)


def test_the_accuracy_is_the_worst_of_the_idle_stamps_and_the_first_does_not_count() -> None:
    clock = HostClock(device := BusyDevice([1.0, 1e-5, 3e-5, *[1e-5] * (TIES - 2)]))
    clock.close()
    assert clock.accuracy() == pytest.approx(2e-5, rel=0.01)
    assert device.host > 102


class Spy(BusyDevice):
    """Notes whether each stamp finds parameters gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: Callable[[], Iterator[nn.Parameter]] = lambda: iter(())
        self.gathered: list[list[bool]] = []

    def stamp(self) -> Stamp:
        self.gathered.append([not isinstance(parameter, DTensor) for parameter in self.parameters()])
        self.host += 1.0
        return super().stamp()


def watched(number: int) -> tuple[HostLead | None, list[list[bool]], int, int]:
    """A step of two micro-batches, checkpointed, watched; then one that fails."""
    job, device = build(spec(1, ac="full", grad_accum=2, layers=3), number, CPU), Spy()
    modules = [*job.model.blocks, job.model.norm]
    recorder, clock = WindowRecorder(device, 0, 2), HostClock(device)

    def step() -> None:
        recorder.begin()
        for micro in job.micro_batches(0):
            loss = job.model(*micro)
            recorder.mark("forward")
            loss.backward()
        recorder.report(loss, None, None)
        recorder.end()

    device.gathered.clear()
    device.parameters = lambda: (block.q for block in job.model.blocks)  # type: ignore[misc, union-attr]
    with HostLeadWatch(clock, recorder, modules) as watch:
        hooks = sum(len(module._forward_pre_hooks) for module in modules)
        step()
    seen = device.gathered[1:4]  # the recorder's first boundary comes before
    hooks -= sum(len(module._forward_pre_hooks) for module in modules)
    job.model.head.forward = None  # type: ignore[assignment, method-assign]
    failing = HostLeadWatch(clock, recorder, modules)
    with pytest.raises(TypeError), failing:
        step()
    clock.close()
    left = sum(len(module._forward_pre_hooks) for module in modules) - len(modules)
    return watch.figures(), seen, hooks, left


def test_each_block_of_a_sharded_model_is_seen_once_after_its_gather_and_no_hook_stays() -> None:
    """However often blocks are computed again; a step that fails leaves no hook, either. FSDP2 has one a module."""
    ((found, gathered, hooks, left),) = on_ranks(1, watched)
    assert found is not None
    assert found.forward_s == pytest.approx([RATE] * 3), "a stamp a second"
    assert [row.index(True) for row in gathered] == [0, 1, 2]
    assert (hooks, left) == (4, 0)


def test_the_watches_have_one_step_before_them_and_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer.drain = lambda: seen.append("drain")
    block, norm = nn.Identity(), nn.Identity()
    job: Any = SimpleNamespace(model=SimpleNamespace(blocks=[block], norm=norm))

    def train_step(_: Any, __: Any, ___: Any, recorder: WindowRecorder, ____: Any, step: int) -> None:
        seen.append(step)
        run(recorder, lambda: (block(ONE), norm(ONE)))

    monkeypatch.setattr(rank, "train_step", train_step)
    monkeypatch.setattr(SmallCopyWatch, "__enter__", lambda self: seen.append("small copies") or self)
    monkeypatch.setattr(SmallCopyWatch, "__exit__", lambda *_: None)
    monkeypatch.setattr(PoolWatch, "__enter__", lambda self: seen.append("pools") or self)
    lead, small, reserved = rank.watch(job, optimizer, RunSpec(), BusyDevice(), Path())
    first = RunSpec().window.warmup + RunSpec().window.steps
    assert seen == [first, first + 1, "small copies", first + 2, "pools", first + 3, "drain"]
    assert (len(lead.lead_s) if lead else None, small.readbacks_per_step, reserved) == (1, 0, None)
    assert rank.watch(job, optimizer, RunSpec(), Device.of(CPU), Path())[0] is None, "no device to be ahead of"


def test_records_from_before_have_none() -> None:
    records = read_records([Path(__file__).parent.parent / "results" / "h200-rehearsal-native.jsonl"]).records
    assert {record.host_lead for record in records} == {None}
    assert HostLead(lead_s=[0.0]).least_s is None, "a single block is the first"


@pytest.mark.gpu
def test_on_a_gpu_the_lead_is_what_is_queued() -> None:
    """Before the first block a long kernel; before the second the host waits for the device."""
    device = Device.of(torch.device("cuda"))
    blocks = [nn.Identity() for _ in range(3)]
    ends: list[Stamp] = []

    def forward() -> None:
        ends.append(device.stamp())
        torch.cuda._sleep(200_000_000)  # about 0.1 s at 2 GHz
        ends.append(device.stamp())
        for block in blocks:
            block(ONE)
            device.synchronize()

    recorder, clock = WindowRecorder(device, 1, 1), HostClock(device)
    run(recorder, forward)
    ends.clear()
    with HostLeadWatch(clock, recorder, blocks) as watch:
        run(recorder, forward, lambda: torch.cuda._sleep(20_000_000))
    clock.close()
    found, slept = watch.figures(), device.seconds(*ends[:2])
    assert found is not None
    assert slept > 0.02
    assert found.lead_s[0] == pytest.approx(slept, abs=2e-3)
    assert found.lead_s[1] < 2e-3
    assert (found.after_step_lead_s or 0.0) > 5e-3
    assert (found.accuracy_s or 0.0) < 2e-3
