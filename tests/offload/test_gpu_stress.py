"""Real streams under stress: random delays, churned memory, no hidden wait, broadcasts in flight; in every exact arm.

Everything runs on the CPU device too, briefly: there it shows that the tests themselves work.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from offbench.offload import OffloadedAdamW
from offbench.offload.layout import local_of
from offbench.verify.cases import variants
from offbench.verify.trainees import Trainee, build
from offbench.verify.trial import Snapshot, first_difference, first_not_finite, snapshot
from offbench.workload.broadcast import Broadcaster
from tests.offload.alone import WORLD, Alone
from tests.offload.stress import CASE, FEWER, MIB, Disturbance, offloaded, plain, steps_of
from tests.offload.traces import waits

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("alone", ["cpu", CUDA], indirect=True)


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Iterator[Alone]:
    """One process for all tests of a device."""
    process = Alone(request.param)
    yield process
    process.close()


def empty(device: torch.device) -> None:
    """Give back what earlier runs in this process left in the allocator: it is no part of the next one's memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def stressed(device: torch.device, steps: int) -> dict[str, str | None]:
    """First difference to torch's AdamW by variant and pressure: every variant again in a device almost full."""
    empty(device)
    trainee = build(FEWER, 0, device)
    reference = plain(trainee)
    steps_of(trainee, reference, device, range(steps))
    expected: Snapshot = snapshot(trainee.model, reference)
    assert first_not_finite(expected) is None
    del trainee, reference
    found: dict[str, str | None] = {}
    for pressed in (False, True):
        budget = (64 if pressed and device.type == "cuda" else 16) * MIB
        if pressed and device.type == "cuda":  # all that was ever needed, and what the disturbance takes
            room = torch.cuda.max_memory_reserved() + 2 * budget
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
        for seed, variant in enumerate(variants([])):
            trainee = optimizer = None  # the last one's, also where only the collector finds it
            gc.collect()
            trainee = build(FEWER, 0, device)
            Disturbance(device, seed, budget).settle_in(trainee.model)
            optimizer = offloaded(trainee, variant, device, seed)
            steps_of(trainee, optimizer, device, range(steps))
            differs = first_difference(expected, snapshot(trainee.model, optimizer))
            found[f"{variant.name}{' under pressure' if pressed else ''}"] = differs and differs.describe()
            optimizer.detach()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found


@DEVICES
def test_delays_and_churned_memory_change_no_bit(alone: Alone) -> None:
    found = alone(stressed, 200 if alone.kind == "cuda" else 4)
    assert len(found) == 2 * len(variants([]))
    assert {name: differs for name, differs in found.items() if differs} == {}


def full(device: torch.device, steps: int) -> tuple[str | None, int]:
    """First difference to torch's AdamW where every other chunk finds no memory in the forward, and how often that was
    said."""
    empty(device)
    trainee = build(FEWER, 0, device)
    reference = plain(trainee)
    steps_of(trainee, reference, device, range(steps))
    expected: Snapshot = snapshot(trainee.model, reference)
    (variant,) = (one for one in variants([]) if one.name == "stream")
    trainee = build(FEWER, 0, device)
    optimizer = offloaded(trainee, variant, device, 0)
    engine: Any = optimizer._engine
    stage, allocate, forwards = engine.stage, engine._streams.allocate, []

    def refuse(nbytes: int) -> torch.Tensor:
        if forwards:
            raise torch.OutOfMemoryError("none left")
        memory: torch.Tensor = allocate(nbytes)
        return memory

    engine.stage = lambda chunk: None if forwards and chunk.index % 2 else stage(chunk)
    engine._streams.allocate = refuse
    trainee.model.register_forward_pre_hook(lambda *_: forwards.append(True))
    trainee.model.register_forward_hook(lambda *_: forwards.clear())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps_of(trainee, optimizer, device, range(steps))
    differs = first_difference(expected, snapshot(trainee.model, optimizer))
    optimizer.detach()
    said = [str(one.message) for one in caught if "updated in host memory, which is slow" in str(one.message)]
    return differs and differs.describe(), len(said)


@DEVICES
def test_state_that_finds_no_memory_in_a_forward_is_updated_where_it_is(alone: Alone) -> None:
    steps = 20 if alone.kind == "cuda" else 4
    differs, said = alone(full, steps)
    assert differs is None
    assert said >= steps - 1


