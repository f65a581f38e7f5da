"""FSDP2 asks for the memory of its sharded gradients on compute's stream, reduces them as ever, and gets its own way
back. On a CPU streams have names only: which one is current is seen, what they order is not (test_gradient_pool_gpu).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from offbench.offload import gradient_pool
from offbench.offload.fsdp import UnknownFSDP, param_groups
from offbench.offload.gradient_pool import GradientPool
from tests.ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS, STEPS = 2, 3


class Watched:
    """Stands between a group and its reduce-scatter: on which stream memory is asked for, and results are made."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self.asked: list[Any] = []
        self.reduced: list[Any] = []

    def allocate(self, *size: Any, **how: Any) -> torch.Tensor:
        self.asked.append(torch.cpu.current_stream())
        memory: torch.Tensor = self.own.allocate(*size, **how)
        return memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reduced.append(torch.cpu.current_stream())
        return self.own(*args, **kwargs)


def sharded(reduce: torch.dtype = FP32, mesh_shape: Sequence[int] | None = None) -> nn.ModuleList:
    torch.manual_seed(5)
    model = nn.ModuleList([nn.Linear(6, 6) for _ in range(LAYERS)])
    shape = mesh_shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
    return model


def train(model: nn.ModuleList, accumulate: int = 1, after: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro in range(accumulate):
            torch.manual_seed(100 * step + 10 * micro + dist.get_rank())
            x = torch.randn(3, 6)
            for layer in model:
                x = torch.tanh(layer(x))
            x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
    return [p.to_local().detach().clone() for p in model.parameters()]


def course(
    rank: int, mesh_shape: Sequence[int] | None
) -> dict[tuple[str, int], tuple[bool, int, int, int, list[str]]]:
    """By dtype of the reduction and backwards a step: whether bits are equal, gradients made in the pool, groups,
    gradients made there once more after `restore`, and who reduces then."""
    found = {}
    for reduce, accumulate in itertools.product((FP32, BF16), (1, 2)):
        expected = train(sharded(reduce, mesh_shape), accumulate)
        model = sharded(reduce, mesh_shape)
        pool = GradientPool(model)
        ends = train(model, accumulate)
        made, groups, comms = pool.made, pool.groups, [group._reduce_scatter_comm for group in param_groups(model)]
        pool.restore()
        train(model, accumulate)
        later = sum(comm.made for comm in comms) - made
        equal = all(torch.equal(a, b) for a, b in zip(expected, ends, strict=True))
        own = [type(group._reduce_scatter_comm).__name__ for group in param_groups(model)]
        found[str(reduce), accumulate] = equal, made, groups, later, own
    return found


@pytest.mark.parametrize(
    ("world", "mesh_shape"), [(1, None), (2, None), (2, (2, 1))], ids=["one rank", "two ranks", "replicated"]
)
def test_the_same_bits(world: int, mesh_shape: Sequence[int] | None) -> None:
    for found in on_ranks(world, course, mesh_shape):
        assert len(found) == 4
        for (_, accumulate), (equal, made, groups, later, own) in found.items():
            assert equal
            assert groups == LAYERS
            assert made == LAYERS * STEPS * accumulate, "every reduction of every backward"
            assert later == 0, "restored: nothing comes from there any more"
            assert own == ["DefaultReduceScatter"] * LAYERS


def streams(rank: int) -> list[tuple[list[bool], list[bool]]]:
    """By group: whether each allocation and each reduction ran on compute's stream, with the pool."""
    model = sharded()
    pool = GradientPool(model)
    watched = []
    for group in param_groups(model):
        comm: Any = group._reduce_scatter_comm
        comm._own = Watched(comm._own)
        watched.append(comm._own)
    compute = torch.cpu.current_stream()
    train(model)
    assert pool.made
    return [([s == compute for s in one.asked], [s == compute for s in one.reduced]) for one in watched]


def stock_streams(rank: int) -> list[tuple[list[bool], list[bool]]]:
    model = sharded()
    watched = []
    for group in param_groups(model):
        group._reduce_scatter_comm = Watched(group._reduce_scatter_comm)
        watched.append(group._reduce_scatter_comm)
    compute = torch.cpu.current_stream()
    train(model)
    return [([s == compute for s in one.asked], [s == compute for s in one.reduced]) for one in watched]


def test_results_are_asked_for_on_compute_and_reduced_where_fsdp_reduces() -> None:
    for stock, pooled in zip(on_ranks(2, stock_streams), on_ranks(2, streams), strict=True):
        for asked, reduced in stock:
            assert asked == [True, False] * STEPS, "FSDP2's own way: the input on compute, the result is not"
            assert reduced == [False] * STEPS
        for asked, reduced in pooled:
            assert asked == [True, True] * STEPS
            assert reduced == [False] * STEPS


def waits(rank: int) -> list[tuple[str, str]]:
    """What comes next behind every allocation of a result: another one, a wait of the reducing stream for compute, or
    another wait."""
    model = sharded()
    log: list[str] = []
    compute = torch.cpu.current_stream()
    GradientPool(model)
    for group in param_groups(model):
        comm: Any = group._reduce_scatter_comm
        real = comm._take

        def take(*args: Any, real: Any = real, comm: Any = comm) -> torch.Tensor:
            log.append("result" if comm.given else "input")
            comm.given = not comm.given
            memory: torch.Tensor = real(*args)
            return memory

        comm.given, comm._take = False, take

    def wait(stream: Any, other: Any) -> None:
        log.append("reducing waits for compute" if stream != compute and other == compute else "another wait")

    torch.cpu.Stream.wait_stream = wait  # type: ignore[method-assign,assignment]
    train(model)
    return [(one, other) for one, other in itertools.pairwise(log) if one == "result"]


def test_the_reducing_stream_waits_for_compute_once_the_memory_is_there() -> None:
    """Torch fills new memory on the stream that asks for it where it is to be deterministic."""
    for found in on_ranks(2, waits):
        assert found == [("result", "reducing waits for compute")] * LAYERS * STEPS


class Named:
    """A stream, or a tensor, that writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Named) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_stream(self, stream: Named) -> None:
        self.log.append(f"used on {stream.name}")


@pytest.mark.parametrize("has_hook", [False, True])
def test_every_stream_that_uses_a_result_is_named_to_the_allocator(
    has_hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    compute, reducing, all_reducing, hook = (Named(name, log) for name in ("compute", "reduce", "all-reduce", "hook"))
    now = [compute]

    @contextmanager
    def stream(one: Named) -> Iterator[None]:
        now.append(one)
        yield
        now.pop()

    def allocate(size: Sequence[int], **how: Any) -> Named:
        log.append(f"asked on {now[-1].name}")
        return Named("memory", log)

    module = SimpleNamespace(current_stream=lambda: now[-1], stream=stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    context = SimpleNamespace(reduce_scatter_stream=reducing, all_reduce_stream=all_reducing)
    own, there = SimpleNamespace(allocate=allocate), hook if has_hook else None
    group = SimpleNamespace(_reduce_scatter_comm=own, comm_ctx=context, _all_reduce_hook_stream=there)
    one, device = gradient_pool._Reduce(group, gradient_pool._Share(None)), SimpleNamespace(type="cuda")
    one.allocate((4,), dtype=FP32, device=device)  # type: ignore[arg-type]
    with stream(reducing):
        one.allocate((2,), dtype=FP32, device=device)  # type: ignore[arg-type]
    assert log[:3] == ["asked on compute", "asked on compute", "reduce waits for compute"]
    assert log[3:] == ["used on reduce", "used on all-reduce", *(["used on hook"] if has_hook else [])]
    del context.all_reduce_stream
    with pytest.raises(UnknownFSDP, match="no all_reduce_stream"):
        one.allocate((4,), dtype=FP32, device=device)  # type: ignore[arg-type]


def foreign(rank: int) -> tuple[int, int, bool, str]:
    model = sharded()
    first, second = param_groups(model)
    theirs = Watched(first._reduce_scatter_comm)
    first._reduce_scatter_comm = theirs
    pool = GradientPool(model)
    train(model)
    groups, made = pool.groups, pool.made
    second._reduce_scatter_comm = theirs  # replaced by somebody while ours was there
    pool.restore()
    kept = first._reduce_scatter_comm is theirs and second._reduce_scatter_comm is theirs
    del second._reduce_scatter_comm
    first._reduce_scatter_comm = theirs.own
    try:
        GradientPool(model)
    except UnknownFSDP as error:
        return groups, made, kept and first._reduce_scatter_comm is theirs.own, str(error)
    return groups, made, kept, "no error"


def test_others_collectives_are_left_alone_and_a_missing_part_is_said() -> None:
    for groups, made, kept, text in on_ranks(2, foreign):
        assert (groups, made) == (1, STEPS)
        assert kept
        assert text == f"torch {torch.__version__}: FSDPParamGroup has no _reduce_scatter_comm"


def shared_out(rank: int, nbytes: Any, free: int | None) -> tuple[bool, list[list[int]], int, int]:
    """Whether bits are equal; by step what each layer's group has made there so far; groups and bytes at the end."""
    expected = train(sharded())
    gradient_pool._free = lambda *_: free
    model = sharded()
    pool = GradientPool(model, nbytes)
    comms = [group._reduce_scatter_comm for group in param_groups(model)]
    made = []
    ends = train(model, after=lambda: made.append([comm.made for comm in comms]))
    equal = all(torch.equal(a, b) for a, b in zip(expected, ends, strict=True))
    return equal, made, pool.groups, pool.nbytes


LAYER_BYTES = (6 * 6 + 6) * 4


@pytest.mark.parametrize(
    ("nbytes", "free", "chosen"),
    [
        (LAYER_BYTES, None, [1, 0]),
        (2 * LAYER_BYTES - 1, None, [1, 0]),
        (2 * LAYER_BYTES, None, [1, 1]),
        (LAYER_BYTES - 1, None, [0, 0]),
        ("auto", LAYER_BYTES, [1, 0]),
        ("auto", 0, [0, 0]),
        ("auto", None, [1, 1]),
    ],
)
def test_a_share_is_what_is_reduced_last_from_the_third_backward_on(nbytes: Any, free: Any, chosen: list[int]) -> None:
    """The first layer is reduced last."""
    ((equal, made, groups, held),) = on_ranks(1, shared_out, nbytes, free)
    assert equal
    assert made == [[0, 0], [0, 0], chosen]
    assert (groups, held) == (sum(chosen), sum(chosen) * LAYER_BYTES)


def test_what_is_free_is_that_of_computes_own_pool() -> None:
    def segment(device: int, stream: int, pool: tuple[int, int]) -> dict[str, Any]:
        sizes = {"total_size": 100, "active_size": 30}
        return {"device": device, "stream": stream, "segment_pool_id": pool, **sizes}

    found = [
        segment(0, 7, (0, 0)),
        segment(0, 7, (0, 0)),
        segment(0, 8, (0, 0)),
        segment(1, 7, (0, 0)),
        segment(0, 7, (1, 0)),
    ]
    module: Any = SimpleNamespace(memory_snapshot=lambda: found)
    compute = SimpleNamespace(cuda_stream=7)
    assert gradient_pool._free(module, torch.device("cuda", 0), compute) == 140
    assert gradient_pool._free(SimpleNamespace(), torch.device("cpu"), None) is None  # type: ignore[arg-type]
