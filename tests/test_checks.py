"""A launch's checks of itself: a good report passes all of them, and each bad one is refused by one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offbench import arms
from offbench.checks import check_launch
from offbench.config import GIB, Mode, RunSpec, Window, Workload
from offbench.rank_report import RankReport
from offbench.record import Broadcast, Host, Link, Moved, Peak, StateAt
from offbench.window import RankResult, Scalars, Traffic

LAYERS, PARAMS, STEPS = 2, 1000, 4
STATE, CHUNK = 8 * PARAMS, 4000
STOCK, KERNEL = "stock", "kernel"
NAMES = [
    *("schedule", "state", "memory", "updates", "fsdp copies", "readbacks", "gradient pool", "activations", "window"),
    *("finite", "norms agree"),
]


def spec(arm: str = "chunked", mode: str = "real", device: str = "cuda", **options: Any) -> RunSpec:
    """Two ranks of two layers, one step of warm-up and three measured."""
    ways = {
        key: options.pop(key)
        for key in ("fsdp_copies", "readbacks", "gradient_pool", "activation_copies")
        if key in options
    }
    knobs = {key: options.pop(key) for key in ("state_budget", "pieces", "staging_bytes") if key in options}
    nproc = 1 if mode == "rehearsal" else 2
    return RunSpec(
        workload=Workload.model_validate({"model": "tiny", "layers": LAYERS, "seq_len": 32, "ep": 2, **options}),
        arm=arms.ARMS[arm].resolve(**ways, **knobs),
        window=Window(warmup=1, steps=STEPS - 1),
        mode=Mode.model_validate({"kind": mode, "device": device, "world": 2, "nproc": nproc}),
    )


def result(*norms: float, loss: float = 2.0) -> RankResult:
    """What a rank measured; its norms step by step."""
    scalars = [Scalars(loss, norm, 1.0) for norm in norms or (1.0,) * STEPS]
    return RankResult(1, [1.0] * 3, 3.0, 3.0, 0.0, 1.0, {}, None, scalars, Peak())


def test_two_drained_windows_must_agree_with_the_step() -> None:
    """Each rank's window has three steps of a second."""
    good = check_launch(
        spec(),
        [report(0, check_window=True, window_slope_s=1.004), report(1, check_window=True, window_slope_s=0.996)],
    )
    assert list(good) == [*NAMES[:9], "window slope", *NAMES[9:]]
    assert set(good.values()) == {"ok"}
    found = check_launch(
        spec(), [report(0, check_window=True, window_slope_s=1.0), report(1, check_window=True, window_slope_s=1.02)]
    )
    lacking = check_launch(spec(), [report(0, check_window=True), report(1, check_window=True)])
    assert lacking["window slope"] == "asked for, but not measured"
    assert found["window slope"] == ("rank 1: a step took 1.0000 s in the window, 1.0200 s by two drained ones: +2.0%")


def way(direction: Any = "in", moved: int = 3 * STATE, in_flight: int = 0) -> Traffic:
    """One direction's books over the window's three steps."""
    return Traffic(direction, STATE, STATE + moved, 0, in_flight, STATE)


def report(rank: int = 0, **fields: Any) -> RankReport:
    """A rank of `chunked` that did all its name says."""
    usual: dict[str, Any] = {
        "rank": rank,
        "result": result(),
        "traffic": [way("in"), way("out")],
        "moved": Moved(),
        "state": StateAt(device_bytes=0, host_bytes=STATE),
        "state_at_backward_end": 0,
        "staging_bytes": CHUNK,
        "host": Host(),
        "link": Link(),
        "local_params": PARAMS,
        "largest_chunk": CHUNK,
        "chunks": 2,
        "schedule": "synchronous",
        "kernel_steps": (STEPS, STEPS),
        "untouched": [],
        "checksum": 1.0,
        "drained_bytes": 4 * PARAMS,
        "activations": (0, 0, 0),
        "expert_load": None,
    }
    return RankReport(**usual | fields)


def bad(of: RunSpec, check: str, **fields: Any) -> str:
    """What that check says when rank 1 differs from a good rank in these fields; all others must be content."""
    seen = check_launch(of, [report(0), report(1, **fields)])
    others = {name: line for name, line in seen.items() if name != check}
    assert set(others.values()) == {"ok"}, others
    return seen[check]


KERNEL_COPIES = LAYERS * STEPS
KERNEL_READS = LAYERS * STEPS


