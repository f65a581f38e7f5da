"""OffloadedAdamW as an ordinary optimizer: on plain modules, with groups, schedulers, late and frozen parameters."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from offbench.arms import find
from offbench.errors import OffbenchError
from offbench.offload import OffloadedAdamW, Schedule
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.hoststore import HostStore
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")
CHUNKED = Schedule("chunked", offloaded=True, chunk_bytes=1 << 14, slots=2)
SCHEDULES = [
    Schedule("none", offloaded=False, chunk_bytes=1 << 14),
    Schedule("main", offloaded=True, chunk_bytes=1 << 14, slots=None, copy_streams=False),
    CHUNKED,
]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))


def run(
    make: Callable[[nn.Sequential], torch.optim.Optimizer],
    steps: int = 5,
    before: Callable[[int, nn.Sequential, torch.optim.Optimizer], None] = lambda step, net, optimizer: None,
) -> tuple[list[torch.Tensor], nn.Sequential, torch.optim.Optimizer]:
    net = model()
    optimizer = make(net)
    for step in range(steps):
        before(step, net, optimizer)
        torch.manual_seed(step)
        net(torch.randn(8, 24)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()], net, optimizer


def plain(groups: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, fused=True, **options)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_param_groups_and_scheduler(schedule: Schedule) -> None:
    def groups(net: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.2, "lr": 3e-2},
            {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]

    def schedule_lr(step: int, net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        if step == 0:
            optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        else:
            optimizer.scheduler.step()

    expected, _, reference = run(lambda net: plain(groups(net)), before=schedule_lr)
    found, _, optimizer = run(
        lambda net: OffloadedAdamW(groups(net), schedule=schedule, streams=AdversarialStreams()), before=schedule_lr
    )
    assert same(expected, found)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-2 / 16)
    assert set(optimizer.param_groups[0]) == set(reference.param_groups[0])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_both_implementations(schedule: Schedule, implementation: str) -> None:
    flags = {implementation: True}
    expected, _, _ = run(lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, **flags))
    found, _, _ = run(
        lambda net: OffloadedAdamW(net.parameters(), lr=1e-2, schedule=schedule, implementation=implementation)
    )
    assert same(expected, found)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_a_parameter_frozen_for_a_while(schedule: Schedule) -> None:
    """No state, no decay while frozen; its own step count afterwards."""

    def thaw(step: int, net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        net[1].requires_grad_(step >= 2)

    def make(net: nn.Sequential, optimizer: Callable[..., Any]) -> torch.optim.Optimizer:
        net[1].requires_grad_(False)
        return optimizer(net.parameters())

    expected, _, reference = run(lambda net: make(net, lambda p: plain(p, lr=1e-2)), before=thaw)
    found, net, optimizer = run(
        lambda net: make(net, lambda p: OffloadedAdamW(p, lr=1e-2, schedule=schedule)), before=thaw
    )
    assert same(expected, found)
    assert float(optimizer.state[net[1].weight]["step"]) == 3
    assert sum(optimizer.where().values()) == 8 * sum(p.numel() for p in net.parameters())
    assert float(optimizer.state[net[0].weight]["step"]) == 5
    assert len(optimizer.state) == len(reference.state)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_add_param_group(schedule: Schedule) -> None:
    def add(step: int, net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(net[3].parameters()), "lr": 0.5})

    def first(net: nn.Sequential) -> list[nn.Parameter]:
        return list(net[:3].parameters())

    expected, _, _ = run(lambda net: plain(first(net), lr=1e-2), before=add)
    found, _, optimizer = run(lambda net: OffloadedAdamW(first(net), lr=1e-2, schedule=schedule), before=add)
    assert same(expected, found)
    assert sum(optimizer.where().values()) == 8 * sum(p.numel() for p in model().parameters())


def test_parameters_without_gradient_keep_their_state_and_do_not_move() -> None:
    net = model()
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED)
    net[0](torch.randn(2, 24)).sum().backward()
    optimizer.step()
    assert optimizer.ledger is not None
    assert optimizer.ledger.in_bytes < optimizer.bytes_per_step
    assert float(optimizer.state[net[3].weight]["step"]) == 0


def test_state_stays_at_its_address() -> None:
    _, net, optimizer = run(lambda net: OffloadedAdamW(net.parameters(), schedule=CHUNKED), steps=1)
    before = [optimizer.state[p]["exp_avg"].data_ptr() for p in net.parameters()]
    for _ in range(3):
        net(torch.randn(8, 24)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert before == [optimizer.state[p]["exp_avg"].data_ptr() for p in net.parameters()]


def test_debug_changes_no_bit() -> None:
    expected, _, _ = run(lambda net: plain(net.parameters()))
    found, _, _ = run(
        lambda net: OffloadedAdamW(net.parameters(), schedule=CHUNKED, debug=True, streams=AdversarialStreams())
    )
    assert same(expected, found)


def test_what_would_not_be_exact_is_refused() -> None:
    net = model()
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        with pytest.raises(OffbenchError, match=option):
            OffloadedAdamW([{"params": net.parameters(), option: True}], schedule=CHUNKED)
        with pytest.raises(OffbenchError, match=option):
            OffloadedAdamW(net.parameters(), schedule=CHUNKED, **{option: True})
    with pytest.raises(OffbenchError, match="implementation='foreach' instead"):
        OffloadedAdamW(net.parameters(), schedule=CHUNKED, foreach=True)
    with pytest.raises(OffbenchError, match="all groups run one kernel"):
        OffloadedAdamW([{"params": net.parameters(), "fused": True}], schedule=CHUNKED, implementation="foreach")
    with pytest.raises(OffbenchError, match="that is Adam, not AdamW"):
        OffloadedAdamW([{"params": net.parameters(), "decoupled_weight_decay": False}], schedule=CHUNKED)
    with pytest.raises(OffbenchError, match="implementation='forloop': choose 'fused' or 'foreach'"):
        OffloadedAdamW(net.parameters(), schedule=CHUNKED, implementation="forloop")
    with pytest.raises(OffbenchError, match="in a param group twice"), pytest.warns(UserWarning, match="duplicate"):
        OffloadedAdamW([net[0].weight, *net.parameters()], schedule=CHUNKED)
    with pytest.raises(TypeError, match="no option nesterov"):
        OffloadedAdamW(net.parameters(), schedule=CHUNKED, nesterov=True)
    with pytest.raises(OffbenchError, match="complex"):
        OffloadedAdamW(
            [nn.Parameter(torch.ones(2, dtype=torch.complex64))], schedule=CHUNKED, implementation="foreach"
        )
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED, fused=True, amsgrad=False)
    with pytest.raises(OffbenchError, match="closure"):
        optimizer.step(lambda: torch.tensor(0.0))
    with pytest.raises(OffbenchError, match="amsgrad"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "amsgrad": True})
    assert len(optimizer.param_groups) == 1, "what is refused is not added"
    with pytest.raises(OffbenchError, match="no parameter requires a gradient"):
        OffloadedAdamW([nn.Parameter(torch.ones(2), requires_grad=False)], schedule=CHUNKED)
    meta = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(OffbenchError, match=r"shape \(2,\) is on the meta device; call to_empty"):
        OffloadedAdamW([meta], schedule=CHUNKED)
    with optimizer.settled(), pytest.raises(OffbenchError, match=r"settled"):
        optimizer.step()


def test_saved_states_that_do_not_fit_are_refused() -> None:
    optimizer = OffloadedAdamW(model().parameters(), schedule=CHUNKED)
    fewer = plain(list(model().parameters())[:3]).state_dict()
    with pytest.raises(OffbenchError, match="hold"):
        optimizer.load_state_dict(fewer)
    other = nn.Sequential(*(nn.Linear(20, 24) for _ in range(4)))
    reference = plain(other.parameters())
    sum(layer(torch.ones(20)).sum() for layer in other).backward()
    reference.step()
    with pytest.raises(OffbenchError, match=r"exp_avg of parameter 0 is \(24, 20\)"):
        optimizer.load_state_dict(reference.state_dict())
    sgd = torch.optim.SGD(model().parameters(), momentum=0.9)
    saved = sgd.state_dict() | {"state": {0: {"momentum_buffer": torch.ones(1)}}}
    with pytest.raises(OffbenchError, match="not AdamW's"):
        optimizer.load_state_dict(saved)


def dropped(rank: int, arm: str) -> tuple[bool, bool, bool]:
    """Drop the optimizer while updates are pending: parameters get them, the model forgets it, host memory goes."""
    expected = sharded.build(CPU)
    reference = torch.optim.AdamW(expected.parameters(), **sharded.OPTIONS, fused=True)
    sharded.train(expected, reference, rank, CPU, steps=range(2))

    net = sharded.build(CPU)
    optimizer = sharded.optimizer_of(arm, net, AdversarialStreams({}), lead=2, ahead=0)
    sharded.train(net, optimizer, rank, CPU, steps=range(2))
    store = weakref.ref(optimizer.store)
    del optimizer
    gc.collect()
    equal = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(net.parameters(), expected.parameters(), strict=True)
    )
    wrapped = any("unshard" in vars(group) for group in groups_of(net))
    return equal, wrapped, store() is None


def groups_of(net: nn.Module) -> list[Any]:
    from offbench.offload.fsdp import param_groups

    return param_groups(net)


@pytest.mark.parametrize("arm", ["overlap", "stream", "zerocopy"])
def test_a_dropped_optimizer_lets_go_of_model_and_memory(arm: str) -> None:
    assert on_ranks(2, dropped, arm) == [(True, False, True)] * 2


def replaced(rank: int, arm: str) -> list[str]:
    """A second optimizer on the same model, the first one collected afterwards: the second one's waits stay."""
    snapshots = []
    for offloaded in (False, True):
        net = sharded.build(CPU)
        for steps in (range(2), range(2, 5)):
            if offloaded:
                new = sharded.optimizer_of(arm, net, AdversarialStreams({}), lead=2, ahead=0)
            else:
                new = torch.optim.AdamW(net.parameters(), **sharded.OPTIONS, fused=True)
            optimizer = new
            gc.collect()
            sharded.train(net, optimizer, rank, CPU, steps=steps)
        snapshots.append(sharded.snapshot(net, optimizer))
    return sharded.differences(*snapshots)


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_an_optimizer_that_replaces_another_is_waited_for(arm: str) -> None:
    assert on_ranks(2, replaced, arm) == [[], []]


