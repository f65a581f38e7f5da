"""Hundreds of steps with tiny chunks, delayed at random: still bitwise, and nothing piles up.

Seconds matter here too: the whole file stays under a minute on two cores.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest
import torch

from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialEvent, AdversarialStreams
from offbench.offload.ring import RingEngine as Engine
from offbench.offload.streams import Streams
from offbench.verify import trainees
from offbench.verify.cases import Case, Variant, variants
from offbench.verify.trainees import Trainee, build
from offbench.verify.trial import OPTIONS, Snapshot, first_difference, snapshot, train
from tests.offload import trainer
from tests.offload.test_engine import SCHEDULES
from tests.ranks import on_ranks

CPU = torch.device("cpu")
STEPS, SOAK = 200, 500
SIDES = dict.fromkeys(("in", "update", "out"), "random")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, a matrix a chunk: six chunks for two slots."""
    monkeypatch.setattr(trainees, "BLOCKS", 2)


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
    case = Case(1)
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


def soak(trainee: Trainee, optimizer: torch.optim.Optimizer, detour: Callable[[], None]) -> tuple[Snapshot, list]:
    """SOAK steps with an evaluation now and then; what the evaluations saw."""
    seen = []
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for first in range(0, SOAK, 50):
        train(trainee, optimizer, range(first, first + 25))
        with torch.no_grad():  # while updates are pending
            seen.append(float(trainee.model(x)))
        train(trainee, optimizer, range(first + 25, first + 50))
        detour()
    return snapshot(trainee.model, optimizer), seen


def soaked(rank: int) -> tuple[str | None, bool, list[str], int]:
    """overlap against plain AdamW: first difference, whether evaluations agree, unordered accesses, bytes grown."""
    case = Case(2, clip=False)
    plain = build(case, rank, CPU)
    expected, wanted = soak(plain, torch.optim.AdamW(plain.model.parameters(), **OPTIONS, fused=True), lambda: None)
    trainee, streams = (
        build(case, rank, CPU),
        AdversarialStreams(SIDES),
    )
    optimizer = optimizer_of(variants(["overlap"])[0], trainee, case, streams)
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

    found, seen = soak(trainee, optimizer, detour)
    differs = first_difference(expected, found)
    optimizer.detach()
    return differs and differs.describe(), seen == wanted, streams.order.violations, rss[-1] - rss[1]


def test_a_soak_with_evaluations_saves_and_loads_between() -> None:
    for difference, evaluations_agree, violations, grown in on_ranks(2, soaked):
        assert difference is None
        assert evaluations_agree
        assert violations == []
        assert grown < 4 * MIB