@pytest.mark.parametrize(
    ("of", "fields"),
    [
        (spec(), {}),
        (spec("overlap"), {"schedule": "deferred"}),
        (spec("none"), {"state": StateAt(device_bytes=STATE, host_bytes=0), "drained_bytes": 12 * PARAMS}),
        (spec(state_budget=CHUNK), {"state": StateAt(device_bytes=CHUNK, host_bytes=STATE - CHUNK)}),
        (spec(device="cpu"), {"state": StateAt(device_bytes=STATE, host_bytes=0), "drained_bytes": None}),
        (spec(fsdp_copies=KERNEL), {"kernel_copies": KERNEL_COPIES}),
        (spec(readbacks=KERNEL), {"kernel_reads": KERNEL_READS}),
        (spec(gradient_pool="compute"), {"pooled_gradients": LAYERS * STEPS}),
        (spec(gradient_pool="auto"), {"pooled_gradients": 3}),
        (spec(readbacks=KERNEL, count_readback=False), {}),
        (spec(activation_offload=True), {"activations": (64, 64, 64)}),
        (
            spec(activation_offload=True, activation_copies=KERNEL),
            {"activations": (64, 64, 64), "kernel_activations": 2 * LAYERS * STEPS},
        ),
        (spec(mode="rehearsal"), {"untouched": ["router.weight"]}),
    ],
    ids=[
        *("chunked", "overlap", "none", "a budget", "one memory on the CPU", "kernel copies", "kernel reads"),
        *(
            "compute's pool",
            "a share of it",
            "nothing to read back",
            "activations",
            "and by kernels",
            "a rehearsal may leave a parameter alone",
        ),
    ],
)
def test_a_good_launch_passes_every_check(of: RunSpec, fields: dict[str, Any]) -> None:
    assert check_launch(of, [report(rank, **fields) for rank in range(2)]) == dict.fromkeys(NAMES, "ok")


def test_no_silent_fallback_from_one_kind_of_update_to_the_other() -> None:
    assert bad(spec(), "schedule", schedule="deferred") == (
        "rank 1 ran updates that were deferred; the arm's are synchronous"
    )
    seen = check_launch(spec("overlap"), [report()])
    assert seen["schedule"] == "rank 0 ran updates that were synchronous; the arm's are deferred"


