"""stream's memory: ranges never overlap, staging grows into gradients, and the backward gets its memory back."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offbench.offload import OffloadedAdamW, flow_memory
from offbench.offload.adversary import AdversarialEvent, AdversarialStreams
from offbench.offload.allowance import Allowance
from offbench.offload.chunks import ALIGNMENT, Chunk, plan_chunks
from offbench.offload.copies import Copier
from offbench.offload.engine import Work
from offbench.offload.extents import Extents, Range, joined, later
from offbench.offload.flow import FlowEngine
from offbench.offload.flow_step import Place
from offbench.offload.headroom import arena_replaced, arena_retires
from offbench.offload.hoststore import HostStore
from offbench.offload.schedule import Schedule
from offbench.offload.staged import Staged, segments
from offbench.offload.streams import DeviceStreams, Why
from offbench.verify.trainees import wrapped_mlp
from tests.offload import sharded, trainer
from tests.offload.trainer import stream
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def event() -> AdversarialEvent:
    return AdversarialStreams().compute().record()


def extents(*sizes: int) -> Extents:
    made = Extents()
    for nbytes in sizes:
        made.add(torch.empty(nbytes, dtype=torch.uint8), Why.ARENA_READY, event())
    return made


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    moves=st.lists(
        st.tuples(st.sampled_from(["take", "give"] * 4 + ["close"]), st.integers(1, 5), st.integers(0, 9)), max_size=60
    ),
)
def test_no_byte_is_taken_twice_and_none_is_lost(sizes: list[int], moves: list[tuple[str, int, int]]) -> None:
    memory = extents(*(n * ALIGNMENT for n in sizes))
    taken: list[Range] = []
    for move, nbytes, which in moves:
        if move == "take":
            found = memory.take([nbytes * ALIGNMENT]) or []
            assert not any(one.extent.closed for one in found)
            taken += found
        elif move == "give" and taken:
            memory.give(taken.pop(which % len(taken)), Why.SLOT_FREE, event())
        elif move == "close" and not memory.all[which % len(sizes)].closed:
            memory.close(memory.all[which % len(sizes)])
        for extent in memory.all:
            mine = sorted((one.start, one.stop) for one in taken if one.extent is extent)
            free = sorted((one.start, one.stop) for one in extent.free)
            together = sorted(mine + free)
            assert together[0][0] == 0
            assert together[-1][1] == extent.nbytes
            assert all(a[1] == b[0] for a, b in itertools.pairwise(together))
            assert all(a[1] < b[0] for a, b in itertools.pairwise(free)), "neighbours are merged"
        open_ones = [extent for extent in memory.all if not extent.closed]
        assert memory.free_bytes == sum(one.stop - one.start for extent in open_ones for one in extent.free)
        assert memory.nbytes == sum(extent.nbytes for extent in memory.all)
    for one in taken:
        memory.give(one, Why.SLOT_FREE, event())
    assert all(extent.idle for extent in memory.all)
    for extent in list(memory.all):
        memory.remove(extent)
    assert (memory.free_bytes, memory.nbytes) == (0, 0)


def test_neighbours_in_the_chunk_and_in_one_extent_move_in_one_copy() -> None:
    memory = extents(4 * ALIGNMENT, 2 * ALIGNMENT)
    sizes = [(0, ALIGNMENT), (ALIGNMENT, ALIGNMENT), (2 * ALIGNMENT, 2 * ALIGNMENT), (4 * ALIGNMENT, ALIGNMENT)]
    ranges = memory.take([nbytes for _, nbytes in sizes])
    assert ranges is not None
    small, large = sorted(memory.all, key=lambda extent: extent.nbytes)
    assert [one.extent for one in ranges] == [small, small, large, large], "the smallest that fits"
    parts = joined(sizes, ranges)
    assert [(at, part.data_ptr(), part.numel()) for at, part in parts] == [
        (0, small.memory.data_ptr(), 2 * ALIGNMENT),
        (2 * ALIGNMENT, large.memory.data_ptr(), 3 * ALIGNMENT),
    ]


def test_sizes_that_do_not_all_fit_take_nothing() -> None:
    memory = extents(4 * ALIGNMENT)
    assert memory.take([3 * ALIGNMENT, 2 * ALIGNMENT]) is None
    assert memory.all[0].idle
    memory.add(torch.empty(2 * ALIGNMENT, dtype=torch.uint8), Why.ARENA_READY, event())
    assert memory.take([2 * ALIGNMENT, 3 * ALIGNMENT, ALIGNMENT]) is not None
    assert memory.take([1]) is None
    memory = extents(2 * ALIGNMENT, 2 * ALIGNMENT)
    assert memory.take([ALIGNMENT, 3 * ALIGNMENT]) is None, "enough in all, but not in one piece"
    assert memory.free_bytes == 4 * ALIGNMENT
    memory = extents(4 * ALIGNMENT)
    assert memory.take([3 * ALIGNMENT, ALIGNMENT]) is not None


def test_the_next_user_waits_for_the_latest_event_of_each_reason() -> None:
    first, second, other = event(), event(), event()
    merged = later({Why.SLOT_FREE: (1, first)}, {Why.SLOT_FREE: (3, second), Why.GRADIENT_FREE: (2, other)})
    assert merged == {Why.SLOT_FREE: (3, second), Why.GRADIENT_FREE: (2, other)}


def test_large_moments_are_staged_apart_and_small_ones_together() -> None:
    (chunk,) = plan_chunks([512, 512, 4096], 1 << 20)
    assert segments(chunk, 4096) == [(0, 6144), (6144, 4096)]
    assert segments(chunk, 1) == [(0, 512), (512, 512), (1024, 512), (1536, 512), (2048, 4096), (6144, 4096)]
    parts = Staged(
        [
            (start, torch.full((nbytes,), i, dtype=torch.uint8))
            for i, (start, nbytes) in enumerate(segments(chunk, 4096))
        ]
    )
    assert parts.bytes(2048, 4096).unique().tolist() == [0]
    assert parts.bytes(6144, 4096).unique().tolist() == [1]


def directions(schedule: Schedule) -> list[list[str]]:
    """Per step, the directions of the copies in the order in which they were queued."""
    steps: list[list[str]] = []

    def watch(engine) -> None:
        copy, finish = engine._copy, engine._finish

        def spy_copy(at, direction, pairs):
            steps[-1].append(direction)
            return copy(at, direction, pairs)

        def spy_finish():
            is_next = not steps or engine._step is not None
            finish()
            if is_next:
                steps.append([])

        engine._copy, engine._finish = spy_copy, spy_finish

    trainer.run(schedule, AdversarialStreams(), watch)
    return steps


def test_nothing_is_written_back_before_the_last_move_in_while_there_is_room() -> None:
    for queued in directions(stream(staging_bytes=1 << 20)):
        assert queued == sorted(queued), "all in, then all out"


def test_without_growth_memory_alone_decides_what_is_written_back_early() -> None:
    grown, bounded = directions(stream()), directions(stream(loss_bytes=0))

    def early(queued: list[str]) -> int:
        return queued[: len(queued) - queued[::-1].index("in")].count("out")

    assert early(bounded[0]) > early(grown[0]) > 0


def held(rank: int, options: dict[str, int]) -> tuple[int, int, list[int], int]:
    """Arena, largest staging, staging held at each gather of one backward, and state bytes."""
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of("stream", model, DeviceStreams(CPU), lead=99, **options)
    sharded.train(model, optimizer, rank, CPU, steps=range(1))
    engine = optimizer._engine
    before_backward, seen = engine.before_backward, []

    def spy(chunks):
        before_backward(chunks)
        seen.append(engine._extents.nbytes)

    engine.before_backward = spy
    optimizer._watch(engine)
    sharded.train(model, optimizer, rank, CPU, steps=range(1, 2))
    optimizer.drain()
    assert engine._extents.nbytes == 0
    return engine._allowance.arena_bytes, optimizer.staging_peak, seen, optimizer.bytes_per_step


@pytest.mark.parametrize("loss_bytes", [None, 2 << 20])
def test_staging_grows_into_gradients_and_the_backward_gets_them_back(loss_bytes: int | None) -> None:
    for arena, peak, seen, state in on_ranks(2, held, {"staging_bytes": 2 << 20, "loss_bytes": loss_bytes}):
        assert arena == 2 << 20
        if loss_bytes is None:
            assert arena < peak <= arena + state // 2
        else:
            assert peak == arena
        assert seen[-1] == 0, "everything is given back before the backward ends"


PARAMETERS = 7000


class Counted(DeviceStreams):
    """A device whose allocator counts what `trainer` would hold: parameters, gradients, staging, and activations of
    so many bytes in each step, which come with the forward and go with the backward."""

    def __init__(self, activations: Sequence[int]) -> None:
        super().__init__(CPU)
        self.activations = activations
        self.own: list[int] = [0 for _ in activations]
        """By step, the most that was held without staging."""
        self.held: list[int] = [0 for _ in activations]
        """The same with it."""
        self.limits: list[int | None] = []
        """What may be staged at the loss, after each step."""
        self.staged: list[int] = []
        """What was staged there, in each step."""
        self.lent: list[int] = []
        """Of that, in memory that state found here before step()."""
        self.arenas: list[list[int]] = []
        """In each step, what was left of the arena at each gather of the forward."""
        self.ahead: list[int] = []
        """What was there when each step() began, in memory that activations lent."""
        self.early: list[int] = []
        """The same in memory of the arena."""
        self._forward = self._backward = 0.0
        self._passes = 0
        self._kept = 0

    def watch(self, engine: FlowEngine) -> None:
        self._engine = engine
        self._gradients = 4 * sum(trainer.SIZES)
        read, backward, step, wanted = engine.before_read, engine.before_backward, engine.step, engine._wanted
        ended = engine.after_backward
        part = 1 / len(engine.chunks)

        def before_read(chunks, look_ahead=True):
            events = read(chunks, look_ahead)
            if not self._backward:
                self._forward += part
                if engine._step is not None:
                    self.arenas[-1].append(sum(extent.nbytes for extent in engine._step.arena))
            self._note()
            return events

        def before_backward(chunks) -> None:
            if not self._backward:
                self.staged.append(engine._extents.nbytes)
                self.lent.append(sum(extent.nbytes for extent in engine._step.lent) if engine._step is not None else 0)
            backward(chunks)
            self._backward += part
            self._note()

        def after_backward() -> None:
            self._forward = self._backward = 0.0
            self._passes += 1
            ended()
            self._note()

        def spy_step(works) -> None:
            self.ahead.append(engine._allowance.ahead_bytes)
            held = engine.prefetch._held
            self.early.append(sum(one.chunk.nbytes for one in held if isinstance(one.where, Place)))
            self.arenas.append([])
            step(works)
            self.limits.append(engine._allowance.at_loss)
            self._passes = 0

        def spy_wanted(step, nbytes):
            self._kept = nbytes  # of a gradient whose end is being decided
            found = wanted(step, nbytes)
            self._kept = 0
            return found

        engine.before_read, engine.before_backward, engine.step = before_read, before_backward, spy_step
        engine._wanted, engine.after_backward = spy_wanted, after_backward

    def _own(self) -> int:
        step = self._engine._step
        old = step.gradient_bytes - step.freed_bytes + self._kept if step is not None else 0
        left = self._forward - self._backward if self._forward else 0.0
        there = 1.0 if self._passes else self._backward
        return (
            PARAMETERS
            + old
            + round(self.activations[min(len(self.limits), len(self.own) - 1)] * left + self._gradients * there)
        )

    def _note(self) -> None:
        now = len(self.limits)
        self.own[now] = max(self.own[now], self._own())
        self.held[now] = max(self.held[now], self._own() + self._engine._allowance.staged_bytes)

    def allocated(self) -> int:
        return self._own() + self._engine._allowance.staged_bytes


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> int:
    """24 equal parameters and a step for each of six batches; returns the gradients' bytes."""
    monkeypatch.setattr(trainer, "SIZES", (64,) * 24)
    monkeypatch.setattr(trainer, "STEPS", 6)
    return 4 * 64 * 24


