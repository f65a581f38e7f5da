"""State that moves in during the backward: only into memory that is free then, and never a stale byte of it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from offbench.offload import OffloadedAdamW, meanwhile
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.allowance import Allowance
from offbench.offload.copies import Copier
from offbench.offload.engine import Engine
from offbench.offload.extents import Extents
from offbench.offload.flow import FlowEngine
from offbench.offload.hoststore import HostStore
from offbench.offload.streams import DeviceStreams, Why
from tests.offload import sharded, trainer
from tests.offload.falling import Falling
from tests.offload.test_flow import PARAMETERS, lengths, many, stream
from tests.offload.test_meanwhile import Passes
from tests.ranks import on_ranks

__all__ = ["many"]

CPU = torch.device("cpu")
SMALL = dataclasses.replace(stream(), chunk_bytes=1, lead=1, ahead=2)
"""Each parameter is a chunk."""
STATE = sum(2 * -(-4 * n // 512) * 512 for n in trainer.SIZES)


PACES = [
    dict(zip(("in", "update", "out", "compute"), paces, strict=True))
    for paces in itertools.product(("lazy", "eager"), repeat=4)
]


def books(engine: Engine) -> tuple[int, int]:
    """Bytes moved in and used, and out."""
    return engine.ledger.in_bytes, engine.ledger.out_bytes


@pytest.mark.parametrize("activations", [500, 1000, 4000, 6000, 7200, 9000, 20000])
def test_state_moves_in_early_only_where_activations_leave_room_for_it(many: int, activations: int) -> None:
    streams, engine = lengths([activations] * 6)
    assert streams.ahead[0] == 0, "nothing is known yet"
    left = activations - activations // 24 - many  # the loss is not counted
    assert streams.ahead[1:] == [max(0, left // 1024) * 1024] * 5
    assert max(streams.held) <= PARAMETERS + max(many, activations) + engine._allowance.arena_bytes
    assert books(engine) == (6 * 24 * 1024, 6 * 24 * 1024)
    assert engine.ledger.dropped_bytes == 0


@pytest.mark.parametrize("activations", [9000, 20000])
def test_the_loss_finds_no_state_that_was_there_before_step(
    many: int, activations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the host is ahead of the device: memory is handed out when a kernel is queued, not when it runs."""
    monkeypatch.setattr(Extents, "passed", staticmethod(lambda extent: False))
    streams, engine = lengths([activations] * 6)
    assert all(streams.ahead[1:])
    assert not any(streams.lent)
    assert max(streams.held) <= PARAMETERS + max(many, activations) + engine._allowance.arena_bytes + many // 12
    assert books(engine) == (6 * 24 * 1024, 6 * 24 * 1024)