class ValueHead(nn.Sequential):
    """One row in all on two ranks: a shard of no bytes on the second, in one chunk with others."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(16, 16), nn.Linear(16, 1))


def with_empty_shards(rank: int, arm: str) -> list[str]:
    snapshots = []
    for offloaded in (False, True):
        net = ValueHead()
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        if offloaded:
            optimizer = sharded.optimizer_of(arm, net, AdversarialStreams({}))
        else:
            optimizer = torch.optim.AdamW(net.parameters(), **sharded.OPTIONS, fused=True)
        for step in range(4):
            net(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        snapshots.append(sharded.snapshot(net, optimizer))
    return sharded.differences(*snapshots)


@pytest.mark.parametrize("arm", ["chunked", "overlap", "stream"])
def test_a_shard_of_no_bytes(arm: str) -> None:
    assert on_ranks(2, with_empty_shards, arm) == [[], []]


def kept_gradients(rank: int, arm: str) -> bool:
    """Whoever keeps a gradient across step() keeps its values, though step() takes `p.grad`."""
    net = sharded.build(CPU)
    optimizer = sharded.optimizer_of(arm, net, AdversarialStreams({}), lead=99)
    sharded.train(net, optimizer, rank, CPU, steps=range(1))
    net(torch.ones(4, sharded.WIDTH)).backward()
    kept = [p.grad for p in net.parameters()]
    before = [gradient.to_local().clone() for gradient in kept]
    optimizer.step()
    net(torch.ones(4, sharded.WIDTH)).backward()
    optimizer.drain()
    found = [torch.equal(a.to_local(), b) for a, b in zip(kept, before, strict=True)]
    buffers = []
    for p in net.parameters():  # of which `p.grad` is a view
        buffers.append(p.grad.to_local().flatten().clone())
        p.grad = DTensor.from_local(buffers[-1].view(p.to_local().shape), p.device_mesh, p.placements)
    before = [buffer.clone() for buffer in buffers]
    optimizer.step()
    optimizer.drain()
    return all(found) and all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_kept_gradients_keep_their_values(arm: str) -> None:
    assert on_ranks(2, kept_gradients, arm) == [True, True]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_the_default_device_is_not_where_counters_are(schedule: Schedule) -> None:
    """On a GPU the host would wait once a parameter for them to be read."""
    net = model()
    x = torch.ones(2, 24)
    with torch.device("meta"):
        optimizer = OffloadedAdamW(net.parameters(), schedule=schedule)
        net(x).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert {(state["step"].device.type, float(state["step"])) for state in optimizer.state.values()} == {("cpu", 1.0)}


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_counters_count_beyond_what_the_default_dtype_can(implementation: str) -> None:
    """bfloat16 knows no 257."""
    counted, nets = [], []
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for offloaded in (False, True):
            nets.append(nn.Parameter(torch.ones(8, dtype=torch.float32)))
            optimizer: Any = torch.optim.AdamW(nets[-1:], **{implementation: True})
            if offloaded:
                optimizer = OffloadedAdamW(nets[-1:], schedule=CHUNKED, implementation=implementation)
            for step in range(260):
                nets[-1].grad = torch.full_like(nets[-1], step % 7 - 3)
                optimizer.step()
            counted.append(optimizer.state[nets[-1]]["step"])
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(*nets)
    assert counted[0].dtype == counted[1].dtype == torch.float32
    assert float(counted[0]) == float(counted[1]) == 260


def half_reached(rank: int, arm: str, debug: bool) -> list[str]:
    """Every second backward reaches the first block only, with gradients zeroed, or set to None in the last steps."""
    snapshots = []
    for offloaded in (False, True):
        net, streams = sharded.build(CPU), AdversarialStreams({})
        if offloaded:
            optimizer: Any = sharded.optimizer_of(arm, net, streams, lead=1, ahead=0)
            optimizer._debug = debug
        else:
            optimizer = torch.optim.AdamW(net.parameters(), **sharded.OPTIONS, fused=True)
        net(torch.ones(4, sharded.WIDTH)).backward()  # FSDP2 wants the root's forward first
        for step in range(6):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 3)
            if step in (2, 4):  # zeros stay zeros, and None stays None
                optimizer.zero_grad(set_to_none=False)
            reached = net if step % 2 else net.blocks[0]
            reached(torch.ones(4, sharded.WIDTH) * (step + 1)).square().mean().backward()
        assert streams.order.violations == []
        snapshots.append(sharded.snapshot(net, optimizer))
    return sharded.differences(*snapshots)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_gradients_that_are_zeroed_decay_what_the_next_backward_does_not_reach(arm: str, debug: bool) -> None:
    assert on_ranks(1, half_reached, arm, debug) == [[]]


def fails_with_a_step_owed(rank: int, arm: str, fails: bool) -> list[str]:
    """In a debug run a second step follows the first one with no forward between, and finds no memory, or does."""
    snapshots = []
    for offloaded in (False, True):
        net, streams = sharded.build(CPU), AdversarialStreams({})
        optimizer: Any = torch.optim.AdamW(net.parameters(), **sharded.OPTIONS, fused=True)
        if offloaded:
            optimizer = sharded.optimizer_of(arm, net, streams, lead=1, ahead=0)
            optimizer._debug = True
        net(torch.ones(4, sharded.WIDTH)).square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        optimizer.step()
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if not fails:
            optimizer.step()
        elif offloaded:
            streams.allocate = refuse_device_memory  # type: ignore[method-assign]
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
        assert streams.order.violations == []
        snapshots.append(sharded.snapshot(net, optimizer))
    return sharded.differences(*snapshots)


@pytest.mark.parametrize(("arm", "fails"), [("overlap", False), ("stream", False), ("stream", True)])
def test_a_debug_step_hides_nothing_from_updates_that_are_still_owed(arm: str, fails: bool) -> None:
    assert on_ranks(1, fails_with_a_step_owed, arm, fails) == [[]]


def out_of_memory(rank: int, arm: str, debug: bool) -> list[str]:
    """The second of four steps finds no memory; plain AdamW does not take it. In debug runs parameters are NaN until
    their update, and this one never comes."""
    snapshots = []
    for offloaded in (False, True):
        net, streams = sharded.build(CPU), AdversarialStreams({})
        optimizer: Any = torch.optim.AdamW(net.parameters(), **sharded.OPTIONS, fused=True)
        if offloaded:
            optimizer = sharded.optimizer_of(arm, net, streams)
            optimizer._debug = debug
        for step in range(4):
            loss = net(torch.ones(4, sharded.WIDTH) * (step + 1)).square().mean()
            with pytest.MonkeyPatch.context() as patch:
                if step == 1:
                    patch.setattr(streams, "allocate", refuse_device_memory)
                loss.backward()
                if step != 1:
                    optimizer.step()
                elif offloaded:
                    with pytest.raises(torch.OutOfMemoryError):
                        optimizer.step()
            optimizer.zero_grad()
        assert streams.order.violations == []
        snapshots.append(sharded.snapshot(net, optimizer))
    return sharded.differences(*snapshots)


def refuse_device_memory(nbytes: int) -> torch.Tensor:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_a_step_that_finds_no_memory_is_left_out(arm: str, debug: bool) -> None:
    assert on_ranks(1, out_of_memory, arm, debug) == [[]]


def runs_out_while_hiding(rank: int) -> bool:
    """In a debug run a step may find no memory to put its parameters away in."""
    net = sharded.build(CPU)
    optimizer = sharded.optimizer_of("overlap", net, AdversarialStreams({}))
    optimizer._debug = True
    net(torch.ones(4, sharded.WIDTH)).square().mean().backward()
    before, made = sharded.snapshot(net, optimizer), [0]
    empty_like = torch.empty_like

    def third(like: torch.Tensor) -> torch.Tensor:
        made[0] += 1
        if made[0] == 3:
            raise torch.OutOfMemoryError
        return empty_like(like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", third)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    return sharded.differences(before, sharded.snapshot(net, optimizer)) == []


def test_a_debug_step_without_memory_to_hide_parameters_in_changes_none() -> None:
    assert on_ranks(1, runs_out_while_hiding) == [True]


def after_detach(rank: int) -> str:
    net = sharded.build(CPU)
    optimizer = sharded.optimizer_of("stream", net, None)
    sharded.train(net, optimizer, rank, CPU, steps=range(1))
    optimizer.detach()
    with pytest.raises(OffbenchError) as refused:
        sharded.train(net, optimizer, rank, CPU, steps=range(1))
    return str(refused.value)


def test_no_step_after_detach() -> None:
    assert on_ranks(2, after_detach)[0].startswith("step() after detach()")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_a_gradient_scaler_unscales_and_skips(schedule: Schedule) -> None:
    """torch's fused AdamW takes the scale into its kernel; this one must not claim to."""
    found = []
    for scale in (None, 1024.0):  # a power of two changes no bit
        net = model()
        optimizer = OffloadedAdamW(net.parameters(), 1e-2, schedule=schedule)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for step in range(4):
            torch.manual_seed(step)
            loss = net(torch.randn(8, 24)).square().mean()
            if step == 2 and scale is not None:
                scaler.scale(loss * float("inf")).backward()
                scaler.step(optimizer)
                scaler.update(scale)
                optimizer.zero_grad()
                torch.manual_seed(step)
                loss = net(torch.randn(8, 24)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(scale)
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in net.parameters()])
    assert same(*found)


