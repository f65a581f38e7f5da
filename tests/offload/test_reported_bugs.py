"""What other offloading optimizers were publicly reported to do wrong, each a short test that it does not happen.

tests/test_reported_elsewhere.py names the tests of those whose place is beside what they are about.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from offbench.errors import OffbenchError
from offbench.offload import OffloadedAdamW, Schedule, kernels
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.copies import Copier
from offbench.offload.hoststore import HostStore
from offbench.offload.streams import DeviceStreams
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
CHUNKED = Schedule("chunked", offloaded=True, chunk_bytes=1 << 14, slots=2)
TIGHT = {"staging_bytes": 2 << 20}
"""For stream: room for two chunks, until gradients make more."""
WIDTH = 24


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).to(dtype)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True)


def offloaded(model: nn.Module) -> OffloadedAdamW:
    return OffloadedAdamW(model.parameters(), **OPTIONS, schedule=CHUNKED)


def trained(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    steps: int = 4,
    backwards: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Parameters, gradient norms of all steps, and the optimizer."""
    model = net(dtype)
    optimizer, norms = make(model), []
    for step in range(steps):
        for micro in range(backwards):
            torch.manual_seed(10 * step + micro)
            model(torch.randn(8, WIDTH, dtype=dtype)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], norms, optimizer


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("backwards", [1, 2, 4])
def test_no_backward_of_a_step_is_lost(backwards: int) -> None:  # DeepSpeed#7967, #7981
    expected, norms, _ = trained(plain, backwards=backwards)
    found, seen, _ = trained(offloaded, backwards=backwards)
    assert same(seen, norms)
    assert same(found, expected)


def test_clipping_is_not_bypassed() -> None:  # pytorch/ao#1209, #959
    expected, norms, _ = trained(plain, max_norm=1e-3)
    found, seen, _ = trained(offloaded, max_norm=1e-3)
    assert min(norms) > 1e-3
    assert same(seen, norms)
    assert same(found, expected)
    assert not same(found, trained(offloaded)[0])


def unreachable(rank: int) -> tuple[str, bool]:
    """What the optimizer says of shards whose group has no backend for them, and whether they could be clipped."""
    mesh = DeviceMesh.from_group(dist.new_group(backend="cuda:gloo"), "cpu")
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False))
    parameter.grad = torch.ones_like(parameter)
    text, clips = "", True
    try:
        OffloadedAdamW([parameter], schedule=CHUNKED)
    except OffbenchError as error:
        text = str(error)
    try:
        nn.utils.clip_grad_norm_([parameter], 1.0).full_tensor()
    except RuntimeError:
        clips = False
    OffloadedAdamW([nn.Parameter(torch.ones(4))], schedule=CHUNKED)
    return text, clips


def test_a_missing_backend_is_named_at_construction() -> None:  # pytorch#148532
    for text, clips in on_ranks(2, unreachable):
        assert "sharded on the cpu, for which its process group has no backend (cuda:gloo)" in text
        assert not clips


def test_each_parameter_is_updated_once_a_step_and_never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update ahead of the norm, undone by inverting AdamW, does not give the bits back: DeepSpeed#7906"""
    updated: list[int] = []
    kernel = kernels._run

    def spy(call: kernels.Call, *others: Any) -> None:
        updated.extend(parameter.data_ptr() for parameter in call.parameters)
        kernel(call, *others)

    monkeypatch.setattr(kernels, "_run", spy)
    found, _, _ = trained(offloaded, steps=3, backwards=2, max_norm=1e-3)
    assert sorted(updated) == sorted(3 * [parameter.data_ptr() for parameter in found])


def differing(found: list[dict[str, torch.Tensor]]) -> list[str]:
    """Names whose values are not those of the first, plain run in every other."""
    return [name for other in found[1:] for name in sharded.differences(found[0], other)]