def held(device: torch.device, warmup: int, steps: int) -> dict[str, list[int]]:
    found = {}
    for seed, variant in enumerate(variants([])):
        trainee = optimizer = None  # the last one's
        empty(device)
        trainee = build(CASE, 0, device)
        optimizer = offloaded(trainee, variant, device, seed)
        steps_of(trainee, optimizer, device, range(warmup))
        found[variant.name] = steps_of(trainee, optimizer, device, range(warmup, warmup + steps))
        optimizer.detach()
    return found


@pytest.mark.parametrize("alone", [CUDA], indirect=True)
def test_reserved_memory_is_flat(alone: Alone) -> None:
    """Over 50 steps the allocator takes at most one more of its 20 MiB segments: a chunk a step would be 50 MiB."""
    found = alone(held, 20, 50)
    assert set(found) == {variant.name for variant in variants([])}
    grown = {name: max(reserved) - reserved[0] for name, reserved in found.items()}
    assert {name: nbytes for name, nbytes in grown.items() if nbytes > 20 * MIB} == {}


SLACK = 64 << 10
"""A few scalars, each of which the allocator rounds up."""


@dataclasses.dataclass
class Memory:
    """Bytes on the device around a checkpoint; all zero on the CPU."""

    before: int = 0
    peak: int = 0
    after: int = 0
    state: int = 0
    """State that does not stay on the device between steps."""
    staging: int = 0


def saved_and_loaded(device: torch.device) -> dict[str, Memory]:
    """Save and load the optimizer's state in every way there is, by variant, right after a step()."""
    found = {}
    for seed, variant in enumerate(variants([])):
        gc.collect()
        trainee = build(CASE, 0, device)
        optimizer = offloaded(trainee, variant, device, seed)
        steps_of(trainee, optimizer, device, range(3))
        optimizer.drain()
        memory = found[variant.name] = Memory(state=optimizer.store.requested_bytes)
        if optimizer._engine is not None:
            memory.staging = optimizer._engine.staging_bytes
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            memory.before = torch.cuda.memory_allocated()
        checkpoint(trainee, optimizer)
        if device.type == "cuda":
            torch.cuda.synchronize()
            memory.peak, memory.after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        optimizer.detach()
        del trainee, optimizer
    return found


def checkpoint(trainee: Trainee, optimizer: OffloadedAdamW) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    state = get_optimizer_state_dict(trainee.model, optimizer)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # this rank saves alone
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(trainee.model, optimizer, state)


@DEVICES
def test_state_is_on_the_host_and_a_checkpoint_does_not_lift_it(alone: Alone) -> None:
    """Masters that stayed on the GPU: ISEEKYAN/Megatron-LM#232; copies that stayed there after load or save:
    prime-rl#2154, SkyRL#556; all states at once: prime-rl#2729, Megatron-LM#4638"""
    found = alone(saved_and_loaded)
    most = found["none"].before
    for variant in variants([]):
        memory = found[variant.name]
        assert (memory.state > 0) == variant.schedule(CASE.chunk_bytes).offloaded
        if alone.kind == "cuda":
            assert memory.before <= most - 0.9 * memory.state, variant.name
            assert memory.after <= memory.before + SLACK, variant.name
            assert not memory.state or memory.peak <= memory.before + memory.staging + SLACK, variant.name


def test_waits_are_those_inside_the_ranges() -> None:
    def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0, **more: int) -> dict[str, Any]:
        arguments = {"correlation": correlation} | more
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": arguments}

    trace = [
        event("user_annotation", "step", 10, 5),
        event("user_annotation", "step", 30, 5),
        event("user_annotation", "forward", 20, 5),
        event("cuda_runtime", "cudaEventSynchronize", 12, 1),
        event("cuda_runtime", "cudaEventSynchronize", 22, 1),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=6),
        event("cuda_runtime", "cudaMemcpyAsync", 31, 1, correlation=7),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 1, correlation=7),
        event("cuda_runtime", "cudaMemcpyAsync", 23, 1, correlation=8),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 41, 1, correlation=8, bytes=4),
        event("cuda_runtime", "cudaMemcpyAsync", 24, 1, correlation=9),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 42, 1, correlation=9, bytes=1 << 20),
        {"ph": "M", "name": "process_name"},
    ]
    assert waits(trace, "step") == {"ranges": 2, "cudaEventSynchronize": 1, "pageable": 1}
    assert waits(trace, "forward") == {"ranges": 1, "cudaEventSynchronize": 1, "few bytes": 1}