def lengths(
    activations: Sequence[int], staging: int | None = None, passes: Sequence[int] = (1,) * 6
) -> tuple[Counted, FlowEngine]:
    schedule = dataclasses.replace(stream(), chunk_bytes=1, lead=1, ahead=2, staging_bytes=staging)
    streams = Counted(activations)
    assert trainer.run(schedule, streams, streams.watch, passes).equals(trainer.plain())
    return streams, streams._engine


@pytest.mark.parametrize("activations", [1000, 4000, 9000])
def test_staging_at_the_loss_is_what_gradients_take_beyond_activations(many: int, activations: int) -> None:
    streams, engine = lengths([activations] * 6)
    assert streams.limits == [max(0, many - activations)] * 6
    arena, group = engine._allowance.arena_bytes, many // 12
    assert max(streams.held) <= PARAMETERS + max(many, activations) + arena + group
    if activations == 1000:
        assert engine.staging_peak > arena + 2 * group, "it grows"


@pytest.mark.parametrize(("activations", "arena"), [(9000, 2 * 1024), (4000, 2144), (500, 5000)])
def test_the_arena_is_no_more_than_may_be_staged_at_the_loss_but_for_two_chunks(
    many: int, activations: int, arena: int
) -> None:
    streams, engine = lengths([activations] * 6, staging=5000)
    assert engine._allowance.arena_bytes == arena
    assert max(streams.held) <= PARAMETERS + max(many, activations) + arena + many // 12


