"""Weight broadcasts with a step in flight: the replica is the trainer, bit for bit, in every arm."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offbench.arms import ARMS
from offbench.config import RunSpec
from offbench.errors import OffbenchError, UsageError
from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.layout import local_of
from offbench.workload import deltas
from offbench.workload.broadcast import Broadcaster, Sent
from offbench.workload.parallel import Job, build
from offbench.workload.presets import find
from offbench.workload.rules import check
from tests.ranks import on_ranks
from tests.workload import jobs

STEPS, EVERY = 4, 2
SLIGHT = 1e-6
"""A learning rate at which few weights change in bf16."""
Weights = dict[str, torch.Tensor]


def optimizer_of(job: Job, arm: str, lr: float) -> OffloadedAdamW:
    """Small chunks, most of them queued by the next forward, on streams that run nothing before somebody waits."""
    found = ARMS[arm]
    options: dict[str, Any] = {"chunk_bytes": 64 << 10, "slots": 2, "lead": 1, "ahead": 0}
    schedule = found.schedule(found.resolve(**{key: options[key] for key in options if key in found.defaults}))
    return OffloadedAdamW(job.params, lr, model=job.model, schedule=schedule, streams=AdversarialStreams())


def broadcaster_of(job: Job, optimizer: OffloadedAdamW, sparse: bool = True, settle: bool = True) -> Broadcaster:
    settled = optimizer.settled if settle else nullcontext
    return Broadcaster(job.model, job.dp.get_group(), settled, job.spec.workload.ep, sparse)


def step(job: Job, optimizer: OffloadedAdamW, number: int) -> None:
    jobs.backward(job, number)
    job.clip()
    optimizer.step()
    optimizer.zero_grad()


def shards(job: Job, optimizer: OffloadedAdamW) -> Weights:
    """This rank's part of every weight in bf16, once nothing is in flight."""
    optimizer.drain()
    return {name: local_of(p).to(torch.bfloat16).clone() for name, p in named(job)}


def named(job: Job) -> list[tuple[str, nn.Parameter]]:
    """Names by declaration order, with the sharded parameters: those registered may be gathered ones."""
    names = [name for name, _ in job.model.named_parameters()]
    return list(zip(names, job.params, strict=True))


def trained(rank: int, spec: RunSpec, arm: str, sparse: bool, settle: bool, lr: float) -> tuple[Any, ...]:
    """Sent broadcasts, the replica, and what this rank holds of the weights after the last of them."""
    job = build(spec, rank, jobs.CPU)
    optimizer = optimizer_of(job, arm, lr)
    broadcaster = broadcaster_of(job, optimizer, sparse, settle)
    sent = []
    for number in range(STEPS):
        step(job, optimizer, number)
        if number % EVERY == EVERY - 1:
            sent.append(broadcaster.broadcast())
    mine = shards(job, optimizer)
    optimizer.detach()
    return sent, broadcaster.replica, mine


