from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offbench import cli
from offbench.arms import ARMS
from offbench.errors import UsageError
from offbench.offload.chunks import plan_staging
from offbench.planner import text, whatif
from offbench.planner.choose import (
    Candidate,
    Setting,
    at_budget,
    budgets_of,
    candidates,
    choose,
    fullest_stream,
    least_memory,
    least_stream,
    pareto,
    stream_at,
)
from offbench.planner.gather import Inputs, gather
from offbench.planner.inputs import Compute, Footprint, Links
from offbench.planner.options import PlanOptions
from offbench.planner.policy import Policy
from offbench.planner.result import Simulated, Waits
from offbench.planner.sources import SEED_LINKS, links_of_machine
from offbench.results_file import read_records
from offbench.topology.imports import load_machine
from offbench.topology.model import Machine, Source
from tests.planner.test_simulate import QWEN

GIB = 1 << 30
ROOT = Path(__file__).parent.parent.parent
NATIVE = ROOT / "results" / "h200-rehearsal-native.jsonl"
SEED = ("--model", "qwen3-30b-a3b", "--world", "8", "--from", "seed-8xh200")


def nowhere() -> Machine:
    return Machine(Source("live"))


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["plan", *words]) == 0
    return capsys.readouterr().out.splitlines()


def inputs(**options: object) -> Inputs:
    return gather(PlanOptions(**options), nowhere)  # type: ignore[arg-type]


def test_the_shipped_machine_is_planned_from_its_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(capsys, *SEED)
    text = " ".join(" ".join(shown).split())
    assert shown[0].startswith("Simulated, not measured: qwen3-30b-a3b, 48 layers, 8 ranks, EP 8, 16,384 tokens")
    assert "chunks of up to 1GiB in 4 pieces, 99 copies each way" in text
    assert "published for this job and machine: prime-rl#4427 of the forward head and loss 0.0868 s, assumed" in text
    assert "26.0 in, 26.0 out, 38.8 both ways" in text
    assert "uplink A 52.0 / 2" in text
    assert "socket0 155.0 / 4" in text
    rows = [line.split("  ") for line in shown if line.startswith(("none ", "main ", "chunk", "over", "stream,"))]
    names = [row[0] for row in rows]
    overlaps = [f"overlap, {n} slots" for n in (2, 4, 8)]
    streams = [f"stream, 2.0 to {most}.0 GiB" for most in (12, 16)]
    assert names[:8] == ["none", "main", "chunked, 2 slots", *overlaps, *streams]
    # Five budgets, the leanest and where it is another the fastest; and the least budget that meets the target.
    assert sum(name.startswith("stream, ") for name in names) == 9
    assert sum(line.startswith("zerocopy ") for line in shown) == 5
    assert "exposed of zerocopy: also forward slowed" in text
    figures = {line.split("  ")[0]: line.split() for line in reversed(shown) if line.startswith(("none ", "main "))}
    assert figures["none"][1:5] == ["-", "2.255", "1.00", "58.1k"]
    assert figures["main"][1:3] == ["0.0", "4.442"]
    assert (
        "Take stream, 2.0 to 12.0 GiB: of all within 1.05 x none it needs the least memory, 44.7 GiB at its peak, 17.1"
        in text
    )
    assert "--fsdp-copies kernel --readbacks kernel" in text