def traced(device: torch.device, warmup: int, steps: int) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Waits inside step() and inside forward, by variant; `plain` is torch.optim.AdamW."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    found = {}
    for name, variant in (("plain", None), *((variant.name, variant) for variant in variants([]))):
        trainee = build(CASE, 0, device)
        optimizer = plain(trainee) if variant is None else offloaded(trainee, variant, device, 1)
        x = torch.randn(4, CASE.size.width, device=device)
        for step in range(warmup + steps):
            if step == warmup:
                profile = torch.profiler.profile(activities=kinds, acc_events=True)
                profile.start()
            with torch.profiler.record_function("the forward"):
                loss = trainee.model(x)
            loss.backward()
            trainee.clip()
            with torch.profiler.record_function("the step"):
                optimizer.step()
            optimizer.zero_grad()
        profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            trace = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        found[name] = waits(trace, "the step"), waits(trace, "the forward")
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.detach()
    return found


@DEVICES
def test_the_optimizer_makes_the_host_wait_only_where_it_says_so(alone: Alone) -> None:
    """A synchronous schedule returns when its step is done, by one wait for one event; nothing else ever waits."""
    steps = 4 if alone.kind == "cuda" else 1
    found = alone(traced, 3, steps)
    assert found["plain"][0] == {"ranges": steps}
    for variant in variants([]):
        schedule = variant.schedule(CASE.chunk_bytes)
        once = schedule.offloaded and not schedule.deferred and alone.kind == "cuda"
        step, forward = found[variant.name]
        assert step == {"ranges": steps} | ({"cudaEventSynchronize": steps} if once else {}), variant.name
        assert forward == found["plain"][1], variant.name


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shards in bf16, on the CPU."""
    return {name: local_of(p).to(torch.bfloat16).cpu() for name, p in model.named_parameters()}


def broadcasts(device: torch.device, steps: int, sparse: bool, lr: float) -> dict[str, tuple[int, int, list[str]]]:
    """By variant: broadcasts with updates still queued, broadcasts that sent deltas, and what differed after each."""
    group = dist.group.WORLD
    assert group is not None

    def train_one(trainee: Trainee, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = lr
        trainee.backward(step)
        trainee.clip()
        optimizer.step()
        optimizer.zero_grad()

    trainee, expected = build(CASE, 0, device), []
    reference = plain(trainee)
    for step in range(steps):
        train_one(trainee, reference, step)
        expected.append(weights(trainee.model))
    found = {}
    for seed, variant in enumerate(variants([])):
        trainee = build(CASE, 0, device)
        optimizer = offloaded(trainee, variant, device, seed)
        broadcaster = Broadcaster(trainee.model, group, optimizer.settled, sparse=sparse)
        queued, deltas, wrong = 0, 0, []
        for step in range(steps):
            train_one(trainee, optimizer, step)
            queued += optimizer._engine is not None and optimizer._engine._step is not None
            sent = broadcaster.broadcast()
            deltas += not sent.whole and sent.nbytes < broadcaster.whole_bytes
            for name, shard in expected[step].items():
                whole = broadcaster.replica[name]
                if any(not torch.equal(part, shard) for part in whole.chunk(WORLD)):
                    wrong.append(f"step {step}: {name}")
        found[variant.name] = queued, deltas, wrong + broadcaster.differences()
        optimizer.detach()
    return found


@DEVICES
@pytest.mark.parametrize(("sparse", "lr"), [(False, 1e-2), (True, 1e-6)], ids=["whole", "deltas"])
def test_a_broadcast_with_a_step_in_flight_sends_that_step(alone: Alone, sparse: bool, lr: float) -> None:
    steps = 20 if alone.kind == "cuda" else 4
    for name, (queued, deltas, wrong) in alone(broadcasts, steps, sparse, lr).items():
        deferred = next(v for v in variants([]) if v.name == name).schedule(CASE.chunk_bytes).deferred
        assert wrong == [], name
        assert queued >= steps - 1 if deferred else queued == 0, name
        assert deltas == (steps - 1 if sparse else 0), name