def test_the_last_gather_returns_what_nothing_else_asked_for(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where backward's layers begin with more than the forward's: by the count there is room."""
    monkeypatch.setattr(Extents, "passed", staticmethod(lambda extent: False))
    monkeypatch.setattr(Allowance, "loan_is_due", lambda *_: False)
    monkeypatch.setattr(Allowance, "is_crowded", lambda *_, **__: False)
    streams, _ = lengths([20000] * 6)
    assert all(streams.ahead[1:])
    assert not any(streams.lent)


def test_after_a_long_batch_short_ones_leave_more_room(many: int) -> None:
    streams, engine = lengths([9000, 9000, 2000, 2000, 9000, 14000])
    assert streams.ahead[2:5] == [streams.ahead[1]] * 3, "gradients are there at the end of every backward"
    for step, held in enumerate(streams.held):
        most = PARAMETERS + max([many, *streams.activations[: step + 1]])
        assert held <= most + engine._allowance.arena_bytes + many // 12, f"step {step}"


@pytest.mark.parametrize("passes", [1, 2])
def test_the_arena_fills_when_the_last_backward_ends(many: int, passes: int) -> None:
    """While gradients are clipped; step() takes the rest of the arena and no more."""
    streams, engine = lengths([1000] * 6, staging=4500, passes=[passes] * 6)
    assert streams.early == [0] + [4 * 1024] * 5
    assert [chunks[0] for chunks in streams.arenas[:-1]] == [4500] * 5
    assert max(streams.held) <= PARAMETERS + many + (passes - 1) * 1000 + 4500 + many // 12
    assert engine.ledger.dropped_bytes == 0, "nobody drains between a backward and its step()"
    assert books(engine) == (6 * 24 * 1024, 6 * 24 * 1024)


def test_an_arena_filled_for_nothing_is_given_back(many: int) -> None:
    """The second step is taken to have one pass, as the first; there it has two, and later ones have two again."""
    streams, engine = lengths([1000] * 6, staging=4500, passes=[1, 2, 2, 1, 2, 2])
    assert streams.early == [0, 0, 4 * 1024, 0, 0, 4 * 1024]
    assert max(streams.held) <= PARAMETERS + many + 1000 + 4500 + many // 12
    assert engine.ledger.dropped_bytes == 2 * 4 * 1024
    assert books(engine) == (6 * 24 * 1024, 6 * 24 * 1024)


def test_with_gradient_accumulation_only_the_last_backward_moves_state_in(many: int) -> None:
    streams, engine = lengths([4000] * 6, passes=[3] * 6)
    assert streams.ahead[0] == 0
    assert streams.ahead[1:] == [3 * 1024] * 5, "as much as the activations that are gone"
    assert max(streams.held) <= PARAMETERS + many + 4000 + engine._allowance.arena_bytes
    assert engine.ledger.dropped_bytes == 0
    assert books(engine) == (6 * 24 * 1024, 6 * 24 * 1024)


def test_a_pass_that_was_not_expected_gets_its_memory(many: int) -> None:
    passes = [2, 2, 4, 1, 2, 2]
    streams, engine = lengths([4000] * 6, passes=passes)
    assert max(streams.held) <= PARAMETERS + many + 4000 + engine._allowance.arena_bytes + many // 12
    assert engine.ledger.dropped_bytes > 0
    assert streams.ahead[1] > 0 == streams.ahead[2]
    assert streams.ahead[5] > 0, "it goes on"
    assert books(engine) == (6 * 24 * 1024, 6 * 24 * 1024)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Falling, Why.ARENA_READY), (Falling, Why.HOST_CURRENT), (AdversarialStreams, Why.ARENA_READY)],
    ids=["lent", "host", "arena"],
)
def test_each_wait_of_a_copy_made_early_is_needed(kind: type[AdversarialStreams], why: Why) -> None:
    """Only where the copy is queued: step() makes waits for the same reasons."""
    results = []
    for paces in PACES:
        streams = kind(paces)

        def watch(engine: Any, streams: AdversarialStreams = streams) -> None:
            if isinstance(streams, Falling):
                streams.watch(engine)
            ahead = engine.prefetch
            for name in ("_borrow", "_fill_arena"):
                fill = getattr(ahead, name)

                def spy(*args: Any, fill: Callable[..., None] = fill) -> None:
                    streams.drop = why
                    fill(*args)
                    streams.drop = None

                setattr(ahead, name, spy)

        results.append(trainer.run(SMALL, streams, watch).equals(trainer.plain()))
        assert streams.order.violations
    assert not all(results)


@pytest.mark.parametrize("what", ["a chunk without gradient", "a drain", "a late drain", "a step without gradients"])
def test_a_copy_that_nobody_takes_is_dropped(what: str) -> None:
    left_out = {2: 0, 3: 4} if what == "a chunk without gradient" else None
    changed: list[int] = []

    def meanwhile(engine: Any, step: int) -> None:
        if step == 2 and what == "a drain":
            copies = [one.loaded for one in engine.prefetch._held]
            engine.drain()
            assert all(event.passed for event in copies)
            assert len(copies) == len(trainer.SIZES)
        if step == 2 and what == "a step without gradients":
            engine.step([])
        if step == 2:
            changed.append(engine._allowance.ahead_bytes)

    for paces in PACES:
        streams = Falling(paces)
        engines: list[Any] = []

        def watch(engine: Any, streams: Falling = streams, engines: list[Any] = engines) -> None:
            streams.watch(engine)
            engines.append(engine)
            if what == "a late drain":  # between two layers' backwards, with copies under way
                before = engine.before_backward

                def drained(chunks: Any) -> None:
                    before(chunks)
                    if chunks == [1]:
                        engine.drain()

                engine.before_backward = drained

        result = trainer.run(SMALL, streams, watch, left_out=left_out, meanwhile=meanwhile)
        assert result.equals(trainer.plain(left_out)), paces
        assert streams.order.violations == []
        (engine,) = engines
        assert engine.ledger.dropped_bytes > 0
        assert engine._allowance.ahead_bytes == 0
        moved = trainer.STEPS * STATE - sum(2 * 4 * trainer.SIZES[i] for i in (left_out or {}).values())
        assert books(engine)[0] == books(engine)[1]
        assert books(engine)[0] == moved if left_out is None else books(engine)[0] < trainer.STEPS * STATE
    assert bool(changed[0]) == (what in {"a chunk without gradient", "a late drain"})


@pytest.mark.parametrize("seed", range(40))
def test_no_mixture_of_passes_drains_and_memory_changes_a_bit(seed: int) -> None:
    rng = random.Random(seed)
    steps = range(trainer.STEPS)
    paces = {name: rng.choice(["lazy", "eager", "random"]) for name in ("in", "update", "out", "compute")}
    streams = Falling(paces, seed=seed, layer=rng.choice([700, 1200, 3000, 6000, 1 << 20]))
    options = {"lead": rng.choice([1, 3, 99]), "ahead": rng.choice([0, 2]), "resident_bytes": rng.choice([0, 2048])}
    left_out = {step: rng.randrange(len(trainer.SIZES)) for step in steps if rng.random() < 0.4}
    engines: list[Any] = []

    def watch(engine: Any) -> None:
        engines.append(engine)
        make_room = engine._make_room
        streams.watch(engine)
        if rng.random() < 0.5:
            engine._make_room = make_room
        before = engine.before_backward

        def disturbed(chunks: Any) -> None:
            before(chunks)
            if rng.random() < 0.04:
                engine.drain()
            if rng.random() < 0.1:
                streams._own = rng.choice([1 << 20, 1 << 31])

        engine.before_backward = disturbed

    def meanwhile(engine: Any, step: int) -> None:
        happens = [lambda: engine.step([]), lambda: engine.extend(engine.chunks, schedule), engine.drain]
        rng.choice([lambda: None] * 7 + happens)()

    passes = [rng.choice([1, 1, 1, 2, 3]) for _ in steps]
    schedule = dataclasses.replace(SMALL, **options)
    assert trainer.run(schedule, streams, watch, passes, left_out, meanwhile).equals(trainer.plain(left_out))
    assert streams.order.violations == []
    (engine,) = engines
    assert books(engine)[0] == books(engine)[1]
    assert engine._allowance.staged_bytes == 0


def test_memory_of_a_dropped_copy_goes_back_when_the_copy_has_ended() -> None:
    streams = Falling({"compute": "lazy"})

    def watch(engine: Any) -> None:
        streams.watch(engine)
        drop = engine.prefetch._drop

        def spy(one: Any) -> None:
            streams.drop = Why.WRITTEN_BACK
            drop(one)
            streams.drop = None

        engine.prefetch._drop = spy

    trainer.run(SMALL, streams, watch, meanwhile=lambda engine, step: engine.drain())
    assert streams.order.violations


def test_what_is_there_when_the_backward_ends_is_in_the_books() -> None:
    streams = Falling()
    seen: list[tuple[int, int, int]] = []
    engines: list[Any] = []

    def watch(engine: Any) -> None:
        streams.watch(engine)
        engine.ledger.keep = True
        engines.append(engine)

    def meanwhile(engine: Any, step: int) -> None:
        streams.compute().run(lambda: None)
        at = streams.compute().record().clock["compute"]
        seen.append((at, engine._allowance.staged_bytes, engine._allowance.ahead_bytes))

    trainer.run(SMALL, streams, watch, meanwhile=meanwhile)
    arenas = [(a.begin.clock["compute"], a.end.clock["compute"], a.nbytes) for a in engines[0].ledger.arenas]
    for at, staged, ahead in seen[1:]:
        assert sum(nbytes for begin, end, nbytes in arenas if begin < at <= end) == staged >= ahead > 0


@pytest.mark.parametrize("waits", [False, True])
def test_step_updates_all_that_is_there_and_as_much_of_the_rest_as_ever(waits: bool) -> None:
    """Where the host waits for the device in every layer, a step that finds nothing there updates one chunk and leaves
    the rest."""
    streams = Falling(layer=600)
    updated: list[int] = []

    def watch(engine: Any) -> None:
        streams.watch(engine)
        update, step, before_read = engine._update, engine.step, engine.before_read

        def spy_read(*args: Any, **kwargs: Any) -> Any:
            if waits:
                meanwhile.wait(Passes(1))
            return before_read(*args, **kwargs)

        def spy_update(*args: Any) -> Any:
            updated[-1] += 1
            return update(*args)

        def spy_step(works: Any) -> None:
            engine._finish()
            updated.append(0)
            if waits:
                meanwhile.wait(Passes(1))
            step(works)
            updated.append(0)

        engine._update, engine.step, engine.before_read = spy_update, spy_step, spy_read

    trainer.run(dataclasses.replace(SMALL, lead=3), streams, watch)
    assert streams.ahead[:2] == [0, 1024 + 2048], "two chunks"
    assert updated[0:4:2] == [1 if waits else 3, 2 + 3]


@pytest.mark.parametrize("out", ["lazy", "eager"])
def test_a_forward_that_needs_the_memory_gets_it_at_once(out: str) -> None:
    streams = Falling({"out": out}, layer=1200)
    kept: list[int] = []
    left: list[int] = []

    def watch(engine: Any) -> None:
        streams.watch(engine)
        step, read = engine.step, engine.before_read

        def spy_step(works: Any) -> None:
            step(works)
            kept.append(sum(extent.nbytes for extent in engine._step.lent))
            streams._own = 4 << 30  # more than ever before

        def spy_read(chunks: Any) -> Any:
            found = read(chunks)
            if streams._own == 4 << 30:
                assert engine._step.lent == []
                left.append(len(engine._step.waiting))
            return found

        engine.step, engine.before_read = spy_step, spy_read

    assert trainer.run(SMALL, streams, watch).equals(trainer.plain())
    assert streams.order.violations == []
    assert 0 < kept[1] < STATE
    assert any(left), "before all is queued"


def test_gradients_that_a_failed_backward_took_along_are_to_come_again() -> None:
    def meanwhile(engine: Any, step: int) -> None:
        seen = []
        for there in (False, True, False):
            engine.has_gradients = lambda chunk, there=there: there
            seen.append(engine.prefetch._coming())
        assert seen == ([STATE // 2, 0, STATE // 2] if step else [0, 0, 0])

    streams = Falling()
    trainer.run(SMALL, streams, streams.watch, meanwhile=meanwhile)


def test_an_arena_beside_state_that_is_there_is_as_much_smaller(many: int) -> None:
    streams, engine = lengths([4000] * 6, staging=5000, passes=[3] * 6)
    least, most = 2 * 1024, many - 4000
    assert engine._allowance.arena_bytes == most
    assert streams.arenas[2][0] == max(least, most - streams.ahead[1]) == least


def test_where_the_allocator_has_no_memory_in_one_piece_it_is_not_asked_again() -> None:
    streams = Falling()
    asked = []

    def watch(engine: Any) -> None:
        streams.watch(engine)
        borrow, allocate = engine.prefetch._borrow, streams.allocate

        def refuse(nbytes: int) -> torch.Tensor:
            asked.append(nbytes)
            raise torch.OutOfMemoryError

        def spy(room: int) -> None:
            streams.allocate = refuse  # type: ignore[method-assign]
            borrow(room)
            streams.allocate = allocate  # type: ignore[method-assign]

        engine.prefetch._borrow = spy

    assert trainer.run(SMALL, streams, watch).equals(trainer.plain())
    assert len(asked) == 1
    assert not any(streams.ahead)


def test_memory_of_an_engine_that_is_dropped_waits_for_no_garbage_collector() -> None:
    gc.disable()
    try:
        engine = FlowEngine((), HostStore([]), SMALL, AdversarialStreams(), Copier())
        gone = weakref.ref(engine)
        del engine
        assert gone() is None
    finally:
        gc.enable()


def interrupted(
    model: nn.Module, optimizer: Any, rank: int, meanwhile: Callable[[float], None] = lambda step: None
) -> dict[str, Any]:
    """STEPS steps; between backward and step() of the fourth, moments twice those after the first are loaded."""
    for step in range(sharded.STEPS):
        meanwhile(step - 0.5)
        x = torch.randn(4, sharded.WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).backward()
        meanwhile(step)
        state = optimizer.state_dict() if step in {1, 3} else {}
        if step == 1:
            doubled = {i: {name: 2 * v for name, v in moments.items()} for i, moments in state["state"].items()}
        if step == 3:
            optimizer.load_state_dict(state | {"state": doubled})
        optimizer.step()
        optimizer.zero_grad()
    return sharded.snapshot(model, optimizer)


BUDGETS = {2: 2 << 20, 4.5: 3 << 20}
"""After so many steps; at 2 a backward is done, too."""


def changing(rank: int) -> tuple[list[str], list[int], int]:
    """What differs from torch's AdamW, what had moved in before each step(), and the bytes dropped."""
    model = sharded.build(CPU)
    plain = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    expected = interrupted(model, plain, rank)
    model = sharded.build(CPU)
    streams = Falling({"in": "eager"}, layer=1 << 20)
    optimizer = sharded.optimizer_of("stream", model, streams, lead=2, ahead=1)
    streams.watch(optimizer._engine)
    optimizer._watch(optimizer._engine)
    seen = []

    def meanwhile(step: float) -> None:
        if step in range(sharded.STEPS):
            seen.append(optimizer._engine._allowance.ahead_bytes)
        if step in BUDGETS:
            optimizer.set_state_budget(BUDGETS[step])

    found = interrupted(model, optimizer, rank, meanwhile)
    dropped = optimizer.ledger.dropped_bytes
    return sharded.differences(expected, found) + streams.order.violations, seen, dropped


def test_state_loaded_or_moved_between_backward_and_step_is_never_an_early_copy() -> None:
    for wrong, seen, dropped in on_ranks(2, changing):
        assert wrong == []
        assert dropped == sum(seen[1:4]), "by a save, a budget, and a load; what a budget keeps did not move in again"
        assert [ahead > 0 for ahead in seen] == [False, True, True, True, True, False]


class Checkpointed(nn.Module):
    """Blocks that compute their forward again, with a group nested in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3))
        for block in self.blocks:
            fully_shard(block[1])
            fully_shard(block)
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def told(rank: int) -> tuple[int, list[str], list[int]]:
    """Chunks, what the engine hears of the ends of three backwards, one of which fails, and how many chunks had
    gradients when each layer's began."""
    net = Checkpointed()
    schedule = dataclasses.replace(stream(), chunk_bytes=1)
    optimizer = OffloadedAdamW(net.parameters(), schedule=schedule, model=net, streams=DeviceStreams(CPU))
    engine: Any = optimizer._engine
    heard: list[str] = []
    there: list[int] = []
    count = len(engine.chunks)
    before = engine.before_backward

    def before_backward(chunks: Any) -> None:
        there.append(sum(engine.has_gradients(chunk) for chunk in range(count)))
        before(chunks)

    engine.before_backward = before_backward
    engine.after_backward = lambda: heard.append(f"{sum(engine.has_gradients(c) for c in range(count))} of {count}")
    optimizer._watch(engine)
    x = torch.ones(2, 16, requires_grad=True)
    for attempt in range(3):
        out = net(x).square().mean()
        if attempt == 1:
            out = Failing.apply(out)
        try:
            out.backward()
        except ValueError:
            heard.append("failed")
    optimizer.step()
    return count, heard, there


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError


def test_the_end_of_a_backward_is_told_once_when_all_gradients_are_there() -> None:
    for count, heard, there in on_ranks(2, told):
        assert heard == [f"{count} of {count}", "failed", f"{count} of {count}"]
        assert there[0] == 0
        assert there == sorted(there)
        assert 0 < there[4] < there[-1] == count
