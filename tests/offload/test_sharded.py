"""Every arm against torch.optim.AdamW on FSDP2, bit for bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.streams import Why
from offbench.verify.trainees import Mlp, wrapped_mlp
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")
ARMS = {
    "none": {},
    "main": {},
    "chunked": {},
    "chunked whole": {"first_step": "whole"},
    "overlap": {"slots": 2, "lead": 2, "ahead": 1},
    "overlap wide": {"slots": 8, "lead": 8, "ahead": 4},
    "overlap pieces": {"pieces": 4, "slots": 1, "lead": 1, "ahead": 0},
    "overlap resident": {"slots": 2, "lead": 2, "ahead": 1, "state_budget": 2 << 20},
    "stream": {"lead": 2, "ahead": 1, "staging_bytes": 2 << 20},
    "stream resident": {"lead": 2, "ahead": 1, "staging_bytes": 2 << 20, "state_budget": 2 << 20, "pieces": 4},
    "stream no growth": {"lead": 8, "ahead": 4, "staging_bytes": 2 << 20, "loss_bytes": 2 << 20},
    "stream wide": {"lead": 99, "staging_bytes": 8 << 20},
    "stream retiring": {"lead": 2, "ahead": 1, "staging_bytes": 0, "loss_bytes": 6 << 20},
    "zerocopy": {"lead": 2, "ahead": 1},
    "zerocopy resident": {"lead": 1, "ahead": 0, "state_budget": 2 << 20},
    "overlap whole": {"slots": 3, "lead": 1, "ahead": 0, "first_step": "whole"},
}


CUT = {
    "chunked cut": {"chunk_bytes": 100 << 10, "slots": 2},
    "overlap cut": {"chunk_bytes": 100 << 10, "slots": 2, "lead": 4, "ahead": 4},
    "stream cut": {"chunk_bytes": 100 << 10, "staging_bytes": 0, "lead": 4, "ahead": 4},
    "stream cut resident": {"chunk_bytes": 100 << 10, "lead": 4, "ahead": 4, "state_budget": 2 << 20},
    "zerocopy cut": {"chunk_bytes": 100 << 10, "lead": 4, "ahead": 4},
}
"""Every matrix in pieces."""


def reference(rank: int, device: torch.device = CPU, steps: range = range(sharded.STEPS)) -> dict[str, torch.Tensor]:
    model = sharded.build(device)
    optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    sharded.train(model, optimizer, rank, device, steps=steps)
    return sharded.snapshot(model, optimizer)


def paces_of(label: str) -> list[tuple[str, ...]]:
    """All paces of in, update and out for one variant of each engine, a quarter of them, in turn, for the others."""
    every = list(itertools.product(("lazy", "eager"), repeat=3))
    turn = list(ARMS).index(label) % 4
    return every if label in {"overlap", "stream"} else [every[turn], every[7 - turn]]


FEWER = range(4)
"""Steps of so many runs: the first, the first that knows what a step takes, and two like all that follow."""


def compare_all(rank: int) -> dict[str, list[str]]:
    expected = reference(rank, steps=FEWER)
    found = {}
    for label, options in ARMS.items():
        for in_, update, out in paces_of(label):
            streams = AdversarialStreams({"in": in_, "update": update, "out": out})
            model = sharded.build(CPU, prefetch=out == "lazy")
            optimizer = sharded.optimizer_of(label.split()[0], model, streams, **options)
            sharded.train(model, optimizer, rank, CPU, steps=FEWER)
            wrong = sharded.differences(expected, sharded.snapshot(model, optimizer))
            found[f"{label} {in_} {update} {out}"] = wrong + streams.order.violations
    return found


def test_every_arm_equals_plain_adamw_on_two_ranks() -> None:
    for result in on_ranks(2, compare_all):
        assert len(result) == 2 * len(ARMS) + 12
        assert {name: wrong for name, wrong in result.items() if wrong} == {}


def dropped_reads(rank: int, arm: str) -> int:
    expected = reference(rank)
    streams = AdversarialStreams({}, drop=Why.READ)
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of(arm, model, streams, **ARMS[arm])
    sharded.train(model, optimizer, rank, CPU)
    return len(sharded.differences(expected, sharded.snapshot(model, optimizer)))


@pytest.mark.parametrize("arm", ["overlap", "stream"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_gather_that_does_not_wait_changes_values(world: int, arm: str) -> None:
    """On one rank FSDP2 reads in wait_for_unshard, on two in unshard: both wrappers are needed."""
    assert all(wrong > 0 for wrong in on_ranks(world, dropped_reads, arm))


def one_rank(rank: int, arm: str) -> list[str]:
    expected = reference(rank)
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **ARMS[arm])
    sharded.train(model, optimizer, rank, CPU)
    return sharded.differences(expected, sharded.snapshot(model, optimizer))


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_deferred_updates_equal_plain_adamw_on_a_mesh_of_one(arm: str) -> None:
    assert on_ranks(1, one_rank, arm) == [[]]


def replicated(rank: int) -> dict[str, list[str]]:
    """HSDP: two replicas of two shards; gradients are reduced over both dimensions of the mesh."""

    def run(arm: str | None) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = wrapped_mlp(mesh, CPU, torch.bfloat16, 3, sharded.WIDTH)
        if arm is None:
            optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **ARMS[arm])
        sharded.train(model, optimizer, rank, CPU)
        return sharded.snapshot(model, optimizer)

    expected = run(None)
    return {arm: sharded.differences(expected, run(arm)) for arm in ("main", "chunked", "overlap", "stream")}


def test_replicas_of_shards_equal_plain_adamw() -> None:
    assert on_ranks(4, replicated) == [{"main": [], "chunked": [], "overlap": [], "stream": []}] * 4


def on_several_meshes(rank: int) -> dict[str, list[str]]:
    """As expert parallelism with replicas nests them: a part of each block is replicated and sharded, on a mesh of its
    own, inside blocks that are sharded over all ranks."""

    def run(arm: str | None) -> dict[str, torch.Tensor]:
        world, pairs = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        torch.manual_seed(7)
        model = Mlp(3, sharded.WIDTH)
        for block in model.blocks:
            fully_shard(block.down, mesh=pairs)
            fully_shard(block, mesh=world)
        fully_shard(model, mesh=world)
        if arm is None:
            optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **ARMS[arm])
        for step in range(3):  # no clipping: torch adds up no norms over two meshes
            x = torch.randn(4, sharded.WIDTH, generator=torch.Generator().manual_seed(4 * step + rank))
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sharded.snapshot(model, optimizer)

    expected = run(None)
    return {arm: sharded.differences(expected, run(arm)) for arm in ("chunked", "overlap", "stream")}


def test_a_model_on_several_meshes_equals_plain_adamw() -> None:
    assert on_ranks(4, on_several_meshes) == [{"chunked": [], "overlap": [], "stream": []}] * 4


def replicated_only(rank: int) -> dict[str, list[str]]:
    """torch's composable `replicate`: FSDP2's groups on a mesh that shards nothing."""

    def run(arm: str | None) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
        model = Mlp(3, sharded.WIDTH)
        for block in model.blocks:
            replicate(block, mesh=mesh)
        replicate(model, mesh=mesh)
        if arm is None:
            optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **ARMS[arm])
        sharded.train(model, optimizer, rank, CPU, steps=range(3))
        return sharded.snapshot(model, optimizer)

    torch.manual_seed(7)
    state = torch.get_rng_state()
    expected = run(None)
    found = {}
    for arm in ("overlap", "stream"):
        torch.set_rng_state(state)
        found[arm] = sharded.differences(expected, run(arm))
    return found


def test_replicas_alone_equal_plain_adamw() -> None:
    assert on_ranks(2, replicated_only) == [{"overlap": [], "stream": []}] * 2


def half_evaluated(rank: int) -> list[str]:
    """Under inference_mode, an evaluation of some blocks queues some updates; the next training forward the others."""
    snapshots = []
    for arm in (None, "stream"):
        model = sharded.build(CPU)
        if arm is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, None, **ARMS[arm])

        def between(step: int, model: nn.Module = model) -> None:
            with torch.inference_mode():
                model.blocks[3](model.blocks[2](torch.ones(4, sharded.WIDTH)))

        sharded.train(model, optimizer, rank, CPU, between, range(3))
        snapshots.append(sharded.snapshot(model, optimizer))
    return sharded.differences(*snapshots)


def test_an_evaluation_in_inference_mode_takes_over_memory_for_training_too() -> None:
    assert on_ranks(1, half_evaluated) == [[]]


def state_dicts(rank: int) -> dict[str, list[str]]:
    """Train 3 steps, save while updates are pending, load into the other optimizer, train 3 more."""
    expected = reference(rank)
    found = {}
    for source, target in (
        ("overlap", "plain"), ("plain", "overlap"), ("stream", "plain"), ("plain", "stream"), ("overlap", "stream"),
        ("stream", "chunked"), ("none", "overlap"),
    ):  # fmt: skip
        model = sharded.build(CPU)

        def make(name: str, model: nn.Module = model) -> torch.optim.Optimizer:
            if name == "plain":
                return torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
            return sharded.optimizer_of(name, model, AdversarialStreams({}))

        first = make(source)
        sharded.train(model, first, rank, CPU, steps=range(3))
        saved = copy.deepcopy(first.state_dict())  # at once: what was pending would still reach the host tensors
        if isinstance(first, OffloadedAdamW):
            first.detach()
        second = make(target)
        second.load_state_dict(saved)
        sharded.train(model, second, rank, CPU, steps=range(3, 6))
        found[f"{source} -> {target}"] = sharded.differences(expected, sharded.snapshot(model, second))
    return found


def test_state_dicts_go_both_ways() -> None:
    for result in on_ranks(2, state_dicts):
        assert {name: wrong for name, wrong in result.items() if wrong} == {}


def model_state_dict(rank: int, part: str, arm: str) -> tuple[int, list[str]]:
    expected = reference(rank)
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}))
    sharded.train(model, optimizer, rank, CPU)
    saved = model.get_submodule(part).state_dict(prefix=f"{part}." if part else "")  # nobody drained: the hook does
    return len(saved), [name for name, p in saved.items() if not torch.equal(p.to_local(), expected[f"p {name}"])]


@pytest.mark.parametrize("arm", ["overlap", "stream"])
@pytest.mark.parametrize(("part", "tensors"), [("", 14), ("blocks.5", 2)], ids=["model", "block"])
def test_a_state_dict_of_the_model_or_of_a_part_drains_first(part: str, tensors: int, arm: str) -> None:
    assert on_ranks(2, model_state_dict, part, arm) == [(tensors, [])] * 2


def unmanaged(rank: int, arm: str) -> tuple[str, bool, list[str]]:
    import warnings

    class WithExtra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.block = sharded.Block(sharded.WIDTH)
            self.scale = nn.Parameter(torch.ones(sharded.WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.block(x) * self.scale).square().mean()

    def run(plain: bool) -> tuple[list[torch.Tensor], str, bool]:
        model = WithExtra()
        fully_shard(model.block)
        text, synchronous = "", True
        if plain:  # torch's fused AdamW refuses a list that mixes DTensors and tensors
            parts = [model.block.parameters(), [model.scale]]
            optimizers = [torch.optim.AdamW(part, **sharded.OPTIONS, fused=True) for part in parts]
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                schedule = sharded.schedule_of(arm)
                optimizer = OffloadedAdamW(model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule)
            optimizers = [optimizer]
            text = "\n".join(str(w.message) for w in caught)
            synchronous = not optimizer.schedule.deferred
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, sharded.WIDTH)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], text, synchronous

    expected, _, _ = run(plain=True)
    found, text, synchronous = run(plain=False)
    wrong = [
        str(i)
        for i, (a, b) in enumerate(zip(expected, found, strict=True))
        if not torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
    ]
    return text, synchronous, wrong


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_a_parameter_fsdp_does_not_manage_warns_and_updates_synchronously(arm: str) -> None:
    for text, synchronous, wrong in on_ranks(2, unmanaged, arm):
        assert "scale" in text
        assert synchronous
        assert wrong == []