def test_the_arena_is_compute_memory_and_goes_back_before_the_loss_needs_it(many: int) -> None:
    streams, engine = lengths([1000] * 6)
    arena = [chunks for chunks in streams.arenas if chunks]
    assert engine._allowance.arena_retires
    for held, staged, limit in zip(arena[1:], streams.staged[1:], streams.limits[1:], strict=False):
        assert held[0] == engine._allowance.arena_bytes
        assert held[-1] == 0
        assert arena[-1].index(0) < len(held) - 2, "not at the very end"
        assert staged <= limit


@pytest.mark.parametrize("longest", [5000, 9000])
def test_a_longer_batch_makes_staging_smaller_from_its_first_forward_on(many: int, longest: int) -> None:
    """5000 is less than the gradients take, 9000 more."""
    streams, engine = lengths([1000, 1000, longest, 1000, 3000, 1000])
    assert streams.limits[:2] == [many - 1000] * 2
    assert streams.limits[2:] == [max(0, many - longest)] * 4, "the next one may be as long"
    arena, group = engine._allowance.arena_bytes, many // 12
    for step, held in enumerate(streams.held):
        most = PARAMETERS + max([many, *streams.activations[: step + 1]])
        assert held <= most + arena + group, f"step {step}"
    assert streams.staged[1] > arena + group
    assert streams.staged[2] == 0 if longest > many else streams.staged[2] < streams.staged[1]


