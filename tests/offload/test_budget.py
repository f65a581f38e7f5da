"""set_state_budget: state moves to the device and back between steps, and training does not notice."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from offbench.errors import OffbenchError
from offbench.offload import OffloadedAdamW, flow, hoststore, kernels
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.budget import leading
from offbench.offload.chunks import plan_chunks
from offbench.offload.layout import local_of
from offbench.offload.streams import DeviceStreams
from tests.offload import sharded
from tests.offload.test_sharded import ARMS, reference
from tests.ranks import on_ranks

CPU = torch.device("cpu")
BUDGETS = (2 << 20, 1 << 30, 3 << 20, 0, 1 << 20)
"""After each step: some, all, less, nothing, some."""


def inconsistent(optimizer: OffloadedAdamW) -> list[str]:
    """What does not fit the optimizer's own budget."""
    found, budget = [], optimizer.schedule.resident_bytes
    sizes = [chunk.nbytes for chunk in optimizer.chunks]
    kept = [end <= budget for end in itertools.accumulate(sizes)]
    moving = sum(nbytes for nbytes, stays in zip(sizes, kept, strict=True) if not stays)
    if optimizer.bytes_per_step != moving:
        found.append(f"moves {optimizer.bytes_per_step} bytes, not {moving}")
    for stays, update in zip(kept, optimizer._updates, strict=True):
        members = update.members
        for moment in (local_of(optimizer.state[m.parameter][n]) for m in members for n in ("exp_avg", "exp_avg_sq")):
            in_host = any(at <= moment.data_ptr() < at + nbytes for at, nbytes in optimizer.store.addresses)
            if in_host == stays:
                found.append(f"a moment is {'' if in_host else 'not '}in host memory")
    return found


CASES = (
    ("overlap", 0, ("lazy", "lazy", "lazy")),
    ("overlap", 1 << 20, ("eager", "lazy", "eager")),
    ("stream", 0, ("lazy", "lazy", "lazy")),
    ("stream", 1 << 20, ("lazy", "eager", "lazy")),
    ("zerocopy", 0, ("lazy", "lazy", "lazy")),
    ("chunked", 1 << 20, ("lazy", "lazy", "eager")),
)
"""Arm, budget at the start, and paces of in, update and out."""


def changing(rank: int) -> list[list[str]]:
    expected = reference(rank)
    return [changing_budget(rank, expected, *case) for case in CASES]


def changing_budget(
    rank: int, expected: dict[str, torch.Tensor], arm: str, start: int, paces: tuple[Any, ...]
) -> list[str]:
    streams = AdversarialStreams(dict(zip(("in", "update", "out"), paces, strict=True)))
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of(arm, model, streams, **ARMS[arm] | {"state_budget": start})
    engine, seen = optimizer._engine, []
    moved: list[int] = []

    def between(step: int) -> None:
        if step == 0 and optimizer.schedule.deferred and not engine._waiting():
            seen.append("nothing is in flight")
        if step < len(BUDGETS):
            optimizer.set_state_budget(BUDGETS[step])
            seen.extend(inconsistent(optimizer))
        moved.append(optimizer.ledger.in_bytes - sum(moved))

    sharded.train(model, optimizer, rank, CPU, between)
    total = sum(chunk.nbytes for chunk in optimizer.chunks)
    if start == 0 and (moved[0], moved[2], moved[4]) != (total, 0, total):
        seen.append(f"moved {moved} of {total}")
    return seen + sharded.differences(expected, sharded.snapshot(model, optimizer)) + streams.order.violations


def test_a_budget_that_changes_with_a_step_in_flight_changes_no_bit_on_two_ranks() -> None:
    assert on_ranks(2, changing) == [[[]] * len(CASES)] * 2


def saved(rank: int) -> list[str]:
    """A checkpoint with one budget is loaded under another."""
    expected = reference(rank)
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of("overlap", model, DeviceStreams(CPU), **ARMS["overlap"])
    sharded.train(model, optimizer, rank, CPU, steps=range(3))
    optimizer.set_state_budget(2 << 20)
    state = optimizer.state_dict()
    other = sharded.optimizer_of("stream", model, DeviceStreams(CPU), **ARMS["stream"])
    other.set_state_budget(1 << 20)
    other.load_state_dict(state)
    optimizer.detach()
    sharded.train(model, other, rank, CPU, steps=range(3, sharded.STEPS))
    return sharded.differences(expected, sharded.snapshot(model, other)) + inconsistent(other)