def after_step(rank: int) -> list[str]:
    found = []
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True),
        lambda model: sharded.optimizer_of("overlap", model, AdversarialStreams({}), slots=2, lead=2, ahead=1),
        lambda model: sharded.optimizer_of("stream", model, AdversarialStreams({}), **TIGHT, lead=2, ahead=1),
    ):
        model = sharded.build(CPU)
        optimizer = make(model)

        def between(step: int, optimizer: torch.optim.Optimizer = optimizer) -> None:
            """train() has just set the learning rate to 1000; the rest is wrong until the next step() begins."""
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            optimizer.param_groups[0].update(weight_decay=0.9, betas=(0.0, 0.0), eps=1.0)
            _ = [torch.full((1 << 18,), torch.nan) for _ in range(8)]  # the gradients' memory, if it was given up

        def correct(optimizer: torch.optim.Optimizer, *_: object) -> None:
            right = ("weight_decay", "betas", "eps")
            optimizer.param_groups[0].update({key: sharded.OPTIONS[key] for key in right})

        optimizer.register_step_pre_hook(correct)
        sharded.train(model, optimizer, rank, CPU, between)
        found.append(sharded.snapshot(model, optimizer))
    return differing(found)


def test_a_late_update_sees_neither_the_next_hyperparameters_nor_cleared_gradients() -> None:  # prime-rl#4427
    assert on_ranks(2, after_step) == [[], []]


def test_host_memory_does_not_grow_with_accumulation() -> None:  # prime-rl#3212, #3196
    once, often = (trained(offloaded, backwards=n)[2].store for n in (1, 4))
    assert once.requested_bytes == often.requested_bytes
    assert len(once.addresses) == len(often.addresses) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_not_kept_in_another_dtype(dtype: torch.dtype) -> None:  # radixark/Megatron-LM#67
    expected, _, reference = trained(plain, dtype=dtype)
    found, _, optimizer = trained(offloaded, dtype=dtype)
    assert same(found, expected)
    for mine, theirs in zip(optimizer.state.values(), reference.state.values(), strict=True):
        assert mine["exp_avg"].dtype == mine["exp_avg_sq"].dtype == dtype
        assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in theirs.items()}


def test_no_copy_converts_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:  # DeepSpeed#6962
    seen = []
    copy = Copier.copy

    def spy(self: Copier, target: torch.Tensor, source: torch.Tensor) -> None:
        seen.append((target.dtype, source.dtype, target.is_contiguous(), source.is_contiguous()))
        copy(self, target, source)

    monkeypatch.setattr(Copier, "copy", spy)
    trained(offloaded)
    assert set(seen) == {(torch.uint8, torch.uint8, True, True)}


def test_the_step_counter_is_not_advanced_once_per_chunk() -> None:  # prime-rl#3109, Megatron-LM#6244, vime#427
    _, _, optimizer = trained(offloaded, steps=3)
    assert len(optimizer.chunks) > 2
    counters = [state["step"] for state in optimizer.state.values()]
    assert {float(counter) for counter in counters} == {3.0}
    assert len({counter.data_ptr() for counter in counters}) == len(counters)


def test_an_offload_that_moves_nothing_is_noticed() -> None:  # Megatron-LM#6544, DeepSpeed#8186
    _, _, optimizer = trained(offloaded, steps=4)
    state = sum(2 * p.numel() * p.element_size() for p in net().parameters())
    assert optimizer.bytes_per_step >= state
    assert optimizer.ledger.in_bytes == optimizer.ledger.out_bytes == 4 * optimizer.bytes_per_step
    assert optimizer.where() == {"host": state}


def above_the_cap(rank: int) -> dict[str, list[str]]:
    """Every matrix is larger than the cap of a copy, none is cut: differences to plain AdamW by arm, and chunks that
    are not one of them."""
    model = sharded.build(CPU)
    plain = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    sharded.train(model, plain, rank, CPU, steps=range(3))
    expected, found = sharded.snapshot(model, plain), {}
    for arm, options in (("chunked", {}), ("overlap", {}), ("stream", {"staging_bytes": 0})):
        model = sharded.build(CPU)
        schedule = sharded.schedule_of(arm, **options)
        schedule = dataclasses.replace(schedule, chunk_bytes=1 << 16, whole_bytes=schedule.chunk_bytes)
        optimizer = OffloadedAdamW(
            model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule, streams=AdversarialStreams({})
        )
        sharded.train(model, optimizer, rank, CPU, steps=range(3))
        found[arm] = sharded.differences(expected, sharded.snapshot(model, optimizer))
        large = [chunk for chunk in optimizer.chunks if chunk.nbytes > 1 << 16]
        found[arm] += [str(chunk) for chunk in large if len(chunk.members) > 1] + ["few"] * (len(large) != 13)
    return found