def test_an_option_set_later_is_refused_at_the_step() -> None:
    net = model()
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED)
    optimizer.param_groups[0]["amsgrad"] = True
    net(torch.ones(1, 24)).sum().backward()
    with pytest.raises(OffbenchError, match="amsgrad"):
        optimizer.step()
    optimizer.param_groups[0].update(amsgrad=False, lr=torch.tensor(0.1, device="meta"))
    with pytest.raises(OffbenchError, match="lr is a tensor on the device"):
        optimizer.step()


@pytest.mark.parametrize("fault", ["amsgrad", "shape", "step"])
def test_a_state_that_does_not_fit_changes_nothing(fault: str) -> None:
    _, net, optimizer = run(lambda n: OffloadedAdamW(n.parameters(), 1e-2, schedule=CHUNKED))
    saved = torch.optim.AdamW(model().parameters(), 7.0, fused=True).state_dict()
    saved["state"] = {
        i: {"step": torch.tensor(9.0), "exp_avg": torch.ones(p.shape), "exp_avg_sq": torch.ones(p.shape)}
        for i, p in enumerate(net.parameters())
    }
    if fault == "amsgrad":
        saved["param_groups"][0]["amsgrad"] = True
    elif fault == "shape":
        saved["state"][1]["exp_avg_sq"] = torch.ones(3)
    else:
        del saved["state"][1]["step"]
    before = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    with pytest.raises(OffbenchError, match="amsgrad" if fault == "amsgrad" else "parameter 1"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert same(before, [optimizer.state[p]["exp_avg"] for p in net.parameters()])


def test_a_state_of_adam_is_loaded_as_torch_loads_it() -> None:
    """Its groups say that weight decay is coupled, or how that process ran: neither is what this optimizer does."""
    adam = run(lambda net: torch.optim.Adam(net.parameters(), 1e-2, weight_decay=0.1, fused=True))[2]
    adam.param_groups[0]["capturable"] = True

    def load(step: int, net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        if step == 2:
            saved = copy.deepcopy(adam.state_dict())
            optimizer.load_state_dict(saved)
            optimizer.param_groups[0]["capturable"] = False

    expected, _, _ = run(lambda net: plain(net.parameters()), before=load)
    found, _, optimizer = run(lambda net: OffloadedAdamW(net.parameters(), schedule=CHUNKED), before=load)
    assert same(expected, found)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_a_rate_that_is_a_tensor_is_not_shared_with_the_state_it_was_loaded_from() -> None:
    saved = copy.deepcopy(plain(model().parameters(), lr=torch.tensor(0.5)).state_dict())
    optimizer = OffloadedAdamW(model().parameters(), schedule=CHUNKED)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(0.25)  # as a scheduler does
    assert float(saved["param_groups"][0]["lr"]) == 0.5


def test_hooks_on_loading_run_as_torchs_do() -> None:
    optimizer = OffloadedAdamW(model().parameters(), lr=0.1, schedule=CHUNKED)
    saved, seen = optimizer.state_dict(), []

    def halve(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict | {"param_groups": [group | {"lr": group["lr"] / 2} for group in state_dict["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(loaded.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    assert seen == [0.05]
    assert saved["param_groups"][0]["lr"] == 0.1


def test_sparse_gradients_and_groups_without_an_order_are_refused() -> None:
    net = nn.Embedding(4, 8, sparse=True)
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(OffbenchError, match="sparse=False"):
        optimizer.step()
    assert net.weight.grad is not None
    with pytest.raises(TypeError, match="set"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(2))}})


def refuse_memory(self: HostStore, sizes: object) -> None:
    raise OffbenchError("none left")


def test_a_group_that_is_refused_or_finds_no_memory_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OffloadedAdamW(model().parameters(), schedule=CHUNKED)
    with pytest.raises(OffbenchError, match="meta"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})

    late = nn.Parameter(torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(HostStore, "extend", refuse_memory)
        with pytest.raises(OffbenchError, match="none left"):
            optimizer.add_param_group({"params": [late]})
    assert len(optimizer.param_groups) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(2)
    optimizer.step()
    assert float(optimizer.state[late]["step"]) == 1


def test_a_copy_or_a_cleared_state_is_refused() -> None:
    """Either would share host memory, or update twice."""
    net = model()
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(OffbenchError, match=r"neither copied nor pickled.*state_dict\(\)"):
            make(optimizer)
    optimizer.state.clear()
    net(torch.ones(1, 24)).sum().backward()
    with pytest.raises(OffbenchError, match="make a new optimizer"):
        optimizer.step()


def test_moments_that_a_trainer_has_replaced_are_refused() -> None:
    """A trainer that offloads the optimizer itself moves them to the device; a checkpoint would hold those copies."""
    net = model()
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED)
    saved, last = optimizer.state_dict(), net[3].bias
    optimizer.state[last] = dict(optimizer.state[last])  # the same tensors: as `.to("cpu")` leaves them
    optimizer.state_dict()
    optimizer.state[last]["exp_avg_sq"] = optimizer.state[last]["exp_avg_sq"].clone()
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(OffbenchError, match="its moments replaced by others"):
            use()
    optimizer.state[net[0].weight]["exp_avg"] = optimizer.state[net[0].weight]["exp_avg"].clone()
    net(torch.ones(1, 24)).sum().backward()
    with pytest.raises(OffbenchError, match="switch that off"):
        optimizer.step()


def test_reading_the_state_of_a_frozen_parameter_leaves_it_trainable() -> None:
    net = model()
    net[1].requires_grad_(False)
    optimizer = OffloadedAdamW(net.parameters(), schedule=CHUNKED)
    assert optimizer.state[net[1].weight] == {}, "which makes an entry of it"
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    net[1].requires_grad_(True)
    net(torch.ones(1, 24)).sum().backward()
    optimizer.step()
    assert optimizer.state[net[1].weight]["step"] == 1


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_moments_lie_in_memory_as_their_parameters_do(implementation: str) -> None:
    """torch's fused kernel walks memory: where a weight is channels_last, so are its moments."""

    def trained(make: Callable[[Any], torch.optim.Optimizer], saved: Any = None) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        optimizer = make(net.parameters())
        if saved is not None:
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch trains on in what it is given
        for step in range(2):
            torch.manual_seed(step)
            net(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net, optimizer

    def reference(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-2, **{implementation: True})

    def offloaded(parameters: Any) -> torch.optim.Optimizer:
        return OffloadedAdamW(parameters, 1e-2, schedule=CHUNKED, implementation=implementation)

    saved = None
    for _ in range(2):  # from the start, then from what torch saved
        (expected, theirs), (found, ours) = trained(reference, saved), trained(offloaded, saved)
        assert torch.equal(expected.weight, found.weight)
        assert ours.state[found.weight]["exp_avg"].stride() == found.weight.stride()
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(theirs.state[expected.weight][moment], ours.state[found.weight][moment])
        saved = copy.deepcopy((expected.state_dict(), theirs.state_dict()))


def late_group(rank: int) -> list[str]:
    """A group added to a deferred optimizer: its parameters are waited for, too."""

    def add(step: int, optimizer: torch.optim.Optimizer, net: sharded.Model) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(net.blocks[2].parameters()), "weight_decay": 0.3})

    snapshots = []
    for offloaded in (False, True):
        net = sharded.build(CPU)
        first = [p for p in net.parameters() if all(p is not q for q in net.blocks[2].parameters())]
        if offloaded:
            schedule = find("overlap")[0].schedule(find("overlap")[0].resolve(chunk_bytes=1 << 20, slots=2, lead=1))
            streams = AdversarialStreams({})
            optimizer = OffloadedAdamW(first, **sharded.OPTIONS, model=net, schedule=schedule, streams=streams)
        else:
            optimizer = torch.optim.AdamW(first, **sharded.OPTIONS, fused=True)
        sharded.train(net, optimizer, rank, CPU, between=lambda step, o=optimizer, n=net: add(step, o, n))
        snapshots.append(sharded.snapshot(net, optimizer))
    return sharded.differences(*snapshots)


def test_a_group_added_to_overlap() -> None:
    assert on_ranks(2, late_group) == [[], []]


def late_and_unmanaged(rank: int, arm: str) -> tuple[list[str], list[str]]:
    """A group whose parameter no FSDP2 unit gathers, added with updates pending: what is warned, and what differs."""
    snapshots, texts = [], []
    for offloaded in (False, True):
        net, extra = sharded.build(CPU), nn.Parameter(torch.ones(8))
        if offloaded:
            optimizer = sharded.optimizer_of(arm, net, AdversarialStreams({}), lead=1, ahead=0)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), **sharded.OPTIONS, fused=True)
        beside = torch.optim.AdamW([extra], **sharded.OPTIONS, fused=True)  # which takes no list of both kinds

        def between(step: int, new: Any = optimizer if offloaded else beside, extra: nn.Parameter = extra) -> None:
            extra.grad = torch.ones(8)
            if isinstance(new, OffloadedAdamW):
                if step == 0:
                    new.add_param_group({"params": [extra]})
            elif step > 0:
                new.param_groups[0]["lr"] = sharded.OPTIONS["lr"] * (step + 1)
                new.step()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharded.train(net, optimizer, rank, CPU, between, range(3))
        texts += [str(warning.message) for warning in caught]
        snapshots.append(sharded.snapshot(net, optimizer) | {"extra": extra.detach().clone()})
    return texts, sharded.differences(*snapshots)


