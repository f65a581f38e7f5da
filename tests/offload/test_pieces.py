"""A parameter larger than a chunk moves and updates in pieces: which, what that costs, and that no bit changes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.adamw import adamw

from offbench.offload import OffloadedAdamW, Schedule
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.budget import leading
from offbench.offload.chunks import ALIGNMENT, ends, plan_chunks
from offbench.offload.copies import Copier
from offbench.offload.flow import FlowEngine
from offbench.offload.gradients import by_memory, sole_memory
from offbench.offload.hoststore import HostStore
from offbench.offload.layout import local_of
from offbench.offload.updates import take_gradients
from offbench.verify.trainees import Mlp, wrapped_mlp
from tests.offload import sharded
from tests.offload.falling import Falling
from tests.ranks import on_ranks

CPU = torch.device("cpu")
WIDTH, LARGE = 90, 40 << 10
"""Of the blocks' matrices, whose moments are not multiples of 512 bytes; bytes that a shard's state of one exceeds."""
CAP = 13 << 10
"""Bytes of a piece: a shard of a block's matrix is five of them."""

layouts = st.lists(st.integers(0, 9000), min_size=1, max_size=12)


@given(layouts, st.integers(1, 6000), st.integers(0, 12000), st.sets(st.integers(0, 11)), st.integers(0, 12))
def test_pieces_tile_each_parameter_and_no_other_is_touched(
    sizes: list[int], cap: int, cut_above: int, solid: set[int], first: int
) -> None:
    before = plan_chunks(sizes[:first], cap, cut_above=cut_above)
    chunks = (*before, *plan_chunks(sizes[first:], cap, before, cut_above, {i - first for i in solid if i >= first}))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [p for chunk in chunks for p in chunk.members if chunk.home == chunk.index] == list(range(len(sizes)))
    assert sum(chunk.home_bytes for chunk in chunks) == sum(chunk.nbytes for chunk in chunks)
    solid = {position for position in solid if position >= first}
    for position, nbytes in enumerate(sizes):
        mine = [chunk for chunk in chunks if position in chunk.members]
        padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if mine[0].piece is None:
            assert 2 * padded <= max(cut_above, cap, 2 * ALIGNMENT) or position in solid
            assert len(mine) == 1
            continue
        assert 2 * padded > cut_above
        assert position not in solid
        of_byte = [None] * (2 * padded)  # the obvious way: who has which byte of the state where it is kept
        for chunk in mine:
            assert chunk.members == (position,)
            assert chunk.home == mine[0].index
            assert ALIGNMENT <= chunk.nbytes // 2 <= max(cap // 2, ALIGNMENT)
            assert chunk.offsets == ((0, chunk.nbytes // 2),)
            assert all(start % ALIGNMENT == 0 for start, _ in chunk.spans)
            for start, each in chunk.spans:
                assert of_byte[start : start + each] == [None] * each
                of_byte[start : start + each] = [chunk.index] * each
        halves = of_byte[:padded], of_byte[padded:]
        assert halves[0] == halves[1] == sorted(halves[0]), "of both moments the same, in order"
        assert max(c.nbytes for c in mine) - mine[-1].nbytes < 2 * ALIGNMENT * len(mine), "as equal as can be"
        assert [home.home_bytes for home in mine] == [2 * padded] + [0] * (len(mine) - 1)


@given(layouts, st.integers(512, 20000))
def test_what_fits_a_chunk_is_laid_out_as_ever(sizes: list[int], cap: int) -> None:
    assert plan_chunks(sizes, cap, cut_above=18 << 10) == plan_chunks(sizes, cap)


def test_a_budget_holds_all_pieces_of_a_parameter_or_none() -> None:
    chunks = plan_chunks([512, 2048, 512], 1024, cut_above=1024)
    assert [chunk.nbytes for chunk in chunks] == [1024] * 6
    assert ends(chunks) == [1024, 5120, 5120, 5120, 5120, 6144]
    found = [leading(chunks, nbytes) for nbytes in (1024, 5119, 5120, 6144)]
    assert found == [{0}, {0}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}], ids=str)