def assembled(parts: list[Weights], ep: int) -> Weights:
    """The whole weights from all ranks' shards; experts lie on ranks in order (r mod ep, r div ep)."""
    order = sorted(range(len(parts)), key=lambda r: (r % ep, r // ep))
    return {
        name: torch.cat([parts[r][name] for r in (order if ".experts." in name else range(len(parts)))])
        for name in parts[0]
    }


def unequal(replica: Weights, weights: Weights) -> list[str]:
    assert list(replica) == list(weights)
    return [n for n in replica if not torch.equal(deltas.bits(replica[n]), deltas.bits(weights[n]))]


def compare(results: list[tuple[Any, ...]], ep: int) -> tuple[list[Sent], list[str]]:
    """Rank 0's account and the parameters whose replica is not the trainer's."""
    assert all(replica == {} for _, replica, _ in results[1:])
    sent, replica, _ = results[0]
    return sent, unequal(replica, assembled([mine for *_, mine in results], ep))


def each_arm(rank: int, spec: RunSpec) -> dict[Any, Any]:
    """Whole or by deltas in turn; on two ranks that share the experts both for arms that defer updates."""
    turns = [(arm, bool(at % 2)) for at, arm in enumerate(ARMS)]
    deferred = {arm for arm in ARMS if ARMS[arm].schedule(ARMS[arm].resolve()).deferred}
    others = [(arm, not sparse) for arm, sparse in turns if arm in deferred and spec.workload.ep > 1]
    return {case: trained(rank, spec, *case, True, SLIGHT) for case in turns + others}


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (3, 1), (1, 1)])
def test_the_replica_is_the_trainer_in_every_arm(world: int, ep: int) -> None:
    """On three ranks shards are of different sizes, and the last ones of 128 rows shorter than the others."""
    results = on_ranks(world, each_arm, jobs.spec(world, ep=ep))
    whole = 2 * find("tiny").params(2)
    for arm, sparse in results[0]:
        sent, wrong = compare([result[arm, sparse] for result in results], ep)
        assert wrong == [], (arm, sparse)
        first, second = sent
        assert (first.whole, first.nbytes, first.changed) == (True, whole, None)
        if sparse:
            assert not second.whole
            assert second.changed is not None
            assert 0 < second.changed < whole / 2
            assert second.nbytes < whole / 2
            assert 0 < second.drain_s < second.seconds
        else:
            assert (second.whole, second.nbytes) == (True, whole)


def test_experts_split_both_ways_lie_in_their_places() -> None:
    """Two ranks share a set of experts, and two pairs hold the same ones, sharded."""
    results = on_ranks(4, trained, jobs.spec(4, ep=2), "overlap", True, True, SLIGHT)
    assert compare(results, 2)[1] == []


def careless(rank: int, spec: RunSpec) -> list[Any]:
    return [trained(rank, spec, "overlap", sparse, False, SLIGHT * 100) for sparse in (False, True)]


@pytest.mark.parametrize("ep", [1, 2])
def test_without_settled_the_replica_is_stale(ep: int) -> None:
    results = on_ranks(2, careless, jobs.spec(2, ep=ep))
    for kind in range(2):
        _, wrong = compare([result[kind] for result in results], ep)
        assert "head.weight" in wrong


def wide(rank: int, spec: RunSpec) -> tuple[Any, ...]:
    return trained(rank, spec, "overlap", True, True, 1e-2)


def test_a_parameter_that_changed_a_lot_goes_whole() -> None:
    sent, wrong = compare(on_ranks(2, wide, jobs.spec(2, ep=2)), 2)
    assert wrong == []
    _, second = sent
    assert second.changed > find("tiny").params(2) / 2
    assert second.nbytes <= 2 * find("tiny").params(2)


def evaluated(rank: int, spec: RunSpec) -> tuple[Any, ...]:
    """Forwards without a backward leave the root's and the head's parameters gathered: once before the broadcaster
    exists, once between the backward and the step, whose weights they then do not have."""
    job = build(spec, rank, jobs.CPU)
    optimizer = optimizer_of(job, "overlap", 1e-2)
    names = named(job)

    def evaluate() -> bool:
        with torch.no_grad():
            job.model(*job.batch(9, 0))
        return any(p is not q for (_, p), (_, q) in zip(names, job.model.named_parameters(), strict=True))

    step(job, optimizer, 0)
    gathered = [evaluate()]
    broadcaster = broadcaster_of(job, optimizer)
    sent = [broadcaster.broadcast()]
    first = [{name: weight.clone() for name, weight in broadcaster.replica.items()}, shards(job, optimizer)]
    jobs.backward(job, 1)
    gathered.append(evaluate())
    optimizer.step()
    sent.append(broadcaster.broadcast())
    found = broadcaster.differences()
    last = shards(job, optimizer)
    optimizer.detach()
    return gathered, first, (sent, broadcaster.replica, last), found


def test_parameters_that_an_evaluation_left_gathered_are_read_where_the_optimizer_updates_them() -> None:
    results = on_ranks(2, evaluated, jobs.spec(2, ep=2))
    assert results[0][0] == [True, True]
    assert compare([(None, *first) for _, first, _, _ in results], 2)[1] == []
    assert compare([last for _, _, last, _ in results], 2)[1] == []
    assert [found for *_, found in results] == [[], []]


