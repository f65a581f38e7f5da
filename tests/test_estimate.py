from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbench import arms
from offbench.config import GIB, Mode, RunSpec, Workload
from offbench.estimate import cautions, estimate, fit_layers, shortfalls, staging_bytes, with_layers
from offbench.offload.copies import Copier
from offbench.offload.engines import engine_of
from offbench.offload.flow import FlowEngine
from offbench.offload.hoststore import HostStore
from offbench.offload.streams import DeviceStreams
from offbench.planner.inputs import of_model
from offbench.workload.presets import find
from tests.hosts import host


def big(arm: str, **workload: object) -> RunSpec:
    """The large model as one H200 rehearses it."""
    return RunSpec(
        workload=Workload.model_validate({"ep": 8, **workload}),
        arm=arms.ARMS[arm].resolve(),
        mode=Mode(kind="rehearsal", device="cuda", world=8, nproc=1),
    )


@pytest.mark.parametrize(("arm", "measured"), [("none", 60.8), ("main", 56.9), ("chunked", 32.4), ("overlap", 33.2)])
def test_gpu_estimates_are_near_what_was_measured_on_an_h200(arm: str, measured: float) -> None:
    assert estimate(big(arm)).gpu_bytes / GIB == pytest.approx(measured, rel=0.05)


def test_pinned_state_is_two_moments_of_fp32() -> None:
    assert estimate(big("overlap")).pinned_bytes / GIB == pytest.approx(28.435, abs=0.01)
    assert estimate(big("none")).pinned_bytes == 0
    inputs = 48 * 16384 * 2048 * 2
    more = estimate(big("overlap", activation_offload=True))
    assert more.pinned_bytes - estimate(big("overlap")).pinned_bytes == inputs


def test_a_replica_and_what_was_sent_last_are_host_memory() -> None:
    plain, sent = estimate(big("overlap")), estimate(big("overlap", broadcast_every=1))
    params = find("qwen3-30b-a3b").local_params(8, 8)
    assert sent.pinned_bytes - plain.pinned_bytes == sent.host_bytes - plain.host_bytes == 2 * params
    room = host(1, host_gib=(sent.host_bytes >> 30) + 4)
    assert shortfalls(big("overlap"), room) == []
    assert "of host memory" in shortfalls(big("overlap", broadcast_every=1), room)[0]


def test_a_whole_first_step_holds_all_state_on_the_gpu() -> None:
    spec = big("chunked").model_copy(update={"arm": arms.ARMS["chunked"].resolve(first_step="whole")})
    assert estimate(spec).gpu_bytes == estimate(big("main")).gpu_bytes


def test_deferred_staging_is_still_there_when_the_next_forward_begins() -> None:
    spec = big("overlap")
    hasty = spec.model_copy(update={"arm": arms.ARMS["overlap"].resolve(lead=1)})
    assert estimate(hasty).gpu_bytes > estimate(spec).gpu_bytes, "fewer gradients are gone by then"
    small, staged = (estimate(big(arm, layers=4)).gpu_bytes for arm in ("chunked", "overlap"))
    assert staged > small


@pytest.mark.parametrize(
    ("arm", "options", "gib"),
    [("chunked", {}, 2.43), ("overlap", {}, 4.75), ("chunked", {"pieces": 1}, 1.84), ("overlap", {"pieces": 1}, 3.58),
     ("stream", {"staging_bytes": GIB}, 1.0), ("stream", {"staging_bytes": 0}, 0.58),
     ("stream", {"staging_bytes": 0, "world": 2}, 1.0), ("overlap", {"world": 2}, 4.87)],
)  # fmt: skip
def test_staging_is_what_uneven_parameters_take(arm: str, options: dict[str, int], gib: float) -> None:
    """On two ranks an expert matrix of 1.5 GiB is cut, and one of 0.75 GiB beside it is not."""
    world = options.get("world", 8)
    schedule = arms.ARMS[arm].schedule(arms.ARMS[arm].resolve(**{k: v for k, v in options.items() if k != "world"}))
    assert staging_bytes("qwen3-30b-a3b", world, world, 48, schedule) / GIB == pytest.approx(gib, abs=0.01)


