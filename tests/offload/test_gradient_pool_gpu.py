"""On a CUDA device: gradients lie in compute's pool, activations find what they leave, and nobody gets memory that
the reducing stream still uses. The CPU, which has no pools, checks that the same trainers run at all."""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offbench.offload.fsdp import param_groups
from offbench.offload.gradient_pool import GradientPool
from offbench.workload.rehearsal import init_rehearsal
from tests.offload.alone import Alone

LAYERS, WORLD = 8, 2
LONG = 20_000_000
"""Cycles that the reducing stream stands still behind each reduction: about 10 ms, longer than a layer's backward."""


class Stack(nn.Module):
    def __init__(self, device: torch.device, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, hook: Callable[[Any], None] | None = None) -> torch.Tensor:
        """hook: called in the backward, before each layer's."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if hook is not None:
                x.register_hook(hook)
        return x.square().mean()


def model_of(device: torch.device, width: int) -> Stack:
    """One reducing stream, that of the root: compute waits in each layer for the reduction of the one before."""
    torch.manual_seed(0)
    model = Stack(device, width)
    mesh = init_device_mesh(device.type, (WORLD,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def pools(device: torch.device, tensors: list[torch.Tensor]) -> set[bool]:
    """Whether the allocator's pool that each lies in is compute's."""
    found = set()
    for tensor in tensors:
        at = tensor.untyped_storage().data_ptr()
        (segment,) = [
            one for one in torch.cuda.memory_snapshot() if one["address"] <= at < one["address"] + one["total_size"]
        ]
        found.add(segment["stream"] == torch.cuda.current_stream(device).cuda_stream)
    return found


def in_turn(device: torch.device, pooled: bool, share: Any = None, rounds: int = 2) -> tuple[set[bool], int, int]:
    """Whose the gradients' memory is, and the most reserved and allocated when gradients come and, after them,
    activations larger than all that a backward takes; of a size, so that little is lost to fragments."""
    model = model_of(device, 2048)
    pool = GradientPool(model, share) if pooled else None
    is_cuda = device.type == "cuda"
    gc.collect()  # FSDP2's modules are in cycles: what is left of others is no part of this one's memory
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    whose: set[bool] = set()
    for _ in range(rounds):
        model(torch.ones(2, 2048, device=device)).backward()
        gradients = [p.grad.to_local() for p in model.parameters()]
        whose |= pools(device, gradients) if is_cuda else set()
        nbytes = gradients[0].untyped_storage().nbytes()
        del gradients
        model.zero_grad()
        activations = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(4 * LAYERS)]
        del activations
    if pool is not None:
        assert pool.groups == LAYERS, "activations leave room for all"
        assert pool.made == LAYERS * (rounds - 2 * (share is not None))
        pool.restore()
    if not is_cuda:
        return whose, 0, 0
    return whose, torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)


class Late:
    """A group's reduce-scatter whose stream stands still behind it, when the result is there and not yet used."""

    def __init__(self, own: Any, cycles: int) -> None:
        self._own, self._cycles = own, cycles
        self.allocate = own.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._own(*args, **kwargs)
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        return found


def scribble(device: torch.device, nbytes: int) -> Callable[[Any], None]:
    """Whatever is free and as large as a gradient's memory is overwritten by compute, as an activation would."""

    def hook(_: Any) -> None:
        torch.empty(nbytes // 4, dtype=torch.float32, device=device).fill_(float("nan"))

    return hook


def accumulated(device: torch.device, pooled: bool) -> list[list[float]]:
    """Gradients of three backwards, added up on a reducing stream that is far behind compute."""
    width = 256
    model = model_of(device, width)
    pool = GradientPool(model) if pooled else None
    for group in param_groups(model):
        cycles = LONG if device.type == "cuda" else 0
        group._reduce_scatter_comm = Late(group._reduce_scatter_comm, cycles)
    hook = scribble(device, width * width * 4 // WORLD)
    for micro in range(3):
        generator = torch.Generator(device).manual_seed(micro)
        model(torch.randn(4, width, device=device, generator=generator), hook).backward()
    if pool is not None:
        assert pool.made == 3 * LAYERS
    return [p.grad.to_local().flatten().tolist() for p in model.parameters()]


def _child(_: int, path: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    init_rehearsal(0, WORLD)
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {pooled: (in_turn(device, pooled), accumulated(device, pooled)) for pooled in (False, True)}
    assert in_turn(device, True, "auto", 3)[0] == {False, True}, "a pool of its own first, compute's from the third on"
    Path(path).write_bytes(pickle.dumps(found))  # more than a queue takes before somebody reads it
    dist.destroy_process_group()


@pytest.mark.gpu
def test_gradients_and_activations_share_memory_and_nobody_writes_too_early(tmp_path: Path) -> None:
    path = tmp_path / "found"
    mp.start_processes(_child, (str(path),), nprocs=1, start_method="spawn")
    found = pickle.loads(path.read_bytes())
    (whose, reserved, allocated), expected = found[False]
    assert whose == {False}, "FSDP2's own way: another pool"
    (pooled_whose, pooled, pooled_allocated), gradients = found[True]
    print("reserved", reserved, "pooled", pooled, "allocated", allocated, pooled_allocated)
    assert pooled_whose == {True}
    assert pooled <= reserved - (LAYERS - 2) * 2048 * 2048 * 4 // WORLD
    assert pooled_allocated <= allocated
    assert all(math.isfinite(x) for gradient in gradients for x in gradient)
    assert gradients == expected


def test_the_same_trainers_on_the_cpu() -> None:
    alone = Alone("cpu")
    expected, gradients = alone(accumulated, False), alone(accumulated, True)
    assert gradients == expected
    assert [alone(in_turn, pooled) for pooled in (False, True)] == [(set(), 0, 0)] * 2
    alone.close()