def refused_and_unmanaged(rank: int) -> tuple[bool, list[str]]:
    """The same group where memory for it is refused: whether updates are deferred as before, and what differs."""
    snapshots = []
    for offloaded in (False, True):
        net = sharded.build(CPU)
        optimizer: Any = torch.optim.AdamW(net.parameters(), **sharded.OPTIONS, fused=True)
        if offloaded:
            optimizer = sharded.optimizer_of("stream", net, AdversarialStreams({}))
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                patch.setattr(HostStore, "extend", refuse_memory)
                warnings.filterwarnings("ignore", message=".*updates run synchronously")
                with pytest.raises(OffbenchError, match="none left"):
                    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8))]})
        sharded.train(net, optimizer, rank, CPU, steps=range(2))
        snapshots.append(sharded.snapshot(net, optimizer))
    return optimizer.schedule.deferred, sharded.differences(*snapshots)


def test_a_late_group_that_finds_no_memory_leaves_updates_deferred() -> None:
    assert on_ranks(1, refused_and_unmanaged) == [(True, [])]


@pytest.mark.parametrize("arm", ["overlap", "stream"])
def test_a_late_group_that_nobody_gathers_ends_the_deferral_and_says_so(arm: str) -> None:
    ((texts, differ),) = on_ranks(1, late_and_unmanaged, arm)
    assert differ == []
    assert len(texts) == 1
    assert "no FSDP2 group manages parameter of shape (8,); updates run synchronously" in texts[0]