def test_torchs_kernels_leave_the_same_bits_on_slices(flags: dict[str, bool], dtype: torch.dtype) -> None:
    """What pieces rest on: the borders are where they may be, multiples of 512 bytes."""

    def update(tensors: list[torch.Tensor]) -> None:
        lists = [[tensor] for tensor in tensors]
        adamw(
            *lists, [], [torch.tensor(3.0)], **{"foreach": False, "fused": False, **flags}, amsgrad=False,
            maximize=False, beta1=0.9, beta2=0.95, lr=1e-2, weight_decay=0.1, eps=1e-8,
        )  # fmt: skip

    torch.manual_seed(0)
    count, size = 70_001, ALIGNMENT // dtype.itemsize
    whole = [torch.randn(count).to(dtype) for _ in range(3)] + [torch.rand(count).to(dtype)]
    cut = [tensor.clone() for tensor in whole]
    update(whole)
    for begin, end in itertools.pairwise([0, size, 4 * size, 100 * size, count]):
        update([tensor[begin:end] for tensor in cut])
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


VARIANTS: dict[str, dict[str, Any]] = {
    "main": {},
    "chunked": {"slots": 2},
    "overlap": {"slots": 2, "lead": 2, "ahead": 1},
    "overlap whole": {"slots": 64, "lead": 3, "ahead": 2, "first_step": "whole", "state_budget": 80 << 10},
    "stream": {"lead": 2, "ahead": 1, "staging_bytes": 0},
    "stream no growth": {"lead": 2, "ahead": 1, "staging_bytes": 2 * CAP, "loss_bytes": 2 * CAP},
    "stream ahead of step()": {"lead": 2, "ahead": 1},
    "zerocopy": {"lead": 2, "ahead": 1},
}


def schedule_of(label: str) -> Schedule:
    schedule = sharded.schedule_of(label.split(maxsplit=1)[0], **VARIANTS[label])
    return dataclasses.replace(schedule, chunk_bytes=CAP, whole_bytes=LARGE)


def build() -> Mlp:
    return wrapped_mlp(init_device_mesh("cpu", (2,)), CPU, torch.bfloat16, 2, WIDTH)


def optimizer_of(label: str | None, model: nn.Module, streams: AdversarialStreams | None, **options: Any) -> Any:
    if label is None:
        return torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    return OffloadedAdamW(
        model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule_of(label), streams=streams, **options
    )


def train(model: Mlp, optimizer: torch.optim.Optimizer, rank: int, steps: range, budgets: bool = False) -> None:
    """Two backwards a step, clipped; in one step a large matrix has no gradient. budgets: they change, too."""
    for step in steps:
        if budgets:
            optimizer.set_state_budget((80 << 10, 1 << 30, 200 << 10, 90 << 10)[step])  # type: ignore[attr-defined]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1)
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            model(torch.randn(4, WIDTH, generator=generator)).backward()
        if step == 1:
            model.blocks[1].up.weight.grad = None
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


def all_arms(rank: int) -> dict[str, list[str]]:
    """Differences to plain AdamW, accesses that nothing orders, and what else is not as it must be."""
    steps, found = range(4), {}
    model = build()
    plain = optimizer_of(None, model, None)
    train(model, plain, rank, steps)
    expected = sharded.snapshot(model, plain)
    ways = ((False, ("lazy", "lazy", "eager")), (True, ("eager", "lazy", "lazy")))
    for label, (changing, paces) in itertools.product(VARIANTS, ways):
        kind = Falling if "ahead" in label else AdversarialStreams
        streams = kind(dict(zip(("in", "update", "out"), paces, strict=True)))
        model = build()
        optimizer = optimizer_of(label, model, streams, debug=changing)
        if isinstance(streams, Falling):
            streams.layer = 60 << 10
            streams.watch(optimizer._engine)
            optimizer._watch(optimizer._engine)
        train(model, optimizer, rank, steps, changing)
        wrong = sharded.differences(expected, sharded.snapshot(model, optimizer)) + streams.order.violations
        pieces = [chunk for chunk in optimizer.chunks if chunk.piece is not None]
        wrong += ["pieces"] * (len(pieces) != 4 * 5) + ["too large"] * any(c.nbytes > CAP for c in pieces)
        for state in optimizer.state.values():
            wrong += ["a moment is no tensor of its own"] * any(
                local_of(state[name]).untyped_storage().nbytes() != local_of(state[name]).numel() * 4
                for name in ("exp_avg", "exp_avg_sq")
            )
        wrong += ["kernel steps"] * (optimizer.kernel_steps() != (3, 4))
        if not changing:
            wrong += ["nothing is there before step()"] * (isinstance(streams, Falling) and not any(streams.ahead))
            moved = 4 * optimizer.bytes_per_step - 2 * 4 * model.blocks[1].up.weight.to_local().numel()
            wrong += ["moved"] * (not 0 <= moved - optimizer.ledger.in_bytes < 2 * ALIGNMENT)
        found[f"{label} {changing}"] = wrong
    return found