@pytest.mark.parametrize("longest", [5000, 9000])
def test_without_a_look_at_the_allocator_the_first_longer_batch_would_raise_the_peak(
    many: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Allowance, "is_crowded", lambda self: False)
    streams, engine = lengths([1000, 1000, longest, 1000, 1000, 1000])
    assert streams.held[2] > PARAMETERS + max(many, longest) + engine._allowance.arena_bytes + many // 12
    assert streams.limits[3] == max(0, many - longest)


class Crowded(AdversarialStreams):
    """Every look at the allocator finds more memory taken than ever before."""

    taken = 1 << 20

    def allocated(self) -> int:
        self.taken += 1 << 20
        return self.taken


@pytest.mark.parametrize("out", ["lazy", "eager"])
def test_memory_given_back_before_the_loss_has_been_written_back(out: str) -> None:
    given: list[int] = []

    def watch(engine) -> None:
        give_back, finish = engine._give_back, engine.before_backward

        def spy(extent) -> None:
            given[-1] += 1
            give_back(extent)

        def spy_backward(chunks) -> None:
            given.append(0)
            finish(chunks)

        given.append(0)
        engine._give_back, engine.before_backward = spy, spy_backward

    streams = Crowded({"in": "lazy", "update": "lazy", "out": out, "compute": "lazy"})
    assert trainer.run(dataclasses.replace(stream(), lead=1, ahead=3), streams, watch).equals(trainer.plain())
    assert streams.order.violations == []
    chunks = (len(given) - 1) // trainer.STEPS
    assert given[0] == 0
    assert all(count > 0 for count in given[chunks::chunks][:-1]), "in the forward, all of it"
    assert sum(given) == sum(given[chunks::chunks])