def test_pieces_are_the_arms_and_so_are_the_windows() -> None:
    at = planned()
    assert [len(at.cut(cap).chunks) for cap in (GIB, GIB // 4)] == [33, 99]
    whole = ARMS["overlap"].resolve(chunk_bytes=GIB, pieces=1)
    found = at.simulate(Policy.of(ARMS["overlap"].schedule(whole)))
    assert found.staging_bytes == plan_staging(QWEN.chunks, 4).nbytes
    assert at_budget(at, "overlap", 0).simulated.staging_bytes == plan_staging(at.cut(GIB // 4).chunks, 16).nbytes


def test_a_record_gives_model_times_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(capsys, "--record", str(NATIVE), "--target", "1.2")
    text = "\n".join(shown)
    assert "measured: median of 2 launches of none, 1 GPU copying" in text
    assert "clip 0.0134" in text
    assert any(line.startswith("Take stream, 2.0 to 12.0 GiB: of all within 1.2 x none it needs") for line in shown)
    elsewhere = inputs(record=NATIVE, source="seed-8xh200")
    assert elsewhere.links.both == pytest.approx(38.75 * GIB)
    assert elsewhere.compute.forward == pytest.approx(0.508, abs=0.001)


def test_times_from_flops_say_what_they_assume() -> None:
    found = inputs(model="qwen3-30b-a3b", seq_len=8192, source="seed-8xh200")
    assert "400 TFLOP/s" in found.compute_from
    # 6 x active parameters and attention at 8,192 tokens: 37.6e9 FLOPs a token
    assert found.compute.forward + found.compute.backward == pytest.approx(8192 * 37.6e9 / 400e12, rel=0.02)
    twice = inputs(model="qwen3-30b-a3b", seq_len=8192, source="seed-8xh200", tflops=800.0)
    assert twice.compute.backward == pytest.approx(found.compute.backward / 2)


def test_times_of_parameters_alone_say_what_they_assume() -> None:
    found = inputs(params=8_000_000_000, source="seed-8xh200")
    assert found.compute.forward + found.compute.backward == pytest.approx(6 * 8e9 * 16384 / 400e12)
    assert found.compute.update == pytest.approx(1e9 * 28 / 4.8e12)
    assert "6 FLOPs x 8,000,000,000 parameters x 16,384 tokens a rank (--seq-len) at 400 TFLOP/s" in found.compute_from
    other = inputs(params=8_000_000_000, seq_len=4096, tflops=800.0, source="seed-8xh200")
    assert other.compute.backward == pytest.approx(found.compute.backward / 8)
    assert (other.job.tokens_per_step, other.compute.loss) == (4096 * 8, 0)
    given = inputs(params=8_000_000_000, forward=1.0, backward=2.0, source="seed-8xh200")
    assert (given.compute.backward, given.job.tokens_per_step) == (2.0, None)


def test_bytes_and_given_rates_need_no_preset(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(
        capsys,
        "--bytes",
        "28GiB",
        "--one-way",
        "50GiB/s",
        "--both-ways",
        "80GiB/s",
        "--forward",
        "1",
        "--backward",
        "3",
    )
    assert "assumed in 48 equal layers" in shown[0]
    assert any("update assumed" in line for line in shown)
    assert shown[-1] == "In your trainer: the schedule of arm zerocopy (docs/using-the-optimizer.md)."
    unproven = ARMS["zerocopy"].unproven
    assert (f"zerocopy is {unproven}." in " ".join(shown)) == bool(unproven)
    assert "peak: parameters, gradients and state; activations are not in it" in shown
    split = inputs(params=8 * GIB, forward=1.0, backward=1.0, one_way="9GiB/s").job.layout
    assert split.nbytes == pytest.approx(8 * GIB, rel=1e-4)


def test_the_measured_machine_we_ship_can_be_planned_on() -> None:
    found = inputs(world=1, source=str(ROOT / "results" / "h200-guest-topo.json"))
    assert (found.links.into / GIB, found.links.both / GIB) == pytest.approx((51.7, 94.4), abs=0.05)
    assert "measured" in found.links_from


def test_a_job_larger_than_the_machine_takes_the_others_to_be_alike() -> None:
    found = inputs(world=16, source="seed-8xh200")
    assert found.links == inputs(source="seed-8xh200").links
    assert "8 of 16 ranks are on one machine" in found.links_from
    assert found.job.layout.nbytes == pytest.approx(QWEN.nbytes / 2, rel=1e-3)


def test_fewer_ranks_share_fewer_links() -> None:
    machine = load_machine("seed-8xh200")
    one, _ = links_of_machine(machine, 1)
    assert one.into == pytest.approx(52 * GIB)
    four, text = links_of_machine(machine, 4)
    assert four == links_of_machine(machine, 8)[0]
    assert "measured by others: prime-rl#4427" in text
    assert four.into == pytest.approx(SEED_LINKS.into)
    assert four.both == pytest.approx(SEED_LINKS.both, rel=0.002)


def test_a_machine_without_rates_is_refused_with_what_to_do() -> None:
    machine = load_machine("seed-8xh200")
    bare = replace(machine, links=tuple(replace(link, rates=()) for link in machine.links))
    with pytest.raises(UsageError, match="offbench topo --measure"):
        links_of_machine(bare, 8)
    socket_only = replace(machine, links=tuple(link for link in machine.links if link.kind == "socket"))
    links, _ = links_of_machine(socket_only, 8)
    assert links.into == links.both == pytest.approx(38.75 * GIB)
    unknown = replace(machine, links=tuple(replace(x, rates=()) if x.kind == "socket" else x for x in machine.links))
    assert "capacity unknown: socket0, socket1" in links_of_machine(unknown, 8)[1]


def test_against_files_prints_errors_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    table = ROOT / "results" / "seed-table-a.jsonl"
    shown = lines(capsys, "--against", str(table), "--against", str(NATIVE))
    assert f"{NATIVE}: simulated from its own inputs" in shown
    assert any(line.startswith("main ") and "-9.3 %" in line for line in shown)
    bound = next(line for line in shown if line.startswith("overlap (numa, whole first step"))
    assert bound.split()[-6:] == ["3.440", "3.520", "-2.3", "%", "3.092", "1.151"]
    assert shown[1].split()[-5:] == ["error", "no", "small", "waits", "small"]
    assert any("at 0.8 of them it takes" in " ".join(shown[i : i + 2]) for i in range(len(shown)))


def test_planning_loads_no_torch() -> None:
    code = f"import sys; from offbench.cli import main; main({['plan', *SEED]}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False"


def row(arm: str, step_s: float, peak: int) -> Candidate:
    return Candidate(ARMS[arm].resolve(), Simulated(step_s, Waits(), 0, 0, 0, 0, peak), 0.0)


def test_the_front_is_what_nobody_beats_and_of_equals_the_first() -> None:
    none, slow, fast, same = row("none", 1.0, 9), row("main", 2.0, 9), row("chunked", 1.5, 2), row("overlap", 1.5, 2)
    assert pareto([none, slow, fast, same]) == [none, fast]


def test_the_choice_is_the_least_memory_within_the_target_else_the_fastest() -> None:
    none, small, middle = row("none", 1.0, 9), row("chunked", 1.5, 2), row("overlap", 1.04, 4)
    assert choose([none, small, middle], 1.05).candidate is middle
    assert choose([none, small, middle], 1.6).candidate is small
    tight = choose([none, small, middle], 1.01)
    assert (tight.candidate, tight.meets_target) == (middle, False)
    assert "keep it there (none)" in tight.reason


def planned(**changes: object) -> Setting:
    return replace(whatif.setting(inputs(source="seed-8xh200")), **changes)  # type: ignore[arg-type]


def test_a_faster_link_never_makes_a_candidate_slower() -> None:
    fast, budgets = planned(links=Links(52 * GIB, 52 * GIB, 77.6 * GIB)), (0, 7 * GIB)

    def rows(at: Setting) -> list[Candidate]:
        others = [row for row in candidates(at, budgets) if row.arm.name != "stream"]
        return others + [stream_at(at, budget, fastest=True) for budget in budgets]

    pairs = zip(rows(planned()), rows(fast), strict=True)
    assert all(quick.simulated.step_s <= slow.simulated.step_s * (1 + 1e-9) for slow, quick in pairs)
    assert choose(candidates(replace(fast, compute=Compute(3, 3, 0.05)), budgets), 1.05).meets_target


def test_a_larger_budget_is_never_slower_nor_smaller() -> None:
    at, step = planned(), GIB
    found = [stream_at(at, budget).simulated for budget in range(2 * GIB, 29 * GIB, step)]
    largest = max(chunk.nbytes for chunk in QWEN.chunks)
    for less, more in itertools.pairwise(found):
        # Whole chunks pack into some budgets better than into others.
        assert more.step_s <= less.step_s + 0.25 * largest / at.links.into
        assert more.peak_bytes >= less.peak_bytes - largest
    assert found[-1].step_s == pytest.approx(at.compute.total)
    whole = stream_at(at, 30 * GIB)
    assert (whole.simulated.step_s, whole.floor_s) == (pytest.approx(at.compute.total), 0)


def test_the_least_budget_meets_the_limit_and_a_smaller_one_does_not() -> None:
    at = planned()
    limit = 1.05 * at.compute.total
    least = least_stream(at, limit)
    assert least is not None
    assert least.simulated.step_s <= limit < stream_at(at, least.budget - GIB // 2).simulated.step_s
    assert least_stream(at, 0.99 * at.compute.total) is None
    roomy = least_stream(at, 2 * at.compute.total)
    assert roomy is not None
    assert roomy.budget == 0


def test_the_least_memory_is_that_of_the_arm_that_needs_least() -> None:
    # A link so fast that zerocopy, whose AdamW is hidden, beats none, and stream does not.
    at = planned(links=Links(900 * GIB, 900 * GIB, 1800 * GIB), compute=Compute(4.0, 2.0, 0.5))
    found = least_memory(at, 0.98 * at.compute.total)
    assert found is not None
    assert (found.name, found.budget) == ("zerocopy", 0)


def test_what_does_not_fit_the_memory_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    tight = lines(capsys, *SEED, "--memory-limit", "34GiB", "--state-budget", "0GiB")
    text = " ".join(" ".join(tight).split())
    assert "stays within 1.05 x none and 34.0 GiB; this is the fastest that fits, at 1.306 x. Times hold" in text
    rows = [
        line.split() for line in tight if line.startswith(("none ", "main ", "chunk", "overlap", "stream", "zero"))
    ]
    peaks = [(float(row[-2 if row[-1] in {"over", "*"} else -1]), row[-1] == "over") for row in rows]
    assert len(peaks) == 9
    assert all(over == (peak > 34) for peak, over in peaks)
    # Faster than these is the largest budget that fits: one step of it, 0.25 GiB, more does not.
    full = fullest_stream(planned(), 40 * GIB)
    assert full is not None
    assert full.simulated.peak_bytes <= 40 * GIB < stream_at(planned(), full.budget + GIB // 4).simulated.peak_bytes
    nothing = lines(capsys, *SEED, "--memory-limit", "30GiB", "--state-budget", "0GiB")
    assert "Nothing here fits into 30.0 GiB: stream, 2.0 to 12.0 GiB needs least, 33.4 GiB." in nothing[-2]
    assert not any(line.startswith(("Take", "Measure")) for line in nothing)
    all_fits = choose([row("none", 1.0, 9), row("chunked", 1.5, 2)], 1.05, most=9)
    assert "keep it there (none)" in all_fits.reason


def test_a_narrow_terminal_shows_what_decides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lines(capsys, *SEED, "--state-budget", "0GiB")
    monkeypatch.setattr(text, "terminal", lambda: 80)
    narrow = lines(capsys, *SEED, "--state-budget", "0GiB", "--what-if", "ranks")
    assert all(len(line) <= 80 or line.startswith("Measure it: ") for line in narrow)
    (stream,) = (line.split() for line in narrow if line.startswith("stream, 2.0 to 12.0 GiB"))
    assert stream[5:] == ["0.0", "2.945", "1.31", "44.5k", "0.0", "33.4", "*"]
    assert "in a wider terminal: exposed s, wait in, wait out, small, floor s" in narrow
    compared = list(
        text.table(("row", "error"), [["stream (fsdp copies kernel, readbacks kernel, lead 2)" * 2, "-1.0 %"]])
    )
    assert [line.endswith("  -1.0 %") for line in compared] == [False, True, False]
    assert all(len(line) <= 80 for line in compared)
    monkeypatch.setattr(text, "terminal", lambda: 200)
    assert lines(capsys, *SEED, "--state-budget", "0GiB") == whole


def test_budgets_are_given_or_a_few_shares_of_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert budgets_of(QWEN.nbytes) == [0, 4 * GIB, 7 * GIB, 14 * GIB, 21 * GIB]
    assert budgets_of(6400) == [0, 800, 1600, 3200, 4800]
    shown = lines(capsys, *SEED, "--state-budget", "12GiB", "--state-budget", "9GiB")
    rows = [line.split("GiB")[-1].split() for line in shown if line.startswith(("chunked, ", "stream, "))]
    assert {row[0] if row[0] != "chunked," else row[3] for row in rows} >= {"9.0", "12.0"}
    assert any("--arm stream --state-budget 12GiB --staging 2GiB --at-loss 12GiB --numa" in line for line in shown)


def test_simulated_peaks_are_those_that_were_measured() -> None:
    records = read_records([NATIVE]).records
    job = inputs(record=NATIVE, fsdp_copies="stock", readbacks="copy")
    for record in records:
        # The allocator's figure leaves out what the host has freed and a stream still reads: under overlap the
        # gradients of chunks that step() has queued. The most is then when step() queues, not in the next forward.
        most = 1.5 if record.spec.arm.name == "overlap" else 1.2
        plan = ARMS[record.spec.arm.name].schedule(record.spec.arm)
        found = whatif.setting(job).simulate(Policy.of(plan))
        assert record.peak.steady_allocated_bytes is not None
        assert -0.2 * GIB < found.peak_bytes - record.peak.steady_allocated_bytes < most * GIB, record.spec.arm


def test_what_launches_cost_is_said_apart_from_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    traced = " ".join(
        " ".join(
            lines(capsys, "--record", str(ROOT / "results" / "h200-all-arms.jsonl"), "--state-budget", "0GiB")
        ).split()
    )
    assert "launches take no time here traced, where the profiler slows the host, compute idled for them" in traced
    assert "longer than in none: stream 0.300, overlap 0.297 s schedule budget" in traced
    assert inputs(source="seed-8xh200").launches == {}


@pytest.mark.parametrize("copies", ["kernel", "stock"])
def test_the_planned_job_is_never_slower_with_more_budget(copies: str) -> None:
    at = whatif.setting(inputs(source="seed-8xh200", fsdp_copies=copies))
    for name in ("main", "chunked", "overlap", "stream", "zerocopy"):
        steps = [at_budget(at, name, budget * GIB).simulated.step_s for budget in range(0, 29, 4)]
        assert all(more <= few * (1 + 1e-9) for few, more in itertools.pairwise(steps)), name


def test_a_budget_of_nothing_is_one_and_a_budget_of_all_leaves_no_reason_to_offload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = lines(capsys, *SEED, "--state-budget", "0GiB")
    assert {line.split("  ")[0] for line in shown} >= {"none", "main", "overlap, 8 slots", "zerocopy"}
    text = " ".join(lines(capsys, *SEED, "--state-budget", "40GiB"))
    assert "Take none: with these budgets all state stays on the GPU" in text


def test_stock_copies_make_late_schedules_slower_and_no_others() -> None:
    stock = whatif.setting(inputs(source="seed-8xh200", fsdp_copies="stock", readbacks="copy"))
    kernel = planned()
    for name in ("none", "main", "chunked", "overlap", "stream", "zerocopy"):
        free, waiting = (at_budget(at, name, 0).simulated for at in (kernel, stock))
        if name in {"overlap", "stream"}:
            assert waiting.waits.small > 1
            assert waiting.step_s > free.step_s + 0.5
        else:
            assert waiting.step_s == pytest.approx(free.step_s)
    assert Footprint(parameters=1).most == 1