def test_the_moments_are_all_there_and_where_the_arm_keeps_them() -> None:
    short = StateAt(device_bytes=0, host_bytes=STATE - 8)
    assert bad(spec(), "state", state=short) == "rank 1 holds 7992 bytes of state, 1000 parameters need 8000"
    half = StateAt(device_bytes=STATE // 2, host_bytes=STATE // 2)
    assert bad(spec(), "state", state=half) == "rank 1 keeps 4000 bytes of state on the device, allowed 0"
    allowed = spec(state_budget=STATE // 2 - 1)
    assert bad(allowed, "state", state=half) == "rank 1 keeps 4000 bytes of state on the device, allowed 3999"
    auto, most = spec(state_budget="auto"), STATE // 2
    assert check_launch(auto, [report(state=half, state_budget=most)])["state"] == "ok"
    assert bad(auto, "state", state=half, state_budget=most - 1).endswith("on the device, allowed 3999")
    seen = check_launch(spec("none"), [report(drained_bytes=None)])
    assert seen["state"] == "rank 0 keeps 8000 bytes of state in host memory"


@pytest.mark.parametrize("off", [3.0, -3.0])
def test_the_allocator_agrees_with_what_the_optimizer_says_of_itself(off: float) -> None:
    params = 2 * GIB  # 8 GiB of parameters, 16 GiB of moments in host memory
    big = {"local_params": params, "state": StateAt(device_bytes=0, host_bytes=8 * params)}
    fits = report(**big, drained_bytes=4 * params + GIB)
    seen = check_launch(spec(), [fits, replace(fits, rank=1, drained_bytes=4 * params + int(off * GIB))])
    assert seen["memory"] == f"rank 1 has {8 + off:.2f} GiB allocated after the drain, expected 8.00"


def test_every_parameter_was_updated_once_a_step() -> None:
    line = "rank 1: AdamW counted (3, 4) steps over its parameters, not 4"
    assert bad(spec(), "updates", kernel_steps=(3, 4)) == line
    line = "rank 1: head.weight was never updated (2 such)"
    assert bad(spec(), "updates", untouched=["head.weight", "norm.weight"]) == line


def test_fsdp_copies_go_the_way_that_was_asked_for() -> None:
    seen = check_launch(spec(fsdp_copies=KERNEL), [report(kernel_copies=8), report(1, kernel_copies=7)])
    assert seen["fsdp copies"] == "rank 1: 7 copies went through kernels, at least 8 had to"
    line = "rank 1: 1 copies went through kernels, none had to"
    assert bad(spec(fsdp_copies=STOCK), "fsdp copies", kernel_copies=1) == line


def test_gradients_come_from_the_pool_that_was_asked_for() -> None:
    seen = check_launch(spec(gradient_pool="compute"), [report(pooled_gradients=8), report(1, pooled_gradients=7)])
    assert seen["gradient pool"] == "rank 1: 7 gradients came from compute's pool, at least 8 had to"
    line = "rank 1: 1 gradients came from compute's pool, none had to"
    assert bad(spec(), "gradient pool", pooled_gradients=1) == line


def test_expert_counts_come_the_way_that_was_asked_for() -> None:
    seen = check_launch(spec(readbacks=KERNEL), [report(kernel_reads=8), report(1, kernel_reads=7)])
    assert seen["readbacks"] == "rank 1: 7 expert counts came by kernels, at least 8 had to"
    line = "rank 1: 1 expert counts came by kernels, at least 0 had to"
    assert bad(spec(), "readbacks", kernel_reads=1) == line


def test_activations_go_out_and_come_back() -> None:
    line = "rank 1: 64 bytes of activations out, 32 back, planned 64 each way"
    moved = spec(activation_offload=True)
    seen = check_launch(moved, [report(activations=(64, 64, 64)), report(1, activations=(64, 32, 64))])
    assert seen["activations"] == line
    line = "rank 1: 64 bytes of activations out, 64 back, planned 64 each way"
    assert bad(spec(), "activations", activations=(64, 64, 64)) == line
    line = "rank 1: 15 block inputs went by kernels, not 16"
    by_kernels = spec(activation_offload=True, activation_copies=KERNEL)
    reports = [report(rank, activations=(64, 64, 64), kernel_activations=16 - rank) for rank in range(2)]
    assert check_launch(by_kernels, reports)["activations"] == line
    assert check_launch(moved, reports)["activations"] == "rank 0: 16 block inputs went by kernels, not 0"
    seen = check_launch(moved, [report()])
    assert seen["activations"] == "rank 0: 0 bytes of activations out, 0 back, planned 0 each way"


def test_the_window_has_all_copies_of_its_steps() -> None:
    for pieces in (1, 4):
        whole, job = pieces * CHUNK, spec(pieces=pieces)
        less = 3 * STATE - whole - 1
        found = f"{less} bytes completed in the window, planned 24000 (3 steps x 8000), off by more than a chunk of "
        assert bad(job, "window", traffic=[way("in"), way("out", moved=less)]) == f"rank 1: out: {found}{whole}"
        assert check_launch(job, [report(traffic=[way("in"), way("out", moved=less + 1)])])["window"] == "ok"
        line = f"rank 1: in: {whole + 1} bytes in flight at the end of the window, 0 at its start"
        assert bad(job, "window", traffic=[way("in", in_flight=whole + 1), way("out")]) == line


def test_an_arena_that_fills_before_step_may_be_full_at_one_end_of_the_window_only() -> None:
    """An arena of 5000 bytes; by default one of 2 GiB, but a step moves no more than 8000."""
    for job, most in ((spec("stream", pieces=1, staging_bytes=5000), 5000), (spec("stream", pieces=1), STATE)):
        for less in (most, most + 1):
            way_in = way("in", moved=3 * STATE - less)
            found = check_launch(job, [report(traffic=[way_in, way("out")])])["window"]
            assert found == "ok" if less == most else found.endswith(f"off by more than a chunk of {most}")


def test_losses_and_norms_are_finite() -> None:
    line = "loss is nan in step 1 (warm-up counted) on rank 1"
    assert bad(spec(), "finite", result=result(loss=float("nan"))) == line
    both = [replace(report(rank), result=result(1.0, 1.0, float("inf"), 1.0)) for rank in range(2)]
    assert check_launch(spec(), both)["finite"] == "grad_norm is inf in step 3 (warm-up counted) on rank 0"


def test_real_ranks_share_one_gradient_norm_and_rehearsed_ones_need_not() -> None:
    line = "ranks disagree on the gradient norm of step 2: ['1.0', '1.5']"
    other = result(1.0, 1.5, 1.0, 1.0)
    assert bad(spec(), "norms agree", result=other) == line
    assert check_launch(spec(mode="rehearsal"), [report(), report(1, result=other)])["norms agree"] == "ok"


def test_the_replica_is_the_trainers_weights() -> None:
    sent = spec(broadcast_every=2)
    good = report(broadcast=Broadcast(broadcasts=2))
    assert check_launch(sent, [good, report(1)]) == dict.fromkeys([*NAMES, "replica"], "ok")
    assert check_launch(sent, [report()])["replica"] == "0 weight broadcasts, not 2"
    few = replace(good, broadcast=Broadcast(broadcasts=1))
    assert check_launch(sent, [few])["replica"] == "1 weight broadcasts, not 2"
    line = "head.weight is not the trainer's in bf16 after the last step (2 such)"
    assert check_launch(sent, [replace(good, stale=["head.weight", "norm.weight"])])["replica"] == line