def watched(rank: int, spec: RunSpec) -> tuple[int, list[int]]:
    """How many gathers there were, and how many tensors of an earlier one each of them found alive."""
    job = build(spec, rank, jobs.CPU)
    optimizer = optimizer_of(job, "chunked", SLIGHT)
    broadcaster = broadcaster_of(job, optimizer)
    alive: list[weakref.ref[torch.Tensor]] = []
    found = []
    gather: Callable[..., Any] = broadcaster._gather

    def watching(payload: torch.Tensor) -> Any:
        found.append(sum(reference() is not None for reference in alive))
        pieces = gather(payload)
        alive.extend(weakref.ref(piece) for piece in pieces or [])
        return pieces

    broadcaster._gather = watching  # type: ignore[method-assign]
    for number in range(2):
        step(job, optimizer, number)
        broadcaster.broadcast()
    broadcaster.differences()
    optimizer.detach()
    return len(alive), found


def test_no_more_than_one_parameter_is_gathered_at_a_time() -> None:
    """In a rehearsal: threads of gloo let go of their tensors at any time after the gather."""
    gathered, found = jobs.rehearsed(0, 2, watched, jobs.spec(2, "rehearsal"))
    assert gathered > 2 * 2 * len(list(find("tiny").layer_tensors()))
    assert set(found) == {0}


def spoilt(rank: int, spec: RunSpec) -> list[str]:
    job = build(spec, rank, jobs.CPU)
    optimizer = optimizer_of(job, "none", SLIGHT)
    broadcaster = broadcaster_of(job, optimizer)
    broadcaster.broadcast()
    if rank == 0:
        deltas.bits(broadcaster.replica["blocks.1.experts.w2"]).view(-1)[-1] ^= 1
    return broadcaster.differences()


def test_one_flipped_bit_is_a_difference() -> None:
    assert on_ranks(2, spoilt, jobs.spec(2, ep=2)) == [["blocks.1.experts.w2"], []]


def refused(rank: int, spec: RunSpec) -> list[str]:
    said = []
    job = build(spec, rank, jobs.CPU)
    for model, ep in ((nn.Linear(2, 2), 1), (job.model, 2)):
        with pytest.raises(OffbenchError) as error:
            Broadcaster(model, dist.group.WORLD, nullcontext, ep)
        said.append(str(error.value).partition(":")[0])
    return said


def test_a_parameter_that_is_not_sharded_over_all_ranks_is_refused() -> None:
    names = ["cannot broadcast weight", "cannot broadcast blocks.0.experts.w13"]
    assert on_ranks(2, refused, jobs.spec(2)) == [names] * 2


def test_deltas_find_bits_not_values_and_put_them_back() -> None:
    before = torch.tensor([1.0, 0.0, math.nan, 3.0, 5.0], dtype=torch.bfloat16)
    after = torch.tensor([1.0, -0.0, math.nan, 4.0, 6.0], dtype=torch.bfloat16)
    positions = deltas.changed(after, before)
    assert positions.tolist() == [1, 3, 4]
    payload = deltas.pack(after, positions, room=5)
    assert payload.shape == (5 * deltas.ELEMENT_BYTES,)
    where, values = deltas.unpack(payload, 3)
    replica = before.clone()
    deltas.apply(replica, where, values)
    assert torch.equal(deltas.bits(replica), deltas.bits(after))
    short = before[:4].clone()
    deltas.apply(short, where, values)
    assert torch.equal(deltas.bits(short), deltas.bits(after[:4]))


@pytest.mark.parametrize(("warmup", "steps", "flag"), [(5, 4, "--warmup 5"), (4, 5, "--steps 5")])
def test_warm_up_and_window_are_whole_numbers_of_periods(warmup: int, steps: int, flag: str) -> None:
    spec = jobs.spec(2, broadcast_every=2)
    window = spec.window.model_copy(update={"warmup": warmup, "steps": steps})
    with pytest.raises(UsageError, match=f"{flag} is no multiple of --broadcast-every 2: .* use {flag[:-2]} 6"):
        check(spec.model_copy(update={"window": window}), find("tiny"))
