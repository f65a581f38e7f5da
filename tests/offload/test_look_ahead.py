"""When updates are queued: at a gather only what it needs, if the model has a better moment for the rest."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.fsdp import nested_groups
from tests.offload import sharded
from tests.ranks import on_ranks

WIDTH, BLOCKS, STEPS = 64, 6, 3


class Layer(nn.Module):
    """A block with a part that may be a parameter group of its own, as the experts of a layer are."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.attention(x).tanh())


class Net(nn.Module):
    """Some layers and a head that the root's group holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def net(nest: bool, root: bool = True, second: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net()
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        if nest:
            fully_shard(layer.experts, mesh=mesh)
        if second:
            fully_shard(layer.attention, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    if root:
        fully_shard(model, mesh=mesh)
    return model


def groups(rank: int) -> list[int]:
    models = [net(nest, root, second) for second in (False, True) for nest in (True, False) for root in (True, False)]
    found = [nested_groups(model) for model in models]
    attention = {layer.attention.weight for layer in models[4].layers}
    assert {p.sharded_param for group in found[4] for p in group.fsdp_params} == attention, "of two the first"
    return [len(nested) for nested in found]


def test_the_first_group_inside_each_block_is_nested_with_and_without_a_root() -> None:
    assert on_ranks(1, groups) == [[BLOCKS, BLOCKS, 0, 0] + [BLOCKS] * 4]


def train(model: Net, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, WIDTH, generator=generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return sharded.snapshot(model, optimizer)


def parameter_groups(model: Net) -> list[dict[str, object]]:
    """Those with weight decay first, and from the last layer to the first: no order that a forward would have."""
    parameters = list(model.parameters())[::-1]
    return [{"params": parameters[1::2]}, {"params": parameters[::2], "weight_decay": 0.0}]


def queued(rank: int, arm: str, nest: bool) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Where bits differ from AdamW's, and the calls that queued something: which, for how many updates the gather
    asked, and how many were queued."""
    model = net(nest)
    expected = train(model, torch.optim.AdamW(parameter_groups(model), **sharded.OPTIONS, fused=True), rank)
    model = net(nest)
    schedule = sharded.schedule_of(arm, lead=1, ahead=4)
    schedule = dataclasses.replace(schedule, chunk_bytes=1, whole_bytes=1 << 30)  # one parameter a chunk
    streams = AdversarialStreams({"in": "lazy", "update": "lazy", "out": "lazy"})
    optimizer = OffloadedAdamW(
        parameter_groups(model), **sharded.OPTIONS, model=model, schedule=schedule, streams=streams
    )
    calls: list[tuple[str, int, int]] = []
    engine = optimizer._engine
    assert engine is not None
    optimizer.detach()
    before_read, look_ahead = engine.before_read, engine.look_ahead

    def spy_read(chunks, look_ahead):
        needed = engine._up_to(max(chunks))
        left = len(engine._waiting())
        events = before_read(chunks, False)
        calls.append(("read", needed, left - len(engine._waiting())))
        if look_ahead:
            spy_ahead()
        return events

    def spy_ahead(at_leisure=False):
        left = len(engine._waiting())
        look_ahead(at_leisure)
        calls.append(("leisure" if at_leisure else "ahead", 0, left - len(engine._waiting())))

    engine.before_read, engine.look_ahead = spy_read, spy_ahead
    optimizer._watch(engine)
    wrong = sharded.differences(expected, train(model, optimizer, rank))
    return wrong + streams.order.violations, [call for call in calls if call[2]]


def all_queued(rank: int) -> dict[str, tuple[list[str], list[tuple[str, int, int]]]]:
    return {
        f"{arm} {'nested' if nest else 'flat'}": queued(rank, arm, nest)
        for arm in ("overlap", "stream", "zerocopy")
        for nest in (True, False)
    }


@pytest.mark.parametrize("world", [1, 2])
def test_a_gather_queues_what_it_needs_and_a_nested_group_what_comes_next(world: int) -> None:
    for found in on_ranks(world, all_queued):
        for name, (wrong, calls) in found.items():
            assert wrong == [], name
            reads = [call for call in calls if call[0] == "read"]
            assert all(needed == now for _, needed, now in reads), name
            others = {kind for kind, *_ in calls} - {"read"}
            assert others == {"leisure" if name.endswith("nested") else "ahead"}, name
            # The head, in the root's group, is read first though it is used last; then layer by layer.
            assert max((needed for _, needed, _ in reads), default=0) <= 2, name
            assert sum(now for kind, _, now in calls if kind != "read") >= sum(now for *_, now in reads), name