def test_every_arm_equals_plain_adamw_in_pieces() -> None:
    for found in on_ranks(2, all_arms):
        assert len(found) == 2 * len(VARIANTS)
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def there_and_back(rank: int) -> dict[str, list[str]]:
    """Steps with torch's AdamW, then in pieces, then with torch's again, handed over as state_dicts."""
    model = build()
    plain = optimizer_of(None, model, None)
    train(model, plain, rank, range(6))
    expected, found = sharded.snapshot(model, plain), {}
    for label in ("overlap", "stream"):
        model = build()
        streams = AdversarialStreams({})
        first = optimizer_of(None, model, None)
        train(model, first, rank, range(2))
        second = optimizer_of(label, model, streams)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(model, second, rank, range(2, 4))
        third = optimizer_of(None, model, None)
        third.load_state_dict(copy.deepcopy(second.state_dict()))
        second.detach()
        train(model, third, rank, range(4, 6))
        found[label] = sharded.differences(expected, sharded.snapshot(model, third)) + streams.order.violations
    return found


def test_a_state_dict_of_torchs_adamw_goes_on_in_pieces_and_back() -> None:
    assert on_ranks(2, there_and_back) == [{"overlap": [], "stream": []}] * 2


def awaited(rank: int) -> dict[str, tuple[int, int]]:
    """By arm, how many results differ where gathers wait for the last piece of a parameter, and for the first alone,
    all of them being queued."""
    model = build()
    plain = optimizer_of(None, model, None)
    train(model, plain, rank, range(2))
    expected = sharded.snapshot(model, plain)
    labels = ("overlap", "stream", "zerocopy")
    return {
        label: (differing(rank, label, "last", expected), differing(rank, label, "first", expected))
        for label in labels
    }


def differing(rank: int, label: str, which: str, expected: dict[str, torch.Tensor]) -> int:
    model, streams = build(), AdversarialStreams({"in": "lazy", "update": "lazy", "out": "lazy"})
    optimizer = optimizer_of(label, model, streams)
    engine = optimizer._engine
    before_read = engine.before_read

    def before(chunks: list[int], look_ahead: bool = True) -> list[Any]:
        before_read(chunks, look_ahead)
        asked = [engine.chunks[chunk].home if which == "first" else chunk for chunk in chunks]
        return [engine._updated[chunk] for chunk in asked if chunk in engine._updated]

    engine.before_read = before
    optimizer._watch(engine)
    train(model, optimizer, rank, range(2))
    return len(sharded.differences(expected, sharded.snapshot(model, optimizer)))


def test_a_gather_waits_for_the_last_piece_of_a_parameter() -> None:
    for found in on_ranks(2, awaited):
        for label, (last, first) in found.items():
            assert last == 0, label
            assert first > 0, f"{label}: the test would not notice"


def plain_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 240), nn.Linear(240, 24), nn.Linear(24, 24))


def stepped(net: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        net(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}], ids=str)
def test_parameters_that_come_late_or_cannot_be_cut(flags: dict[str, bool]) -> None:
    """The second layer is thawed after a step, the third one is added then; the second weight is not contiguous."""
    schedule = Schedule("chunked", offloaded=True, chunk_bytes=1 << 13, slots=2)
    results: list[tuple[list[torch.Tensor], Any]] = []
    for offloaded in (False, True):
        net = plain_net()
        net[1].weight = nn.Parameter(net[1].weight.detach().t().contiguous().t())
        net[1].requires_grad_(False)
        first = [*net[0].parameters(), *net[1].parameters(), *net[3].parameters()]
        optimizer: Any
        if offloaded:
            optimizer = OffloadedAdamW(first, implementation=next(iter(flags)), schedule=schedule)  # type: ignore[arg-type]
        else:
            optimizer = torch.optim.AdamW(first, **flags)
        stepped(net, optimizer, 1)
        net[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.1})
        optimizer.zero_grad()
        stepped(net, optimizer, 3)
        states = optimizer.state_dict()["state"].values()
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
        results.append(([*net.parameters(), *moments], optimizer))
    (expected, _), (found, optimizer) = results
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    cut = {chunk.members[0] for chunk in optimizer.chunks if chunk.piece is not None}
    assert len(cut) == 1
    assert max(chunk.nbytes for chunk in optimizer.chunks) == 8 * 24 * 240, "the one that is not contiguous"