@pytest.mark.parametrize(("moves_in", "update", "out"), list(itertools.product(["lazy", "eager"], repeat=3)))
def test_an_arena_that_retires_changes_no_bit(many: int, moves_in: str, update: str, out: str) -> None:
    retired = []

    def watch(engine) -> None:
        retire = engine._retire_arena

        def spy(step) -> None:
            retire(step)
            retired.append(step.retired)

        engine._retire_arena = spy

    streams = AdversarialStreams({"in": moves_in, "update": update, "out": out, "compute": "lazy"})
    schedule = dataclasses.replace(stream(loss_bytes=5000), chunk_bytes=1, lead=3, ahead=2)
    wrong: list[str] = []

    def watch_all(engine) -> None:
        watch(engine)
        look_ahead, give_back, looking = engine.look_ahead, engine._give_back, []

        def spy(at_leisure=False) -> None:
            looking.append(True)
            look_ahead(at_leisure)
            looking.clear()
            if engine._step is not None:
                wrong.extend("kept in the arena" for _, place in engine._step.staged if place.closed)

        def spy_give(extent) -> None:
            if looking and not engine._extents.passed(extent):
                wrong.append("compute waits in the forward")
            give_back(extent)

        engine.look_ahead, engine._give_back = spy, spy_give

    assert trainer.run(schedule, streams, watch_all).equals(trainer.plain())
    assert streams.order.violations == []
    assert True in retired
    assert False in retired
    assert wrong == []


def test_an_arena_is_replaced_half_way_and_by_as_much() -> None:
    assert [arena_replaced(freed, 10, grown, 4) for freed, grown in ((5, 4), (4, 4), (5, 3))] == [True, False, False]
    assert [arena_retires(limit, 4) for limit in (None, 7, 8)] == [False, False, True]


def test_step_queues_what_stays_and_then_its_lead() -> None:
    left = []

    def watch(engine) -> None:
        step = engine.step

        def spy(works) -> None:
            step(works)
            left.append((len(works) - len(engine._waiting()), len(engine._resident)))

        engine.step = spy

    schedule = dataclasses.replace(stream(resident_bytes=5000), lead=2, ahead=0)
    assert trainer.run(schedule, AdversarialStreams(), watch).equals(trainer.plain())
    assert left == [(kept + 2, kept) for _, kept in left]
    assert left[0][1] > 0


def test_a_chunk_that_fits_into_no_gradient_finds_room_once_the_arena_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its moments are longer than any gradient buffer before it; two of the trainer's gradients share one."""
    monkeypatch.setattr(trainer, "SIZES", (64,) * 22 + (128,) * 4 + (1024, 64))
    made = []

    def watch(engine) -> None:
        add = engine.add_extent

        def spy(nbytes):
            if engine._step is not None and engine._step.retired:
                made.append(nbytes)
            return add(nbytes)

        engine.add_extent = spy
        engine._allowance.least_bytes, engine._allowance.arena_bytes = 0, 1024  # so small that it goes

    streams = AdversarialStreams({"in": "lazy", "update": "lazy", "out": "lazy", "compute": "lazy"})
    schedule = dataclasses.replace(stream(loss_bytes=20000), chunk_bytes=1, lead=3, ahead=2)
    assert trainer.run(schedule, streams, watch).equals(trainer.plain())
    assert streams.order.violations == []
    assert made