def test_parameters_above_the_cap_move_whole_and_change_no_bit() -> None:  # IST-DASLab/llmq#19
    assert on_ranks(1, above_the_cap) == [{"chunked": [], "overlap": [], "stream": []}]


@pytest.mark.parametrize("where", [0, 5, 10])
def test_a_huge_parameter_that_is_not_cut_costs_staging_its_own_size_once(where: int) -> None:  # IST-DASLab/llmq#19
    parameters = [nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(10)]
    parameters.insert(where, nn.Parameter(torch.ones(1 << 9, 1 << 9).t()[:, :]))  # not contiguous
    optimizer = OffloadedAdamW(parameters, schedule=CHUNKED)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    huge = 8 << 18
    assert huge < optimizer.staging_peak <= huge + CHUNKED.slots * CHUNKED.chunk_bytes


def released(rank: int) -> list[set[str]]:
    """By parameter, the streams that the memory of a deferred update's gradients was said to be used by when it was
    given up: that of a parameter group is one buffer, of which one tensor is enough."""
    seen: dict[int, set[str]] = {}

    class Noting(AdversarialStreams):
        def release(self, tensors: Any, used_by: Any) -> None:
            for tensor in tensors:
                seen.setdefault(tensor.untyped_storage().data_ptr(), set()).update(stream.name for stream in used_by)
            super().release(tensors, used_by)

    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of("overlap", model, Noting({}), slots=2, lead=1, ahead=0)
    sharded.train(model, optimizer, rank, CPU, steps=range(1))
    model(torch.ones(4, sharded.WIDTH)).backward()
    optimizer.drain()
    gradients = [p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()]
    optimizer.step()
    optimizer.drain()
    return [seen.get(address, set()) for address in gradients]


def test_gradients_are_not_handed_on_before_their_update_has_run() -> None:
    """The allocator must know of the stream that reads them: DeepSpeed#7965, pytorch#180665, prime-rl#3109"""
    (found,) = on_ranks(1, released)
    assert len(found) == 14
    assert all("update" in streams for streams in found)


def streams_made(rank: int, arm: str) -> list[int]:
    """Streams that exist after each of 50 steps, FSDP's own included."""
    made = []

    class Counted(torch.cpu.Stream):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    torch.cpu.Stream = Counted
    model, seen = sharded.build(CPU), []
    optimizer = sharded.optimizer_of(arm, model, DeviceStreams(CPU), lead=2, ahead=1)
    sharded.train(model, optimizer, rank, CPU, lambda step: seen.append(len(made)), range(50))
    return seen


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_streams_are_not_made_anew_each_step(arm: str) -> None:  # prime-rl#3109, #3200
    (seen,) = on_ranks(1, streams_made, arm)
    assert seen[0] >= 3
    assert set(seen[1:]) == {seen[1]}, "write-back may begin a step late"


def evaluated(rank: int) -> tuple[list[str], bool]:
    """An evaluation after each step but the last leaves gathered parameters behind, and nobody waits twice."""
    snapshots, seen = [], []
    for arm, options in ((None, {}), ("overlap", {"slots": 2}), ("stream", TIGHT)):
        model = sharded.build(CPU, prefetch=True)
        if arm is None:
            optimizer: Any = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
        else:
            optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}), **options, lead=1, ahead=0)
        losses = []

        def between(step: int, model: nn.Module = model, losses: list[float] = losses) -> None:
            if step < sharded.STEPS - 1:
                with torch.no_grad():
                    losses.append(float(model(torch.ones(4, sharded.WIDTH))))

        losses += sharded.train(model, optimizer, rank, CPU, between)
        snapshots.append(sharded.snapshot(model, optimizer))
        seen.append(losses)
    return differing(snapshots), seen[0] == seen[1] == seen[2]


def test_a_prefetch_and_an_evaluation_do_not_leave_stale_parameters() -> None:  # pytorch#137348
    assert on_ranks(2, evaluated) == [([], True), ([], True)]