def test_a_gradient_that_is_not_contiguous_is_cut_by_its_values() -> None:
    net = plain_net()
    other = copy.deepcopy(net)
    schedule = Schedule("chunked", offloaded=True, chunk_bytes=1 << 13, slots=2)
    optimizer = OffloadedAdamW(net.parameters(), schedule=schedule)
    plain = torch.optim.AdamW(other.parameters(), fused=True)
    torch.manual_seed(0)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        theirs.grad = torch.randn_like(theirs)
        ours.grad = theirs.grad.t().contiguous().t() if theirs.numel() == 24 * 240 else theirs.grad.clone()
    optimizer.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("where", [0, 5, 10])
@pytest.mark.parametrize("cap", [1 << 14, 1 << 16])
def test_a_huge_parameter_costs_staging_a_few_pieces(where: int, cap: int) -> None:  # IST-DASLab/llmq#19
    parameters = [nn.Parameter(torch.ones(24 * 24)) for _ in range(10)]
    parameters.insert(where, nn.Parameter(torch.ones(1 << 18)))
    schedule = Schedule("chunked", offloaded=True, chunk_bytes=cap, slots=2)
    optimizer = OffloadedAdamW(parameters, schedule=schedule)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert 0 < optimizer.staging_peak <= 2 * cap < 8 << 18
    assert optimizer.ledger.in_bytes == optimizer.ledger.out_bytes == optimizer.bytes_per_step > 8 << 18


def least_staging(rank: int) -> tuple[int, int, list[int], list[int]]:
    """The arena of stream, the most it held without growing, the state of its parameters, and by backward of a module
    the bytes of gradients that staging has made room for by then."""
    model = build()
    schedule = dataclasses.replace(schedule_of("stream no growth"), staging_bytes=0, loss_bytes=0)
    optimizer = OffloadedAdamW(model.parameters(), model=model, schedule=schedule, streams=AdversarialStreams({}))
    engine: Any = optimizer._engine
    before_backward, room = engine.before_backward, []

    def before(chunks: list[int]) -> None:
        before_backward(chunks)
        room.append(0 if engine._step is None else engine._step.backward_bytes)

    engine.before_backward = before
    optimizer._watch(engine)
    train(model, optimizer, rank, range(3))
    return optimizer.staging_bytes, optimizer.staging_peak, [2 * local_of(p).nbytes for p in model.parameters()], room


def test_stream_holds_two_neighbours_where_it_must_not_grow() -> None:
    """A piece, and the head: more than a piece, but not more than a chunk, so it moves whole."""
    for arena, peak, sizes, room in on_ranks(2, least_staging):
        assert max(room) >= sum(sizes) // 2, "for the gradients of all pieces"
        assert CAP < sizes[-1] < LARGE
        assert arena == peak <= CAP + sizes[-1] + 2 * ALIGNMENT < max(sizes)


def test_look_ahead_takes_all_pieces_of_a_parameter_for_one_chunk() -> None:
    chunks = plan_chunks([512, 2048, 512, 1536], 1024, cut_above=1024)
    engine: Any = FlowEngine(chunks, HostStore([]), schedule_of("stream"), AdversarialStreams(), Copier())
    works = [SimpleNamespace(chunk=chunk) for chunk in chunks]
    found = []
    for updated in (0, 2, 5, 6, 9):
        engine._waiting = lambda updated=updated: works[updated:]
        found.append([engine._burst(count) for count in (1, 3)])
    assert found == [[1, 6], [4, 7], [1, 4], [3, 3], [0, 0]]


def test_gradient_memory_has_an_owner_until_the_last_piece() -> None:
    net = plain_net()
    schedule = Schedule("overlap", offloaded=True, chunk_bytes=1 << 13, slots=2)
    optimizer = OffloadedAdamW(net.parameters(), schedule=schedule)
    net(torch.ones(2, 24)).sum().backward()
    size = net[1].weight.grad.nbytes
    hypers: Any = [None]
    works, counters, parameters = take_gradients(
        optimizer._updates, optimizer.state, hypers, True, lambda chunk: False
    )
    assert len(counters) == len(parameters) == len(list(net.parameters()))
    pieces = [work for work in works if work.chunk.members == (2,)]
    assert len(pieces) == 6
    memories = by_memory(works)
    (memory,) = {id(m): m for work in pieces for m in memories[work.chunk.index]}.values()
    assert memory.pending == {work.chunk.index for work in pieces}
    whole = sole_memory(memory.tensors)
    assert whole is not None
    assert whole.numel() == size