def test_a_checkpoint_fits_whatever_the_budget_was() -> None:
    assert on_ranks(1, saved) == [[]]


def refused(rank: int) -> list[str]:
    model = sharded.build(CPU)
    found = []
    optimizer = sharded.optimizer_of("chunked", model, DeviceStreams(CPU))

    def note(optimizer: OffloadedAdamW, nbytes: int) -> None:
        with pytest.raises(OffbenchError) as caught:
            optimizer.set_state_budget(nbytes)
        found.append(str(caught.value))

    note(optimizer, -1)
    with optimizer.settled():
        note(optimizer, 1 << 20)
    note(sharded.optimizer_of("none", model, DeviceStreams(CPU)), 1 << 20)
    assert optimizer.schedule.resident_bytes == 0
    return found


def test_budgets_that_make_no_sense_are_refused_in_one_line() -> None:
    (found,) = on_ranks(1, refused)
    assert [text.count("\n") for text in found] == [0, 0, 0]
    for text, word in zip(found, ("at least 0", "settled()", "none"), strict=True):
        assert word in text


def test_leading_chunks_fit_whole_and_empty_ones_are_always_there() -> None:
    chunks = plan_chunks([512, 512, 0, 512], 1024)
    sizes = [chunk.nbytes for chunk in chunks]
    assert sizes == [1024, 1024, 1024]
    assert leading(chunks, 2047) == {0}
    assert leading(chunks, 2048) == {0, 1}
    assert leading(chunks, None) == {0, 1, 2}
    empty = plan_chunks([0], 1024)
    assert leading((*empty, *plan_chunks([512, 512], 1024, after=empty)), 0) == {0}


def test_a_container_too_small_is_said_before_the_device_holds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object, **__: object) -> None:
        raise AssertionError("memory for the state that stays, though there is no room for the rest")

    monkeypatch.setattr(hoststore, "cgroup_memory", lambda root: [(8192, 4096)])
    parameters = [torch.nn.Parameter(torch.ones(1024)) for _ in range(4)]
    schedule = dataclasses.replace(sharded.schedule_of("chunked", state_budget=8192), chunk_bytes=8192)
    monkeypatch.setattr(torch, "zeros", taken)
    with pytest.raises(OffbenchError, match="this container may take only"):
        OffloadedAdamW(parameters, schedule=schedule)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Every second parameter has no weight decay; neighbours in a chunk differ."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2], "weight_decay": 0.1}]


def together(rank: int, most: int) -> tuple[list[str], int, int]:
    """What differs from torch's AdamW, kernels of one step, and chunks."""
    model = sharded.build(CPU)
    plain = torch.optim.AdamW(groups_of(model), **sharded.OPTIONS, fused=True)
    sharded.train(model, plain, rank, CPU)
    expected = sharded.snapshot(model, plain)
    model = sharded.build(CPU)
    schedule = sharded.schedule_of("stream", state_budget=1 << 30)
    optimizer = OffloadedAdamW(groups_of(model), **sharded.OPTIONS, model=model, schedule=schedule)
    sizes: list[int] = []
    kernel = kernels._run

    def spy(call: kernels.Call, *others: Any) -> None:
        sizes.append(len(call.parameters))
        kernel(call, *others)

    flow.TOGETHER_BYTES, kernels._run = most, spy
    sharded.train(model, optimizer, rank, CPU)
    differs = sharded.differences(expected, sharded.snapshot(model, optimizer))
    assert sum(sizes) == sharded.STEPS * len(list(model.parameters()))
    return differs, len(sizes) // sharded.STEPS, len(optimizer.chunks)


def test_state_that_stays_is_updated_together_group_by_group() -> None:
    (differs, fewest, chunks), *_ = on_ranks(1, together, 1 << 30)
    assert (differs, fewest) == ([], 2)
    (differs, fewer, _), *_ = on_ranks(1, together, 3 << 20)
    assert differs == []
    assert 2 < fewer < 2 * chunks
    (differs, alone, _), *_ = on_ranks(1, together, 0)
    assert differs == []
    assert fewer < alone, "a chunk at a time"