def kernel_inputs(rank: int, implementation: str, arm: str) -> set[tuple[type, torch.dtype]]:
    seen = set()
    kernel = kernels._run

    def spy(call: kernels.Call, *others: Any) -> None:
        lists = call.parameters, call.gradients, call.first, call.second
        seen.update((type(t), t.dtype) for tensors in lists for t in tensors)
        kernel(call, *others)

    kernels._run = spy
    model = sharded.build(CPU)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    schedule = sharded.schedule_of(arm)
    optimizer = OffloadedAdamW(
        model.parameters(), **sharded.OPTIONS, model=model, schedule=schedule, implementation=implementation
    )
    sharded.train(model, optimizer, rank, CPU, steps=range(2))
    optimizer.drain()
    return seen


@pytest.mark.parametrize(("implementation", "arm"), [("fused", "overlap"), ("fused", "stream"), ("foreach", "stream")])
def test_no_dtensor_and_no_rounded_gradient_reaches_the_kernel(implementation: str, arm: str) -> None:
    """DTensors leak a spec per parameter and step (pytorch#188174, #181761) or are planned anew each step
    (NVIDIA-NeMo/Automodel#2888); gradients were rounded to bf16 on the way out (prime-rl#3234)."""
    assert on_ranks(2, kernel_inputs, implementation, arm) == [{(torch.Tensor, torch.float32)}] * 2


def weights_loaded(rank: int) -> list[str]:
    """Weights alone are loaded, right after a step() and long after the optimizer was made."""
    found = []
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True),
        lambda model: sharded.optimizer_of("overlap", model, AdversarialStreams({}), slots=2, lead=1, ahead=0),
        lambda model: sharded.optimizer_of("stream", model, AdversarialStreams({}), **TIGHT, lead=1, ahead=0),
    ):
        model = sharded.build(CPU)
        optimizer = make(model)
        weights = {name: p.detach().clone() for name, p in model.state_dict().items()}

        def between(step: int, model: nn.Module = model, weights: dict[str, torch.Tensor] = weights) -> None:
            if step == 2:
                model.load_state_dict(weights)

        sharded.train(model, optimizer, rank, CPU, between)
        found.append(sharded.snapshot(model, optimizer))
    return differing(found)


def test_loaded_weights_are_not_undone_by_a_late_update() -> None:
    """Megatron-LM#5071, Megatron-Bridge#4082, SkyRL#2149; that the optimizer came first: pytorch/ao#1209"""
    assert on_ranks(2, weights_loaded) == [[], []]


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def continued(make: Callable[[nn.Module], torch.optim.Optimizer], saved: Any) -> list[torch.Tensor]:
    """Two more steps from saved weights, with the saved optimizer state unless it is None."""
    model = net()
    optimizer = make(model)
    model.load_state_dict(saved[0])
    if saved[1] is not None:
        optimizer.load_state_dict(saved[1])
    for step in range(100, 102):
        train_one(model, optimizer, step)
    return [p.detach() for p in model.parameters()]


