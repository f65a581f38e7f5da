from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offbench.arms import ARMS
from offbench.config import GIB, MIB
from offbench.errors import UsageError
from offbench.hardware import Hardware
from offbench.naming import axes
from offbench.options import Options
from offbench.resolve import resolve
from offbench.results_file import read_records
from offbench.units import gib, parse_rate, parse_size, show_size
from tests.hosts import host

RESULTS = Path(__file__).parent.parent / "results"


def test_no_gpu_is_a_small_real_job_on_the_cpu_and_said_aloud() -> None:
    found = resolve(Options(), host())
    mode, workload = found.specs[0].mode, found.specs[0].workload
    assert (mode.kind, mode.device, mode.world, mode.nproc) == ("real", "cpu", 2, 2)
    assert (workload.model, workload.layers, workload.ep, workload.compile) == ("tiny", 4, 1, False)
    assert [(s.arm.name, s.arm.numa) for s in found.specs] == [
        ("none", False),
        ("main", False),
        ("chunked", False),
        ("chunked", True),
        ("overlap", False),
        ("stream", False),
    ]
    assert found.notes[0].startswith("no GPU (NVML lists no GPU): model tiny on the CPU")


def test_one_gpu_rehearses_eight_ranks_and_says_so() -> None:
    found = resolve(Options(arm=("overlap",)), host(1))
    spec = found.specs[0]
    assert (spec.mode.kind, spec.mode.world, spec.mode.nproc) == ("rehearsal", 8, 1)
    assert (spec.workload.model, spec.workload.layers, spec.workload.ep) == ("qwen3-30b-a3b", 48, 8)
    assert spec.workload.compile
    assert spec.tokens_per_step == 131072
    assert "rehearsal of rank 0" in found.notes[0]
    assert "all 48 layers" in found.notes[1]


def test_a_small_card_gets_fewer_layers_in_every_arm_and_says_so() -> None:
    found = resolve(Options(), host(1, gpu_gib=24))
    depths = {spec.workload.layers for spec in found.specs}
    assert len(depths) == 1
    assert depths.pop() < 48
    assert "of 48 layers" in found.notes[-1]
    assert resolve(Options(layers=48), host(1, gpu_gib=24)).specs[0].workload.layers == 48


@pytest.mark.parametrize(
    ("options", "machine", "expected"),
    [
        (Options(), host(8, host_gib=2000), ("real", 8, 8)),
        (Options(world=4), host(8, host_gib=2000), ("real", 4, 4)),
        (Options(), host(6, host_gib=2000), ("rehearsal", 8, 4)),
        (Options(nproc=2), host(8, host_gib=2000), ("rehearsal", 8, 2)),
        (Options(mode="rehearsal"), host(8, host_gib=2000), ("rehearsal", 8, 8)),
        (Options(model="tiny"), host(2), ("real", 2, 2)),
        (Options(device="cpu"), host(8), ("real", 2, 2)),
        (Options(world=4), host(), ("real", 4, 4)),
        (Options(nproc=3), host(), ("real", 3, 3)),
        (Options(world=8, nproc=2), host(), ("rehearsal", 8, 2)),
    ],
)
def test_world_processes_and_mode(options: Options, machine: Hardware, expected: tuple[str, int, int]) -> None:
    mode = resolve(options, machine).specs[0].mode
    assert (mode.kind, mode.world, mode.nproc) == expected


