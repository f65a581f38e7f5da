"""torch.distributed.checkpoint: saved on some ranks with updates pending, loaded on others, continued bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from offbench.offload.adversary import AdversarialStreams
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def make(arm: str, model: nn.Module) -> torch.optim.Optimizer:
    if arm == "plain":
        return torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    return sharded.optimizer_of(arm, model, AdversarialStreams({}))


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole parameters and moments by name, whatever the sharding."""
    if hasattr(optimizer, "drain"):
        optimizer.drain()
    found = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        for kind, tensor in (("p", p), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
            found[f"{kind} {name}"] = tensor.full_tensor().detach().clone()
        found[f"step {name}"] = state["step"].detach().clone()
    return found


def save(rank: int, arm: str, folder: str) -> dict[str, torch.Tensor]:
    model = sharded.build(CPU)
    optimizer = make(arm, model)
    sharded.train(model, optimizer, rank, CPU, steps=range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return full(model, optimizer)


@dataclass(frozen=True)
class Checkpoint:
    folder: str
    content: dict[str, torch.Tensor]
    """Whole, as `full` gathers it."""

    @functools.cached_property
    def continued(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """As plain AdamW loads it on two ranks, and where three more steps lead."""
        return on_ranks(2, load, "plain", self.folder)[0]


def load(rank: int, arm: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the loaded job holds, and where three more steps lead."""
    model = sharded.build(CPU)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(7)
    optimizer = make(arm, model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = full(model, optimizer)
    sharded.train(model, optimizer, rank, CPU, steps=range(3, 6))
    return loaded, full(model, optimizer)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """By arm, its checkpoint of two ranks: each is saved once for all tests."""

    @functools.cache
    def saved_by(arm: str) -> Checkpoint:
        folder = str(tmp_path_factory.mktemp(arm))
        return Checkpoint(folder, on_ranks(2, save, arm, folder)[0])

    return saved_by


@pytest.mark.parametrize(
    ("source", "target", "world"),
    [("overlap", "overlap", 2), ("stream", "stream", 2), ("stream", "chunked", 4), ("chunked", "overlap", 1),
     ("overlap", "stream", 4), ("stream", "plain", 2), ("plain", "overlap", 2), ("plain", "main", 4)],
)  # fmt: skip
def test_saved_on_two_ranks_loaded_on_others(
    source: str, target: str, world: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    saved = checkpoint(source)
    loaded, continued = on_ranks(world, load, target, saved.folder)[0]
    assert sharded.differences(saved.content, loaded) == []
    if world == 2:  # at another world size the data differs, and so do the sums of gradients
        expected, reached = saved.continued
        assert sharded.differences(saved.content, expected) == []
        assert sharded.differences(reached, continued) == []


def resharded_matches_plain(rank: int, folder: str) -> list[str]:
    expected = load(rank, "plain", folder)[1]
    results = {arm: load(rank, arm, folder)[1] for arm in ("overlap", "stream", "chunked")}
    return [f"{arm}: {name}" for arm, found in results.items() for name in sharded.differences(expected, found)]


def test_continuation_after_resharding_equals_plain(checkpoint: Callable[[str], Checkpoint]) -> None:
    assert on_ranks(4, resharded_matches_plain, checkpoint("overlap").folder) == [[]] * 4


def asynchronous(rank: int, arm: str, folder: str) -> list[str]:
    """Start an asynchronous save with updates pending, train on at once, then read what was saved."""
    model = sharded.build(CPU)
    optimizer = make(arm, model)
    sharded.train(model, optimizer, rank, CPU, steps=range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    at_save = full(model, optimizer)
    group = dist.new_group()  # the saving thread must not share a group with training
    saved = {"model": model_state, "optimizer": optimizer_state}
    future = dcp.async_save(saved, checkpoint_id=folder, process_group=group)
    sharded.train(model, optimizer, rank, CPU, steps=range(3, 6))
    optimizer.drain()
    future.result()
    other = sharded.build(CPU)
    second = make("chunked", other)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, second), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return sharded.differences(at_save, full(other, second))


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_an_asynchronous_save_holds_the_step_it_was_taken_at(arm: str, tmp_path: Path) -> None:
    assert on_ranks(2, asynchronous, arm, str(tmp_path)) == [[], []]


def placement(rank: int) -> list[bool]:
    model = sharded.build(CPU)
    optimizer = make("overlap", model)
    sharded.train(model, optimizer, rank, CPU, steps=range(1))
    state = optimizer.state_dict()
    full_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))[1]
    moments = [s["exp_avg"] for s in state["state"].values()]
    return [
        all(isinstance(m, DTensor) for m in moments),
        all(m.shape == p.shape for m, p in zip(moments, model.parameters(), strict=True)),
        bool(full_state) == (rank == 0),
        dist.get_world_size() == 2,
    ]


def test_moments_are_saved_as_shards_not_as_copies() -> None:
    assert on_ranks(2, placement) == [[True] * 4] * 2


FORMS = {
    "whole on rank 0, broadcast": (
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
    "flat names, as torchtitan saves": (StateDictOptions(flatten_optimizer_state_dict=True),) * 2,
}
"""Options to get and to set a state_dict with."""


def handed_over(rank: int, form: str) -> list[str]:
    """Got with updates pending, set in another job, and both trained on."""
    getting, setting = FORMS[form]
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of("overlap", model, AdversarialStreams({}), lead=1, ahead=0)
    sharded.train(model, optimizer, rank, CPU, steps=range(3))
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=getting))
    assert bool(weights) == bool(state) == (rank == 0 or not getting.full_state_dict)
    other = sharded.build(CPU)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7)
    second = sharded.optimizer_of("stream", other, AdversarialStreams({}), lead=1, ahead=0)
    set_model_state_dict(other, weights, options=setting)
    set_optimizer_state_dict(other, second, state, options=setting)
    for net, trained in ((model, optimizer), (other, second)):
        sharded.train(net, trained, rank, CPU, steps=range(3, 6))
    return sharded.differences(sharded.snapshot(model, optimizer), sharded.snapshot(other, second))


@pytest.mark.parametrize("form", FORMS)
def test_a_state_handed_over_in_each_form_continues_bit_for_bit(form: str) -> None:
    assert on_ranks(2, handed_over, form) == [[], []]


def test_a_state_dict_loads_with_weights_only(tmp_path: Path) -> None:
    schedule = dataclasses.replace(sharded.schedule_of("chunked"), chunk_bytes=1 << 12)
    net = nn.Linear(8, 8)
    from offbench.offload import OffloadedAdamW

    optimizer = OffloadedAdamW(net.parameters(), schedule=schedule)
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    torch.optim.AdamW(net.parameters()).load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
