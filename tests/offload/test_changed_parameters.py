"""Parameters and gradients that are not plain shards at one place for good: what changed, wraps, or is still a sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from offbench.errors import OffbenchError
from offbench.offload import OffloadedAdamW, Schedule
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.layout import local_of
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")
CHUNKED = Schedule("chunked", offloaded=True, chunk_bytes=1 << 14, slots=2)
LATE = {"chunked": {}, "overlap": {"slots": 2, "lead": 1, "ahead": 0}, "stream": {"lead": 1, "ahead": 0}}
"""Options by arm; of deferred ones most updates are pending after step()."""


def swapped(model: nn.Module, step: int) -> None:
    """Other memory for every shard, in each of the ways there are."""
    for parameter in model.parameters():
        local = parameter._local_tensor
        if step == 1:
            local.data = local.detach().clone()
        elif step == 2:
            local.set_(local.detach().clone())
        elif step == 3:
            parameter.data = parameter.detach().clone()


def with_swaps(rank: int) -> list[str]:
    snapshots = []
    for arm in ("plain", "overlap"):
        model = sharded.build(CPU)
        if arm == "plain":
            optimizer: Any = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **LATE[arm])

        def between(step: int, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            with optimizer.settled() if isinstance(optimizer, OffloadedAdamW) else nullcontext():
                swapped(model, step)

        sharded.train(model, optimizer, rank, CPU, between, range(5))
        snapshots.append(sharded.snapshot(model, optimizer))
    return sharded.differences(*snapshots)


def test_memory_that_was_swapped_is_what_the_next_step_updates() -> None:
    assert on_ranks(1, with_swaps) == [[]]


def converted(rank: int) -> dict[str, tuple[list[str], int]]:
    """`to()`, `cpu()` and their like with updates pending: what differs, and shards whose old memory lives on."""
    found, expected = {}, {}
    for arm in ("plain", *LATE):
        model = sharded.build(CPU)
        if arm == "plain":
            optimizer: Any = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **LATE[arm])
        kept = []

        def between(step: int, model: nn.Module = model, kept: list[StorageWeakRef] = kept) -> None:
            if step == 2:
                kept += [StorageWeakRef(p.to_local().untyped_storage()) for p in model.parameters()]
                model._apply(torch.clone)  # what they all come down to; on one device they would do nothing

        sharded.train(model, optimizer, rank, CPU, between, range(3))
        alive = sum(not storage.expired() for storage in kept)
        sharded.train(model, optimizer, rank, CPU, steps=range(3, 5))
        snapshot = sharded.snapshot(model, optimizer)
        expected = expected or snapshot
        found[arm] = (sharded.differences(expected, snapshot), alive)
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.detach()
            assert "_apply" not in vars(model)
    return found


def test_a_model_that_moves_takes_pending_updates_along_and_leaves_no_memory_behind() -> None:
    """A trainer that lends its device to inference moves the model to the host and back."""
    (found,) = on_ranks(1, converted)
    assert found == dict.fromkeys(("plain", *LATE), ([], 0))


CHANGES: dict[str, Callable[[nn.Conv2d], object]] = {
    r"bfloat16 \(8, 4, 3, 3\) on cpu now and was float32 \(8, 4, 3, 3\)": lambda net: net.bfloat16(),
    r"float32 \(2, 4, 3, 3\) on cpu now and was": lambda net: setattr(net.weight, "data", torch.ones(2, 4, 3, 3)),
    "on meta now and was": lambda net: torch.utils.swap_tensors(net.weight, nn.Parameter(net.weight.to("meta"))),
    "with strides": lambda net: net.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("text", CHANGES)
def test_a_parameter_that_its_moments_do_not_fit_is_refused_and_nothing_is_lost(text: str) -> None:
    """Its bytes would be read as something else: right parameters for a while, and a broken checkpoint."""
    net = nn.Conv2d(4, 8, 3)
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED)
    net(torch.ones(1, 4, 4, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    CHANGES[text](net)
    net.weight.grad = torch.ones_like(net.weight)  # of all the same kind
    with pytest.raises(OffbenchError, match=text):
        optimizer.step()
    assert net.weight.grad is not None
    assert {float(state["step"]) for state in optimizer.state.values()} == {1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel(rank: int) -> tuple[bool, list[str]]:
    """Sequence parallelism leaves each rank a part of the norm's gradient; torch's AdamW adds them up."""
    ends, partial = [], False
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for offloaded in (False, True):
        model = parallelize_module(Block(), init_device_mesh("cpu", (2,)), plan)
        if offloaded:
            optimizer: torch.optim.Optimizer = OffloadedAdamW(
                model.parameters(), **sharded.OPTIONS, schedule=CHUNKED, implementation="foreach"
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, foreach=True)
        for step in range(3):
            output = model(torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step)))
            (output.to_local() if isinstance(output, DTensor) else output).square().mean().backward()
            partial = any(placement.is_partial() for placement in model.norm.weight.grad.placements)
            optimizer.step()
            optimizer.zero_grad()
        assert model.norm.weight.placements == (Replicate(),)
        ends.append({name: p.to_local().detach().clone() for name, p in model.named_parameters()})
    return partial, sharded.differences(*ends)


def test_a_gradient_that_is_a_sum_still_to_be_made_is_made_first() -> None:
    assert on_ranks(2, tensor_parallel) == [(True, [])] * 2


class Wrapped(torch.Tensor):
    """A weight that FSDP2 gathers as it is told to, as those of float8 training: all memory is in `inner`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        found = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        kept = {"detach", "clone", "view", "as_strided", "slice", "split", "new_zeros", "copy_", "_to_copy"}
        return tree_map_only(torch.Tensor, cls, found) if name in kept else found

    def fsdp_pre_all_gather(self, mesh: object) -> tuple[tuple[torch.Tensor], None]:
        return (self.inner,), None

    def fsdp_post_all_gather(self, gathered: Any, meta: object, dtype: object, *, out: Any = None) -> Any:
        return None if out is not None else (gathered[0], gathered)  # `out` has the memory of `gathered`


def wrapped_weights(rank: int) -> dict[str, bool]:
    ends: dict[str, list[torch.Tensor]] = {}
    for arm in ("plain", *LATE):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        for layer in model:
            layer.weight = nn.Parameter(Wrapped(layer.weight.detach()))
            fully_shard(layer)
        fully_shard(model)
        if arm == "plain":
            optimizer: Any = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **LATE[arm])
        for step in range(3):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.drain()
        moments = [optimizer.state[p]["exp_avg"].to_local() for p in model.parameters()]
        ends[arm] = [*(p._local_tensor.inner for p in model.parameters()), *moments]
    return {arm: all(map(torch.equal, ends["plain"], end)) for arm, end in ends.items()}


def test_weights_that_say_how_they_are_gathered_are_updated_inside_their_wrappers() -> None:
    assert on_ranks(2, wrapped_weights) == [dict.fromkeys(("plain", *LATE), True)] * 2


def test_a_wrapper_around_something_else_is_refused() -> None:
    class Quantized(Wrapped):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner", "scale"], None

        scale = torch.ones(1)

    with pytest.raises(OffbenchError, match="a parameter is a Quantized, whose values are not in one tensor"):
        local_of(Quantized(torch.ones(2)))