@pytest.mark.parametrize("arm", ["chunked", "overlap", "stream"])
@pytest.mark.parametrize("cap", [1 << 14, 1 << 16, 1 << 30])
def test_staging_is_what_the_engine_takes(arm: str, cap: int) -> None:
    """At the smallest cap every matrix of `tiny` is cut."""
    resolved = arms.ARMS[arm].resolve(chunk_bytes=cap, **({"staging_bytes": 0} if arm == "stream" else {}))
    schedule = arms.ARMS[arm].schedule(resolved)
    chunks = of_model(find("tiny"), 1, 1, 2, schedule.chunk_bytes, cut_above=schedule.cut_above).chunks
    store, cpu = HostStore([chunk.nbytes for chunk in chunks]), torch.device("cpu")
    engine = engine_of(schedule)(chunks, store, schedule, DeviceStreams(cpu), Copier())
    taken = engine._allowance.arena_bytes if isinstance(engine, FlowEngine) else engine.staging_bytes
    assert staging_bytes("tiny", 1, 1, 2, schedule) == taken > 0
    if cap == 1 << 14:
        assert max(chunk.nbytes for chunk in chunks) <= cap


def test_an_automatic_budget_is_planned_with_nothing_resident() -> None:
    """It takes only what it finds free; all of the state is pinned before that."""
    fixed, auto = (
        big("stream").model_copy(update={"arm": arms.ARMS["stream"].resolve(state_budget=budget)})
        for budget in (0, "auto")
    )
    assert estimate(auto) == estimate(fixed)


@given(
    layers=st.integers(1, 47), tokens=st.sampled_from([1024, 16384, 65536]), arm=st.sampled_from(["none", "overlap"])
)
def test_more_work_never_needs_less_memory(layers: int, tokens: int, arm: str) -> None:
    small, deep = (estimate(big(arm, layers=n, seq_len=tokens)) for n in (layers, layers + 1))
    longer = estimate(big(arm, layers=layers, seq_len=2 * tokens))
    assert small.gpu_bytes < deep.gpu_bytes
    assert small.gpu_bytes <= longer.gpu_bytes
    assert small.gpu_bytes < longer.gpu_bytes or arm == "overlap", "its staging at step() may set the peak"
    assert small.host_bytes <= deep.host_bytes


def test_what_cannot_fit_is_said_with_the_numbers() -> None:
    assert shortfalls(big("none"), host(1)) == []
    assert shortfalls(big("none"), host(1, gpu_gib=40)) == [
        "needs about 61.8 GiB on each GPU, 37.3 of 40.0 GiB are usable"
    ]
    assert shortfalls(big("chunked"), host(1, gpu_gib=40)) == []
    assert shortfalls(big("chunked"), host(1, host_gib=16)) == [
        "needs about 32.4 GiB of host memory for 1 process, 15.2 GiB are available"
    ]


def test_locked_memory_and_busy_gpus_are_cautions() -> None:
    low = replace(host(1), memlock_bytes=8 << 20)
    assert [line.partition(" while")[0] for line in cautions(big("main"), low)] == ["pins 28.4 GiB a rank"]
    assert cautions(big("none"), low) == []
    busy = replace(host(1), gpus=(replace(host(1).gpus[0], free_bytes=20 * GIB),))
    assert len(cautions(big("none"), busy)) == 1


def test_the_deepest_model_that_fits_is_found() -> None:
    specs = [big("none"), big("overlap")]
    card = host(1, gpu_gib=24)
    layers = fit_layers(specs, card)
    assert 1 <= layers < 48
    assert not any(shortfalls(with_layers(spec, layers), card) for spec in specs)
    assert any(shortfalls(with_layers(spec, layers + 1), card) for spec in specs)
    assert fit_layers(specs, host(1)) == 48
    assert fit_layers(specs, host(1, gpu_gib=2)) == 0


def test_the_default_depth_does_not_depend_on_what_is_free_now() -> None:
    idle = host(1, host_gib=64)
    assert fit_layers([big("main")], replace(idle, host_available_bytes=GIB)) == fit_layers([big("main")], idle)


def test_on_a_cpu_everything_is_host_memory() -> None:
    tiny = Workload(model="tiny", layers=4, seq_len=128)
    spec = RunSpec(workload=tiny, arm=arms.ARMS["chunked"].resolve(), mode=Mode(device="cpu", world=2, nproc=2))
    need = estimate(spec)
    assert (need.gpu_bytes, need.pinned_bytes) == (0, 0)
    assert shortfalls(spec, host(host_gib=8)) == []
