"""Hundreds of steps with tiny chunks, delayed at random: still bitwise, and nothing piles up.

Seconds matter here too: the whole file stays under a minute on two cores.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialEvent, AdversarialStreams
from offbench.offload.ring import RingEngine as Engine
from offbench.offload.streams import Streams
from offbench.verify.cases import SMALL_MODELS, Case, Variant, variants
from offbench.verify.trainees import Trainee, build
from offbench.verify.trial import OPTIONS, Snapshot, first_difference, snapshot, train
from offbench.workload.broadcast import Broadcaster
from tests.offload import trainer
from tests.offload.test_engine import SCHEDULES
from tests.ranks import on_ranks

CPU = torch.device("cpu")
STEPS, SOAK = 200, 300
SIDES = dict.fromkeys(("in", "update", "out"), "random")
MIB = 1 << 20


SMALLER = dataclasses.replace(SMALL_MODELS, blocks=2)
"""Two matrices a chunk: three chunks for two slots."""


@dataclass
class Held:
    """What an engine holds on to at the end of a run, in objects."""

    events: int
    streams: int
    pending: int


def queued_run(name: str, steps: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[trainer.Result, Held]:
    """The trainer whose own work is queued too, every stream delayed at random."""
    monkeypatch.setattr(trainer, "STEPS", steps)
    streams = AdversarialStreams(SIDES | {"compute": "random"}, seed=seed)
    engines: list[Engine] = []
    result = trainer.run(SCHEDULES[name], streams, engines.append)
    assert streams.order.violations == []
    streams.run_all()
    gc.collect()
    events = sum(type(thing) is AdversarialEvent for thing in gc.get_objects())
    return result, Held(events, len(streams._streams), len(streams._next_owners))


@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_updates_and_compute_delayed_at_random(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, early = queued_run(name, 20, 5, monkeypatch)
    result, late = queued_run(name, STEPS, 6, monkeypatch)
    assert result.equals(trainer.plain())
    assert late == early  # ten times the steps, not one event or stream more


def optimizer_of(variant: Variant, trainee: Trainee, case: Case, streams: Streams) -> OffloadedAdamW:
    """Two matrices a chunk."""
    schedule = variant.schedule(case.chunk_bytes)
    return OffloadedAdamW(
        trainee.model.parameters(), **OPTIONS, model=trainee.model, schedule=schedule, streams=streams
    )


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def stressed(rank: int) -> dict[str, tuple[str | None, list[str], int]]:
    """Per variant: first difference to plain AdamW, unordered accesses, bytes the second half of the steps added."""
    case = Case(1, size=SMALLER)
    plain = build(case, rank, CPU)
    reference = torch.optim.AdamW(plain.model.parameters(), **OPTIONS, fused=True)
    train(plain, reference, range(STEPS))
    expected = snapshot(plain.model, reference)
    found = {}
    for seed, variant in enumerate(variants([])):
        trainee, streams = build(case, rank, CPU), AdversarialStreams(SIDES, seed=seed)
        optimizer = optimizer_of(variant, trainee, case, streams)
        train(trainee, optimizer, range(STEPS // 2))
        before = resident_bytes()
        train(trainee, optimizer, range(STEPS // 2, STEPS))
        grown = resident_bytes() - before
        differs = first_difference(expected, snapshot(trainee.model, optimizer))
        found[variant.name] = (differs and differs.describe(), streams.order.violations, grown)
        optimizer.detach()
    return found


def test_every_arm_trains_200_steps_bitwise_in_flat_memory() -> None:
    (found,) = on_ranks(1, stressed)
    assert found.keys() == {variant.name for variant in variants([])}
    assert {name: result[:2] for name, result in found.items() if result[0] or result[1]} == {}
    assert {name: grown for name, (*_, grown) in found.items() if grown > 4 * MIB} == {}


@dataclass
class Soaked:
    """What a soak ended with, and what was seen on its way."""

    end: Snapshot
    evaluations: list[float]
    replicas: list[dict[str, torch.Tensor]]
    """After each broadcast; empty but on rank 0."""


def soak(
    trainee: Trainee, optimizer: torch.optim.Optimizer, broadcaster: Broadcaster, detour: Callable[[], None]
) -> Soaked:
    """SOAK steps; every 50 of them an evaluation and a broadcast with updates pending, and a detour."""
    seen, replicas = [], []
    x = torch.randn(4, SMALLER.width, generator=torch.Generator().manual_seed(1))
    for first in range(0, SOAK, 50):
        train(trainee, optimizer, range(first, first + 20))
        with torch.no_grad():
            seen.append(float(trainee.model(x)))
        train(trainee, optimizer, range(first + 20, first + 35))
        broadcaster.broadcast()
        replicas.append({name: weights.clone() for name, weights in broadcaster.replica.items()})
        train(trainee, optimizer, range(first + 35, first + 50))
        detour()
    return Soaked(snapshot(trainee.model, optimizer), seen, replicas)


def soaked(rank: int) -> dict[str, tuple[str | None, bool, list[bool], list[str], int]]:
    """Arms against plain AdamW: first difference, whether evaluations agree, whether each replica does, unordered
    accesses, bytes grown."""
    case = Case(2, clip=False, size=SMALLER)
    plain = build(case, rank, CPU)
    group = dist.group.WORLD
    assert group is not None
    reference = torch.optim.AdamW(plain.model.parameters(), **OPTIONS, fused=True)
    expected = soak(plain, reference, Broadcaster(plain.model, group, nullcontext, sparse=False), lambda: None)
    return {arm: soaked_arm(arm, case, rank, group, expected) for arm in ("overlap", "stream")}


def soaked_arm(
    arm: str, case: Case, rank: int, group: dist.ProcessGroup, expected: Soaked
) -> tuple[str | None, bool, list[bool], list[str], int]:
    trainee, streams = build(case, rank, CPU), AdversarialStreams(SIDES)
    optimizer = optimizer_of(variants([arm])[0], trainee, case, streams)
    broadcaster = Broadcaster(trainee.model, group, optimizer.settled)
    rss = []

    def detour() -> None:
        """Save, go astray for a step, and come back: whatever that step left pending must not survive the load."""
        weights = {name: p.detach().clone() for name, p in trainee.model.state_dict().items()}
        saved = optimizer.state_dict()
        state = {
            key: {name: tensor.detach().clone() for name, tensor in moments.items()}
            for key, moments in saved["state"].items()
        }
        train(trainee, optimizer, range(10_000, 10_001))
        optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
        trainee.model.load_state_dict(weights)
        rss.append(resident_bytes())

    found = soak(trainee, optimizer, broadcaster, detour)
    differs = first_difference(expected.end, found.end)
    replicas = [
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(expected.replicas, found.replicas, strict=True)
    ]
    optimizer.detach()
    same = found.evaluations == expected.evaluations
    return differs and differs.describe(), same, replicas, streams.order.violations, rss[-1] - rss[1]


def test_a_soak_with_evaluations_broadcasts_saves_and_loads_between() -> None:
    results = [(arm, *result) for found in on_ranks(2, soaked) for arm, result in found.items()]
    assert len(results) == 4
    for arm, difference, evaluations_agree, replicas_agree, violations, grown in results:
        assert difference is None, arm
        assert evaluations_agree, arm
        assert replicas_agree == [True] * (SOAK // 50), arm
        assert violations == [], arm
        assert grown < 4 * MIB, arm