def test_a_limit_that_the_schedule_gives_stays(many: int) -> None:
    streams = Counted([1000, 9000, 1000, 1000, 1000, 1000])
    trainer.run(dataclasses.replace(stream(), chunk_bytes=1, loss_bytes=3000), streams, streams.watch)
    assert streams.limits == [3000] * 6


def growth(rank: int, most: int) -> list[tuple[int, float, int]]:
    """Gradient memory taken over after each update of the second step, what was allowed then, and what was free."""
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of("stream", model, DeviceStreams(CPU), staging_bytes=2 << 20)
    sharded.train(model, optimizer, rank, CPU, steps=range(1))
    engine, seen = optimizer._engine, []
    engine._allowance.at_loss = engine._allowance.arena_bytes + most
    assert not engine._allowance.arena_retires
    recycle = engine._recycle

    def spy(step, work, updated):
        recycle(step, work, updated)
        seen.append((step.grown_bytes, most * step.freed_bytes / step.gradient_bytes, step.freed_bytes))

    optimizer.drain()
    engine._recycle = spy
    sharded.train(model, optimizer, rank, CPU, steps=range(1, 2))
    optimizer.drain()
    assert seen[-1][1] == most, "in the end all gradient memory is free"
    return seen


def test_staging_grows_no_faster_than_gradients_leave_room_for_activations() -> None:
    most = 3 << 19
    for seen in on_ranks(2, growth, most):
        assert all(grown <= allowed for grown, allowed, _ in seen)
        assert seen[-1][0] > most / 2
        assert any(0 < grown < freed for grown, _, freed in seen[: len(seen) // 2]), (
            "from the start, and not all of it"
        )


class Ungathered(nn.Module):
    """Blocks that stay gathered after the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        for block in self.blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(self, reshard_after_forward=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def held_where_nothing_is_resharded(rank: int) -> int:
    net = Ungathered()
    schedule = dataclasses.replace(stream(), chunk_bytes=1 << 14)
    optimizer = OffloadedAdamW(net.parameters(), schedule=schedule, model=net, streams=DeviceStreams(CPU))
    optimizer._engine.prefetch.backward_ends = lambda: None  # which takes the next arena
    for _ in range(2):
        net(torch.ones(2, 64)).square().mean().backward()
        left = optimizer._engine._extents.nbytes
        optimizer.step()
    return left


def test_staging_is_given_back_where_the_backward_gathers_nothing() -> None:
    assert on_ranks(2, held_where_nothing_is_resharded) == [0, 0]


def test_a_torch_that_does_not_count_users_only_keeps_gradients_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    grown = []

    def watch(engine) -> None:
        recycle = engine._recycle

        def spy(step, work, updated):
            recycle(step, work, updated)
            grown.append(step.grown_bytes)

        engine._recycle = spy

    assert trainer.run(stream(), AdversarialStreams(), watch).equals(trainer.plain())
    assert set(grown) == {0}


def queued_by_read(schedule: Schedule) -> tuple[int, int, list[int]]:
    """Chunks, updates queued by the second step(), and updates queued in all after each read of the next forward."""
    counts, total = [0], [0]
    after_step: list[int] = []
    reads: list[list[int]] = []

    def watch(engine) -> None:
        finish, step, before_read = engine._finish_update, engine.step, engine.before_read
        total[0] = len(engine.chunks)

        def spy_finish(*work):
            counts[0] += 1
            finish(*work)

        def spy_step(works):
            engine._finish()
            counts[0] = 0
            step(works)
            after_step.append(counts[0])
            reads.append([])

        def spy_read(chunks):
            events = before_read(chunks)
            if reads:
                reads[-1].append(counts[0])
            return events

        engine._finish_update, engine.step, engine.before_read = spy_finish, spy_step, spy_read

    trainer.run(schedule, AdversarialStreams(), watch)
    return total[0], after_step[1], reads[1][: total[0]]


def test_step_updates_lead_chunks_and_each_read_one_more_than_it_needs() -> None:
    chunks, by_step, by_read = queued_by_read(dataclasses.replace(stream(), lead=2, ahead=3))
    assert by_step == 2
    # The first read needs chunk 0, which is there, and queues one more; so does each read, until 3 are in front.
    expected, queued = [], by_step
    for read in range(chunks):
        queued = max(queued, min(max(queued, read + 1) + 1, read + 1 + 3, chunks))
        expected.append(queued)
    assert by_read == expected
    assert by_read[0] == 3
    _, by_step, by_read = queued_by_read(dataclasses.replace(stream(), lead=1, ahead=0))
    assert (by_step, by_read) == (1, list(range(1, chunks + 1))), "nothing is queued ahead"
    _, _, by_read = queued_by_read(dataclasses.replace(stream(), lead=1, ahead=99))
    assert by_read == [min(read + 2, chunks) for read in range(chunks)], "one more a read, not all at once"


def test_pieces_cut_chunks_and_keep_the_windows() -> None:
    whole = Schedule("overlap", offloaded=True, chunk_bytes=1 << 20, slots=4, deferred=True, lead=8, ahead=3)
    cut = whole.in_pieces(4)
    assert (cut.chunk_bytes, cut.slots, cut.lead, cut.ahead) == (1 << 18, 16, 32, 12)
    assert cut.cut_above == whole.cut_above == 1 << 20, "what fits a chunk is not cut"
    assert cut.in_pieces(4).cut_above == 1 << 20
    assert dataclasses.replace(whole, offloaded=False, deferred=False).cut_above is None
    assert whole.in_pieces(1) == whole
    assert dataclasses.replace(whole, slots=None, copy_streams=False, deferred=False).in_pieces(4).slots is None


UNEVEN = (64, 64, 1024, 64, 1024, 512, 64)
"""Elements: chunks of one parameter each, the large ones never neighbours, and small ones first."""


def updates_in(chunks: tuple[Chunk, ...], left_out: set[int]) -> tuple[int, int, list[int]]:
    """Arena, largest staging and updated chunks of two steps over those chunks, without some in each. The second one's
    arena fills before it."""
    store, streams, done = HostStore([chunk.nbytes for chunk in chunks]), AdversarialStreams(), []
    schedule = dataclasses.replace(stream(loss_bytes=0), lead=1)
    engine = FlowEngine(chunks, store, schedule, streams, Copier())
    for _ in range(2):
        works = [
            Work(c, lambda state, i=c.index: done.append(i), [torch.zeros(c.nbytes // 8)], [torch.zeros(1)])
            for c in chunks
            if c.index not in left_out
        ]
        engine.before_backward([])
        engine.after_backward()
        engine.step(works)
    engine.drain()
    assert engine._extents.all == []
    return engine._allowance.arena_bytes, engine.staging_peak, done


def test_a_step_that_finds_no_memory_is_left_out_and_the_next_one_is_whole() -> None:
    """With one of its chunks there already, in lent memory, and one of two pieces of its arena."""
    chunks = plan_chunks([4 * 1024] * 6, 1)
    store, streams, done = HostStore([chunk.nbytes for chunk in chunks]), AdversarialStreams(), []
    schedule = dataclasses.replace(stream(loss_bytes=0), lead=1)
    engine = FlowEngine(chunks, store, schedule, streams, Copier())
    engine._allowance._piece_bytes = chunks[0].nbytes
    engine._allowance.ahead_of_step = lambda: chunks[0].nbytes
    engine.prefetch._fill_arena = lambda: None
    allocate = streams.allocate

    def step(step: int) -> None:
        engine.before_backward([])
        engine.after_backward()
        engine.step([Work(c, lambda state, c=c: done.append((step, c.index)), [torch.zeros(8)], []) for c in chunks])

    left = [chunks[0], chunks[1]]

    def run_out(nbytes: int) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("none left")
        left.pop()
        return allocate(nbytes)

    step(0)
    streams.allocate = run_out
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        step(1)
    assert engine._allowance.staged_bytes == chunks[0].nbytes, "the piece that it got went back"
    streams.allocate = allocate
    step(2)
    engine.drain()
    assert done == [(step, chunk.index) for step in (0, 2) for chunk in chunks]
    assert engine._extents.all == []
    assert streams.order.violations == []
    assert engine.ledger.in_bytes == engine.ledger.out_bytes == 2 * 6 * 8 * 1024


@given(left_out=st.sets(st.integers(0, len(UNEVEN) - 1)))
def test_the_least_arena_serves_a_step_that_leaves_chunks_out(left_out: set[int]) -> None:
    """Without the small chunk between them two large ones are neighbours, and move one after the other."""
    chunks = plan_chunks([4 * elements for elements in UNEVEN], 1)
    arena, peak, done = updates_in(chunks, left_out)
    assert arena == 8 * (1024 + 512)
    assert peak <= arena
    assert done == 2 * [chunk.index for chunk in chunks if chunk.index not in left_out]


class Full(AdversarialStreams):
    """A device whose memory is gone while a forward runs, but for what the engine holds."""

    is_full = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("none left")
        return super().allocate(nbytes)


def trained(rank: int, streams: Full, optimizer_of: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    """Four steps, the second and third with a full device in their forward."""
    model = wrapped_mlp(init_device_mesh("cpu", (2,)), torch.device("cpu"), torch.bfloat16, 3, 64)
    optimizer = optimizer_of(model)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        streams.is_full = step in (1, 2)
        loss = model(torch.randn(4, 64, generator=generator))
        streams.is_full = False
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full_forwards(rank: int) -> tuple[list[str], int]:
    """Differences to plain AdamW where every other chunk finds no place in the forward, accesses that nothing orders,
    and what else is not as it must be; and how many chunks were said to be updated in host memory."""
    streams = Full({"in": "lazy", "update": "eager", "out": "lazy"})
    schedule = sharded.schedule_of("stream", lead=1, ahead=1, chunk_bytes=16 << 10)

    def offloaded(model: nn.Module) -> OffloadedAdamW:
        optimizer = OffloadedAdamW(
            model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule, streams=streams
        )
        engine: Any = optimizer._engine
        stage = engine.stage
        engine.stage = lambda chunk: None if streams.is_full and chunk.index % 2 else stage(chunk)
        return optimizer

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = trained(
            rank, Full(), lambda model: torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        )
        model, optimizer = trained(rank, streams, offloaded)
    wrong = sharded.differences(sharded.snapshot(*plain), sharded.snapshot(model, optimizer))
    moved = optimizer.ledger.in_bytes, optimizer.ledger.out_bytes
    wrong += ["moved"] * (moved != (4 * optimizer.bytes_per_step, 4 * optimizer.bytes_per_step))
    said = [str(one.message) for one in caught if "updated in host memory, which is slow" in str(one.message)]
    return wrong + streams.order.violations, len(said)


def test_a_forward_that_left_no_memory_has_state_updated_where_it_is() -> None:
    for wrong, said in on_ranks(2, full_forwards):
        assert wrong == []
        assert said >= 4


@pytest.mark.parametrize("reachable", [True, False])
def test_state_that_finds_no_memory_is_updated_at_home_if_the_device_reaches_it(
    monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    chunks, streams, done = plan_chunks([4096] * 4, 8192), Full(), []
    engine = FlowEngine(chunks, HostStore([8192] * 4), dataclasses.replace(stream(), lead=1), streams, Copier())
    monkeypatch.setattr(flow_memory, "is_reachable", lambda store: reachable)
    engine.step([Work(c, lambda state, c=c: done.append((c.index, state)), [torch.zeros(1024)], []) for c in chunks])
    streams.is_full, stage = True, engine.stage
    engine.stage = lambda chunk: None if chunk.index == 3 else stage(chunk)
    if not reachable:
        with pytest.raises(torch.OutOfMemoryError, match="none left"):
            engine.before_read([3])
        return
    with pytest.warns(
        UserWarning, match=r"no device memory for 0\.000 GiB of optimizer state: updated in host memory"
    ):
        engine.before_read([3])
    engine.drain()
    assert [index for index, _ in done] == [0, 1, 2, 3]
    assert engine._written_back[3] is engine._updated[3], "what reads the host's bytes waits for that"
    assert streams.order.violations == []
    assert engine.ledger.in_bytes == engine.ledger.out_bytes == 4 * 8192
