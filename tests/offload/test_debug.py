"""Debug mode: whoever reads a slot that was written back, and not filled again, finds NaN instead of old moments, and
whoever reads parameters before their update finds NaN instead of old weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.chunks import plan_chunks
from offbench.offload.copies import Copier
from offbench.offload.engine import Engine, Work
from offbench.offload.layout import local_of
from offbench.offload.staged import Staged
from offbench.offload.stale import Hidden
from offbench.offload.streams import DeviceStreams
from tests.offload import sharded, trainer
from tests.offload.test_engine import SCHEDULES
from tests.ranks import on_ranks

CPU = torch.device("cpu")
LOST = {"chunked": 5, "overlap": 5, "stream": 6}
"""The copy in that is left out, by schedule: somebody else has had its place in the same step, since there is room for
two neighbours. Of stream's copies only those count that go to the arena itself."""


class Remembering(DeviceStreams):
    """Knows the staging memory it handed out."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.handed_out: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.handed_out.append(super().allocate(nbytes).zero_())
        return self.handed_out[-1]

    def is_staging(self, tensor: torch.Tensor) -> bool:
        memory = tensor.untyped_storage().data_ptr()
        return memory in {arena.untyped_storage().data_ptr() for arena in self.handed_out}


def debugging(engine: Engine) -> None:
    engine.debug = True


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", LOST)
def test_a_slot_that_was_not_filled_again_is_nan(name: str, debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, moved_in = Remembering(), []

    class Forgetful(Copier):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            if streams.is_staging(target):
                moved_in.append(target)
                if len(moved_in) == LOST[name]:
                    return
            super().copy(target, source)

    monkeypatch.setattr(trainer, "Copier", Forgetful)
    result = trainer.run(SCHEDULES[name], streams, debugging if debug else None)
    assert len(moved_in) > LOST[name]
    assert not result.equals(trainer.plain())
    finite = all(bool(tensor.isfinite().all()) for tensor in result.parameters + result.moments)
    assert finite == (not debug)


def test_after_a_step_no_slot_holds_moments() -> None:
    streams = Remembering()
    trainer.run(SCHEDULES["chunked"], streams, debugging)
    for arena in streams.handed_out:
        assert bool(((arena == 0) | (arena == 255)).all())  # never used, or part of a NaN


def read_early(rank: int) -> dict[tuple[str, bool], tuple[bool, list[str]]]:
    """By arm and debug: whether weights read right after step(), without settled(), are finite, and what differs from
    plain AdamW at the end."""
    model = sharded.build(CPU)
    plain = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    sharded.train(model, plain, rank, CPU, steps=range(3))
    expected, found = sharded.snapshot(model, plain), {}
    for arm, debug in itertools.product(("overlap", "stream"), (False, True)):
        model = sharded.build(CPU)
        schedule, streams = sharded.schedule_of(arm, lead=1, ahead=1), AdversarialStreams({})
        optimizer = OffloadedAdamW(
            model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule, streams=streams, debug=debug
        )
        seen: list[bool] = []

        def look(step: int, seen: list[bool] = seen, model: torch.nn.Module = model) -> None:
            seen.append(all(bool(local_of(parameter).isfinite().all()) for parameter in model.parameters()))

        sharded.train(model, optimizer, rank, CPU, look, steps=range(3))
        with optimizer.settled():
            look(3)
        assert seen.pop()
        assert streams.order.violations == []
        found[arm, debug] = any(seen), sharded.differences(expected, sharded.snapshot(model, optimizer))
    return found


def test_weights_read_without_a_drain_are_nan() -> None:
    """prime-rl#4427, #4085: stale weights went to the inference workers, and nothing said so."""
    (found,) = on_ranks(1, read_early)
    assert found == {(arm, debug): (not debug, []) for arm in ("overlap", "stream") for debug in (False, True)}


def test_a_step_that_fails_half_way_leaves_what_was_updated() -> None:
    """Whatever of it ran is done; the rest is as it was before the step."""
    (chunk,) = plan_chunks([64], 1)
    parameters = [torch.full((4,), 1.0), torch.full((4,), 2.0)]
    hidden = Hidden(DeviceStreams(CPU))
    works = [
        hidden.hide(Work(chunk, lambda state, p=p: p.mul_(10), gradients=[], parameters=[p]))  # type: ignore[misc]
        for p in parameters
    ]
    assert all(bool(parameter.isnan().all()) for parameter in parameters)
    works[0].update(Staged.whole(torch.empty(64, dtype=torch.uint8)))
    hidden.put_back()
    assert [parameter.tolist() for parameter in parameters] == [[10.0] * 4, [2.0] * 4]