def test_resumed_equals_uninterrupted_and_is_no_cold_start() -> None:
    """tinker-feedback#127; with other values at construction: SkyRL#1403, tt-metal#53212; into buffers pinned anew:
    verl#6690, verl#4870"""
    made = []

    def otherwise(model: nn.Module) -> OffloadedAdamW:
        options: dict[str, Any] = {"lr": 0.7, "betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.9}
        made.append(OffloadedAdamW(model.parameters(), **options, schedule=CHUNKED))
        made.append([state["exp_avg"].data_ptr() for state in made[0].state.values()])
        return made[0]

    model, saved = net(), []
    optimizer = offloaded(model)
    for step in range(4):
        train_one(model, optimizer, step)
    saved = [{name: p.clone() for name, p in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict())]
    for step in range(100, 102):
        train_one(model, optimizer, step)
    uninterrupted = [p.detach() for p in model.parameters()]
    assert same(uninterrupted, continued(otherwise, saved))
    assert same(uninterrupted, continued(plain, saved))
    assert not same(uninterrupted, continued(offloaded, (saved[0], None)))
    assert [state["exp_avg"].data_ptr() for state in made[0].state.values()] == made[1]


def test_an_export_reads_the_host_memory_itself() -> None:
    """No kernel on memory that was given back, nothing lifted to the device: Megatron-LM#6544"""
    _, _, optimizer = trained(offloaded)
    slabs = optimizer.store.addresses
    for saved in optimizer.state_dict()["state"].values():
        for moment in (saved["exp_avg"], saved["exp_avg_sq"]):
            first, last = moment.data_ptr(), moment.data_ptr() + moment.nbytes
            assert any(start <= first and last <= start + nbytes for start, nbytes in slabs)


def slabs_made(rank: int, arm: str) -> list[int]:
    """Host slabs that exist after construction and after each step."""
    made = []
    make = HostStore._slab

    def counted(self: HostStore, nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return make(self, nbytes)

    HostStore._slab = counted  # type: ignore[method-assign]
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of(arm, model, AdversarialStreams({}))
    seen = [len(made)]
    sharded.train(model, optimizer, rank, CPU, lambda step: seen.append(len(made)))
    return seen


@pytest.mark.parametrize("arm", ["chunked", "overlap", "stream"])
def test_all_host_memory_is_taken_at_construction(arm: str) -> None:
    """Not in a backward, where it blocks beside collectives: prime-rl#3212; a few slabs, not hundreds of calls:
    prime-rl#3234; not anew each step: prime-rl#3552, RLinf#328, NVIDIA-NeMo/RL#2248, DeepSpeed#6011"""
    assert on_ranks(1, slabs_made, arm) == [[1] * (1 + sharded.STEPS)]


def test_one_step_tensor_shared_by_a_checkpoint_counts_once_per_step() -> None:  # vllm-project/vime#427
    _, _, optimizer = trained(offloaded)
    saved = optimizer.state_dict()
    shared = torch.tensor(4.0)
    state = {key: moments | {"step": shared} for key, moments in saved["state"].items()}
    other = offloaded(model := net())
    other.load_state_dict(saved | {"state": state})
    model(torch.ones(2, WIDTH)).sum().backward()
    other.step()
    assert float(shared) == 4
    assert {float(moments["step"]) for moments in other.state.values()} == {5.0}
    assert other.kernel_steps() == (5, 5)


def test_no_step_is_made_up_to_create_state() -> None:  # Megatron-LM#5976, #5974
    """torch's checkpoint code calls step() with zero gradients on an optimizer that has no state yet."""
    optimizer = offloaded(model := net())
    before = [p.detach().clone() for p in model.parameters()]
    get_optimizer_state_dict(model, optimizer)
    assert same(before, [p.detach() for p in model.parameters()])
    assert {float(moments["step"]) for moments in optimizer.state.values()} == {0.0}


def test_every_scalar_of_a_param_group_is_restored() -> None:  # prime-rl#3560, #3561, SkyRL#1403
    options = {"lr": 0.3, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.4}
    saved = OffloadedAdamW(net().parameters(), **options, schedule=CHUNKED)
    saved.param_groups[0]["initial_lr"] = 0.6  # as a scheduler leaves it
    other = offloaded(net())
    other.load_state_dict(saved.state_dict())
    assert {k: v for k, v in other.param_groups[0].items() if k != "params"} == {
        k: v for k, v in saved.param_groups[0].items() if k != "params"
    }


@pytest.mark.parametrize("slots", [1, 2])
def test_no_step_stages_more_than_the_plan_says(slots: int) -> None:
    """Not even the first: prime-rl#3109, #4154; a copy back at once: DeepSpeed#8058"""
    schedule = dataclasses.replace(CHUNKED, slots=slots)
    _, _, optimizer = trained(lambda model: OffloadedAdamW(model.parameters(), schedule=schedule), steps=1)
    assert optimizer.staging_peak == optimizer._engine.staging_bytes <= slots * schedule.chunk_bytes
    assert optimizer.staging_peak < optimizer.bytes_per_step


def test_nothing_is_cured_by_emptying_the_allocators_cache() -> None:  # prime-rl#3199, DeepSpeed#8186
    sources = Path(kernels.__file__).parent.glob("*.py")
    assert [source.name for source in sources if "empty_cache" in source.read_text()] == []


def test_only_pinning_knows_of_cuda() -> None:
    """Streams, events and memory come from torch.get_device_module, so that other accelerators work as they do."""
    sources = Path(kernels.__file__).parent.glob("*.py")
    assert {source.name for source in sources if "torch.cuda" in source.read_text()} == {"hoststore.py", "pin_time.py"}