@pytest.mark.parametrize(
    ("options", "machine", "line"),
    [
        (Options(arm=("overlp",)), host(), "unknown arm overlp: did you mean overlap?"),
        (Options(model="tyni"), host(), "unknown model tyni: did you mean tiny?"),
        (Options(device="cuda"), host(), "--device cuda: no GPU to use (NVML lists no GPU); use --device cpu"),
        (Options(device="tpu"), host(), "--device tpu: choose auto, cuda or cpu"),
        (Options(nproc=4), host(2), "4 processes on 2 GPUs: each needs its own; use --nproc 2"),
        (Options(mode="real"), host(1), "8 processes on 1 GPU: each needs its own; use --mode rehearsal"),
        (Options(world=8, nproc=3), host(), "--nproc 3 does not divide a world of 8; use --nproc 2"),
        (Options(world=2, nproc=4), host(), "--nproc 4 does not divide a world of 2; use --nproc 2"),
        (
            Options(mode="real", world=4, nproc=2),
            host(),
            "--mode real: a world of 4 needs --nproc 4, not 2; or use --mode rehearsal",
        ),
        (Options(world=0), host(), "--world 0: at least 1"),
        (Options(ep=3), host(1), "--ep 3: must divide the world (8) and the experts (128); use --ep 8"),
        (
            Options(emulate_link="5GiB/s"),
            host(),
            "--emulate-link: there is no link to a GPU on --device cpu; leave it out",
        ),
        (
            Options(emulate_link="5GiB"),
            host(1),
            "--emulate-link 5GiB: not a rate; write a size per second, as in 38.8GiB/s",
        ),
        (Options(slots=8, arm=("none",)), host(), "--slots: no chosen arm uses it (none)"),
        (Options(chunk="1KiB"), host(), "--chunk 1KiB: the smallest chunk is 4KiB"),
        (
            Options(state_budget="all", arm=("stream",)),
            host(),
            "--state-budget all: not a size; write a number and a unit, as in 512MiB or 1GiB, or auto",
        ),
        (Options(state_budget="auto", arm=("none",)), host(), "--state-budget: no chosen arm uses it (none)"),
        (
            Options(state_budget="auto", arm=("chunked",), warmup=4),
            host(1),
            "--warmup 4: --state-budget auto needs 5, to measure and to settle in",
        ),
        (Options(layers=0), host(), "--layers 0: input should be greater than or equal to 1"),
        (Options(slots=0), host(), "--slots 0: input should be greater than or equal to 1"),
        (Options(ac="some"), host(), "--ac some: choose full or none"),
        (Options(table="b"), host(), "unknown table b: there is seed"),
        (Options(table="seed", numa=True), host(), "--table seed: its rows fix --numa; leave it out"),
        (
            Options(table="seed", fsdp_copies="kernel"),
            host(),
            "--table seed: its rows fix --fsdp-copies; leave it out",
        ),
        (
            Options(table="seed", gradient_pool="compute"),
            host(),
            "--table seed: its rows fix --gradient-pool; leave it out",
        ),
        (Options(gradient_pool="own"), host(), "--gradient-pool own: choose stock, compute or auto"),
        (Options(activation_copies="kernel"), host(), "--activation-copies: only with --activation-offload"),
        (
            Options(activation_copies="engine", activation_offload=True),
            host(),
            "--activation-copies engine: choose copy or kernel",
        ),
        (
            Options(table="seed", activation_copies="kernel", activation_offload=True),
            host(),
            "--table seed: its rows fix --activation-offload; leave it out",
        ),
        (Options(table="seed", readbacks="kernel"), host(), "--table seed: its rows fix --readbacks; leave it out"),
        (
            Options(memory_limit="9GiB"),
            host(),
            "--memory-limit: there is no GPU memory to limit on --device cpu; leave it out",
        ),
        (Options(memory_limit="999GiB"), host(1), "--memory-limit 999GiB: the GPU has 140.0 GiB; use less"),
        (
            Options(memory_limit="lots"),
            host(1),
            "--memory-limit lots: not a size; write a number and a unit, as in 512MiB or 1GiB",
        ),
    ],
)
def test_what_cannot_run_is_one_clear_line(options: Options, machine: Hardware, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(options, machine)
    assert str(caught.value) == line


def test_options_reach_the_specs() -> None:
    given = Options(
        arm=("overlap", "none"),
        chunk="512MiB",
        slots=8,
        lead=6,
        ahead=2,
        first_step="whole",
        balanced_routing=False,
        adamw="foreach",
        max_norm=0.0,
        lr=0.1,
        emulate_link="38.8GiB/s",
        warmup=2,
        steps=3,
        activation_offload=True,
    )
    overlap, none = resolve(given, host(1)).specs
    arm = overlap.arm
    assert (arm.chunk_bytes, arm.slots, arm.lead, arm.ahead, arm.first_step) == (512 * MIB, 8, 6, 2, "whole")
    assert none.arm.chunk_bytes is None
    w = overlap.workload
    assert (w.routing, w.adamw, w.max_norm, w.lr, w.activation_offload) == ("natural", "foreach", None, 0.1, True)
    assert overlap.mode.emulate_link == pytest.approx(38.8 * GIB)
    assert (overlap.window.warmup, overlap.window.steps) == (2, 3)


def test_an_automatic_budget_has_a_name_of_its_own_and_needs_no_long_warm_up_without_a_gpu() -> None:
    (auto,) = resolve(Options(arm=("stream",), state_budget="auto", warmup=1), host()).specs
    (none,) = resolve(Options(arm=("stream",), warmup=1), host()).specs
    assert auto.arm.state_budget == "auto"
    assert auto.run_id != none.run_id
    said = [axes(auto, auto_budgets=[int(gib * GIB) for gib in found]) for found in ((), (3, 3.01), (4, 3, 3.5))]
    assert said == [f"state budget auto{found}" for found in ("", " = 3.0 GiB", " = 3.0 to 4.0 GiB")]


def test_broadcasts_make_the_default_window_a_whole_number_of_periods() -> None:
    for options, expected in (
        (Options(broadcast_every=1), (5, 15)),
        (Options(broadcast_every=2), (6, 16)),
        (Options(broadcast_every=7, steps=14), (7, 14)),
    ):
        spec = resolve(options, host()).specs[0]
        assert (spec.window.warmup, spec.window.steps) == expected
    for bad, message in (
        (Options(broadcast_every=2, steps=15), "--steps 15 is no multiple of --broadcast-every 2: .* use --steps 16"),
        (Options(broadcast_every=0), "--broadcast-every 0: input should be greater than or equal to 1"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve(bad, host())


def test_a_job_without_broadcasts_has_the_run_id_it_had_before_there_were_any() -> None:
    spec = resolve(Options(arm=("none",)), host()).specs[0]
    assert "broadcast" not in spec.canonical()
    assert resolve(Options(arm=("none",), broadcast_every=5), host()).specs[0].run_id != spec.run_id


STOCK, KERNEL = ("stock", "copy"), ("kernel", "kernel")


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        (Options(arm=tuple(ARMS)), 1, KERNEL),
        (Options(fsdp_copies="stock"), 1, ("stock", "kernel")),
        (Options(readbacks="copy"), 1, ("kernel", "copy")),
        (Options(), 0, STOCK),  # no copy engine, so nothing is replaced
        (Options(device="cpu"), 1, STOCK),
        (Options(fsdp_copies="kernel", readbacks="kernel"), 0, KERNEL),
        (Options(table="seed"), 1, STOCK),
        (Options(table="seed", fsdp_copies="stock", readbacks="copy"), 1, STOCK),
    ],
)
def test_kernels_make_the_small_copies_of_every_arm_on_a_gpu(
    options: Options, gpus: int, expected: tuple[str, str]
) -> None:
    specs = resolve(options, host(gpus)).specs
    assert {(spec.arm.fsdp_copies, spec.arm.readbacks) for spec in specs} == {expected}


def test_with_and_without_kernels_a_launch_is_named_as_when_they_were_no_default() -> None:
    records = read_records([RESULTS / "h200-all-arms.jsonl"]).records
    stock, kernel = (
        next(r.run_id for r in records if (r.spec.arm.name, r.spec.arm.fsdp_copies) == ("none", way))
        for way in ("stock", "kernel")
    )
    job = Options(arm=("none",), layers=48, seq_len=16384, world=8, nproc=1, mode="rehearsal", warmup=3, steps=6)
    off = replace(job, fsdp_copies="stock", readbacks="copy")
    assert [resolve(options, host(1)).specs[0].run_id for options in (job, off)] == [kernel, stock]


def test_the_alias_numa_is_chunked_bound() -> None:
    alias, plain = (resolve(o, host()).specs for o in (Options(arm=("numa",)), Options(arm=("chunked",), numa=True)))
    assert alias == plain


def test_default_arms_under_numa_hold_no_accidental_repeat() -> None:
    names = [spec.arm.name for spec in resolve(Options(numa=True), host()).specs]
    assert names == ["none", "main", "chunked", "overlap", "stream"]
    assert len(resolve(Options(arm=("none", "none")), host()).specs) == 2  # asked for: an A/A run


def test_the_seed_table_has_both_tables_and_a_baseline_for_each() -> None:
    specs = resolve(Options(table="seed"), host(1)).specs
    assert len(specs) == len({spec.run_id for spec in specs}) == 12
    baselines = [spec.workload.activation_offload for spec in specs if spec.arm.name == "none"]
    assert baselines == [False, True]
    assert sum(spec.arm.first_step == "bounded" for spec in specs) == 1


def test_sizes() -> None:
    assert parse_size("--chunk", "1GiB") == GIB
    assert parse_size("--chunk", " 1.5 gb ") == 1_500_000_000
    assert show_size(GIB) == "1GiB"
    assert show_size(3 << 17) == "384KiB"
    assert show_size(1001) == "1001B"
    assert show_size(15247133900) == "14.2GiB"
    assert show_size(15247133901) == "15247133901B"
    assert (gib(GIB), gib(0), gib(MIB)) == ("1.0", "0.0", "0.001")
    for bad in ("", "1", "GiB", "-1GiB", "1 parsec", "0B"):
        with pytest.raises(UsageError, match="not a size"):
            parse_size("--chunk", bad)


def test_the_gradient_pool_is_an_axis_of_every_arm_and_not_in_use_by_default() -> None:
    job = Options(arm=("none", "stream"))
    for options, pool, extra in (
        (job, "stock", ""),
        (replace(job, gradient_pool="compute"), "compute", ", gradient pool compute"),
    ):
        specs = resolve(options, host(1)).specs
        assert [spec.arm.gradient_pool for spec in specs] == [pool] * 2
        assert [axes(spec) for spec in specs] == ["fsdp copies kernel, readbacks kernel" + extra] * 2


def test_rates() -> None:
    assert parse_rate("--emulate-link", "38.8GiB/s") == pytest.approx(38.8 * GIB)
    for bad in ("38.8GiB", "38.8", "1GiB/h", "0GiB/s", "/s"):
        with pytest.raises(UsageError, match="not a rate"):
            parse_rate("--emulate-link", bad)


def test_a_memory_limit_is_an_axis_of_every_arm() -> None:
    specs = resolve(Options(arm=("none", "stream"), memory_limit="37.5GiB"), host(1)).specs
    assert [spec.arm.memory_limit for spec in specs] == [int(37.5 * GIB)] * 2
    assert [axes(spec) for spec in specs] == ["fsdp copies kernel, readbacks kernel, memory limit 37.5GiB"] * 2
    assert resolve(Options(arm=("none",)), host(1)).specs[0].arm.memory_limit is None
