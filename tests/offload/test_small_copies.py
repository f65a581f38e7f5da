"""FSDP2 with kernel copies trains to the same bits, uses them everywhere, and gets its own operators back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from offbench.offload.small_copies import kernel_copies
from tests.ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32


class Odd(nn.Module):
    """Dimensions that two or three ranks do not divide, one row, one dimension, and a tensor sharded by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 7)
        self.b = nn.Linear(7, 13, bias=False)
        self.one = nn.Parameter(torch.randn(1, 13))
        self.wide = nn.Parameter(torch.randn(5, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(torch.tanh(self.a(x))) * self.one).sum() + (self.wide**2).sum()


def course(wanted: bool, param: torch.dtype, reduce: torch.dtype) -> tuple[list[torch.Tensor], int, int]:
    torch.manual_seed(5)
    model = nn.ModuleList([Odd(), Odd()])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for layer in model:
        wide = layer.wide
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda p, w=wide: Shard(1) if p is w else None
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with kernel_copies(wanted) as copies:
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            x = torch.randn(3, 10)
            sum(layer(x.to(param)) for layer in model).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts = (copies.copies_out, copies.copies_in) if copies else (0, 0)
    return [p.to_local().detach().clone() for p in model.parameters()], *counts


def both(rank: int, param: torch.dtype, reduce: torch.dtype) -> tuple[bool, bool, int, int, int]:
    expected, _, _ = course(False, param, reduce)
    found, out, into = course(True, param, reduce)
    again, _, _ = course(False, param, reduce)
    equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    restored = all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    return equal, restored, out, into, dist.get_world_size()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("param", "reduce"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_the_same_bits(world: int, param: torch.dtype, reduce: torch.dtype) -> None:
    for equal, restored, out, into, size in on_ranks(world, both, param, reduce):
        assert equal
        assert restored
        assert into == 2 * 4, "every reduce-scatter of every layer and step"
        # Both layers gather once a step, as roots keep what they gathered; one rank has nothing to gather.
        assert out == (0 if size == 1 else 2 * 4)


def evaluated_between(rank: int, wanted: bool) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    found = []
    with kernel_copies(wanted):
        for _ in range(2):
            model(torch.ones(2, 12)).square().sum().backward()
            with torch.inference_mode():
                found.append(model(torch.ones(2, 12)).clone())
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-0.1)
                    p.grad = None
    return [tensor.clone() for tensor in found] + [p.to_local().detach().clone() for p in model.parameters()]


def both_evaluated_between(rank: int) -> bool:
    pairs = zip(evaluated_between(rank, False), evaluated_between(rank, True), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_an_evaluation_in_inference_mode_may_come_between() -> None:
    assert on_ranks(2, both_evaluated_between) == [True, True]


def test_rows_that_are_kept_keep_no_tensor_alive() -> None:
    kept = torch.zeros(12)
    gathered = torch.arange(12.0).view(2, 6)
    with kernel_copies():
        for _ in range(2):
            torch.ops.fsdp.split_with_sizes_copy(gathered, [6], dim=1, out=[kept.view(2, 6)])
    assert torch.equal(kept, gathered.view(-1))
    kept.untyped_storage().resize_(0)  # as FSDP2 frees what it gathered
    kept.untyped_storage().resize_(48)
    with kernel_copies():
        torch.ops.fsdp.split_with_sizes_copy(gathered + 1, [6], dim=1, out=[kept.view(2, 6)])
    assert torch.equal(kept, (gathered + 1).view(-1)), "the rows are those of the memory it has now"
    before, kept.data = kept.data, torch.zeros(12)
    with kernel_copies():
        torch.ops.fsdp.split_with_sizes_copy(gathered + 2, [6], dim=1, out=[kept.view(2, 6)])
    assert torch.equal(kept, (gathered + 2).view(-1)), "also where it was given other memory"
    assert torch.equal(before, (gathered + 1).view(-1))
    gone = weakref.ref(kept)
    gc.disable()
    try:
        del kept
        assert gone() is None
    finally:
        gc.enable()
