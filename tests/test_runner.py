from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbench import arms, environment, fake
from offbench.config import Mode, RunSpec, Workload
from offbench.fake import FakeLauncher, Outcome
from offbench.launcher import Exit
from offbench.planner.ideal import policy_ideal
from offbench.progress import (
    Pace,
    PlainDisplay,
    Progress,
    ProgressTail,
    TerminalDisplay,
    describe,
    phase_seconds,
    show_seconds,
)
from offbench.record import RunRecord
from offbench.results_file import ResultsFile, read_records
from offbench.runner import Planned, Runner, RunReport, interleave, without_done
from tests.hosts import host

ENV = environment.capture(None)


def spec(arm: str = "none", layers: int = 4, numa: bool = False) -> RunSpec:
    return RunSpec(
        workload=Workload(model="tiny", layers=layers, seq_len=128, compile=False),
        arm=arms.ARMS[arm].resolve(numa=numa),
        mode=Mode(device="cpu", world=2, nproc=2),
    )


ALL = [spec(name) for name in ("none", "main", "chunked")]


def run(
    path: Path, outcomes: dict[str, Outcome | list[Outcome]], specs: list[RunSpec], launches: int = 1, gib: int = 64
) -> tuple[RunReport, FakeLauncher, str]:
    launcher, out = FakeLauncher(outcomes), io.StringIO()
    results = ResultsFile(path)
    runner = Runner(launcher, results, PlainDisplay(out), host(host_gib=gib), ENV, timeout_s=60)
    report = runner.run(interleave(specs, launches))
    results.close()
    return report, launcher, out.getvalue()


def test_rounds_change_direction() -> None:
    plan = interleave(ALL, 3)
    assert [item.spec.arm.name for item in plan] == [
        *("none", "main", "chunked"),
        *("chunked", "main", "none"),
        *("none", "main", "chunked"),
    ]
    assert [item.order for item in plan] == list(range(9))
    assert [item.launch for item in plan] == [1] * 3 + [2] * 3 + [3] * 3


def test_an_arm_given_twice_is_two_launches_of_one_run() -> None:
    plan = interleave([spec(), spec()], 2)
    assert [item.launch for item in plan] == [1, 2, 3, 4]


def test_repeats_are_numbered_after_those_already_recorded() -> None:
    past = [RunRecord(run_id=spec().run_id, launch=3, status="ok", spec=spec())]
    assert [item.launch for item in interleave([spec()], 2, past)] == [4, 5]


def test_each_launch_is_one_record_with_what_only_the_runner_knows(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    report, launcher, _ = run(path, {}, ALL, launches=2)
    records = read_records([path]).records
    assert [record.spec for record in records] == launcher.launched
    assert [record.order for record in records] == list(range(6))
    first = records[0]
    assert (first.status, first.step_s, first.source) == ("ok", 2.0, "measured")
    assert first.started_at is not None
    assert first.duration_s is not None
    assert first.host.estimated_host_bytes is not None
    assert first.host.estimated_gpu_bytes is None  # a CPU run: null, not zero
    assert first.run_id == spec().run_id
    assert not report.interrupted


def test_a_record_holds_its_policy_ideal_by_the_none_rows_before_it(tmp_path: Path) -> None:
    card = RunSpec(
        workload=Workload(model="qwen3-30b-a3b", layers=48, seq_len=16384, ep=8),
        arm=arms.ARMS["overlap"].resolve(),
        mode=Mode(kind="rehearsal", device="cuda", world=8, nproc=1),
    )
    none = card.model_copy(update={"arm": arms.ARMS["none"].resolve()})
    times = {"forward": 0.5, "backward": 1.4, "clip": 0.0, "step": 0.1}
    rates = {"in_bytes_per_s": 50e9, "out_bytes_per_s": 50e9, "both_bytes_per_s": 90e9}
    outcomes: dict[str, Outcome | list[Outcome]] = {
        "none": fake.ok(step_s=2.01, phases_s=times, link=rates),
        "overlap": fake.ok(step_s=2.5, phases_s=times, link=rates),
    }
    path, machine = tmp_path / "r.jsonl", host(gpus=1, host_gib=512)
    results = ResultsFile(path)
    specs = interleave([card, none, card], 1)
    Runner(FakeLauncher(outcomes), results, PlainDisplay(io.StringIO()), machine, ENV, timeout_s=60).run(specs)
    results.close()
    early, base, late = read_records([path]).records
    assert (early.policy_ideal_s, early.gap_s) == (
        None,
        None,
    )  # its own forward holds waits, and there is no `none` yet
    assert (base.policy_ideal_s, base.gap_s) == (pytest.approx(2.0), pytest.approx(0.01))
    ideal = policy_ideal(late, [base])
    assert ideal is not None
    assert (late.policy_ideal_s, late.policy_ideal_parts) == (ideal.step_s, ideal.parts)
    assert late.gap_s == pytest.approx(2.5 - ideal.step_s)
    assert late.gap_parts is None  # nothing was traced


def test_a_policy_ideal_that_fails_costs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("nothing runs")

    monkeypatch.setattr("offbench.planner.ideal.policy_ideal", broken)
    run(tmp_path / "r.jsonl", {}, [spec()])
    (record,) = read_records([tmp_path / "r.jsonl"]).records
    assert (record.status, record.step_s, record.policy_ideal_s) == ("ok", 2.0, None)
    assert record.warnings == ["no policy ideal: AssertionError: nothing runs"]


def test_a_failing_arm_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    outcomes: dict[str, Outcome | list[Outcome]] = {"none": fake.oom(), "main": fake.timed_out()}
    report, _, out = run(tmp_path / "r.jsonl", outcomes, ALL)
    assert [record.status for record in report.records] == ["oom", "timeout", "ok"]
    oom, late = report.records[:2]
    assert oom.reason == "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert oom.failure is not None
    assert (oom.failure.rank, oom.phase, oom.step_s, oom.tok_s) == (1, "warmup", None, None)
    assert oom.env["torch"] == ENV["torch"]
    assert late.failure is not None
    assert late.failure.stacks == {"rank 0": "Thread 1 (idle): wait"}
    assert late.phase == "warmup"
    assert "none: oom: rank 1" in out


def test_an_invalid_window_keeps_its_figures_and_its_status(tmp_path: Path) -> None:
    bad = fake.ok(3.0, status="invalid", reason="bytes in: 5 of 6")
    report, _, _ = run(tmp_path / "r.jsonl", {"main": bad}, [spec("main")])
    record = report.records[0]
    assert (record.status, record.reason, record.step_s) == ("invalid", "bytes in: 5 of 6", 3.0)


def test_an_interrupt_keeps_the_record_and_stops(tmp_path: Path) -> None:
    report, launcher, _ = run(tmp_path / "r.jsonl", {"main": fake.interrupted()}, ALL)
    assert report.interrupted
    assert [record.status for record in read_records([tmp_path / "r.jsonl"]).records] == ["ok", "interrupted"]
    assert len(launcher.launched) == 2


def test_an_interrupt_after_the_window_keeps_the_row_and_stops(tmp_path: Path) -> None:
    def play(spec: RunSpec, folder: Path) -> Exit:
        fake.ok()(spec, folder)
        return Exit(code=None, interrupted=True)

    report, launcher, _ = run(tmp_path / "r.jsonl", {"none": play}, ALL)
    assert report.interrupted
    assert [(record.status, record.step_s) for record in report.records] == [("ok", 2.0)]
    assert len(launcher.launched) == 1


def test_a_termination_signal_interrupts(tmp_path: Path) -> None:
    def play(_: RunSpec, folder: Path) -> Exit:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            return Exit(code=None, interrupted=True)
        return Exit(code=0)

    before = signal.getsignal(signal.SIGTERM)
    report, _, _ = run(tmp_path / "r.jsonl", {"none": play}, ALL)
    assert [record.status for record in report.records] == ["interrupted"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_cannot_fit_is_skipped_with_the_numbers(tmp_path: Path) -> None:
    wide = spec("chunked", layers=30_000)
    report, launcher, out = run(tmp_path / "r.jsonl", {}, [spec(), wide])
    assert [record.status for record in report.records] == ["ok", "skipped"]
    assert launcher.launched == [spec()]
    assert "of host memory for 2 processes" in (report.records[1].reason or "")
    assert "skipped: needs about" in out


def done(of: RunSpec, launch: int = 1, status: str = "ok", **env: Any) -> RunRecord:
    return RunRecord.model_validate(
        {"run_id": of.run_id, "launch": launch, "status": status, "spec": of, "env": {**ENV, **env}}
    )


def test_resume_skips_only_what_is_done_here() -> None:
    plan = interleave(ALL, 1)

    def left(*past: RunRecord) -> list[Planned]:
        return without_done(plan, past, ENV)

    assert left(done(ALL[0])) == plan[1:]
    assert left(done(ALL[0], status="crash")) == plan
    assert left(done(ALL[0], launch=2)) == plan
    assert left(done(ALL[0], torch="9.9")) == plan
    assert left(done(ALL[0], offbench="9.9")) == plan
    assert left(done(ALL[0], cpu_model="another")) == plan
    assert left(done(ALL[0], cpus=4096)) == plan
    assert left(done(ALL[0], gpu="none of it", driver="9.9")) == plan[1:], "a CPU run does not use them"
    assert left(*(done(s) for s in ALL)) == []


def test_resume_on_a_gpu_wants_the_same_gpu_and_driver() -> None:
    on_gpu = spec().model_copy(update={"mode": Mode(kind="rehearsal", device="cuda", world=2, nproc=1)})
    plan, here = interleave([on_gpu], 1), {**ENV, "gpu": "NVIDIA H200", "driver": "580.1"}

    def left(**env: Any) -> list[Planned]:
        return without_done(plan, [done(on_gpu, **{**here, **env})], here)

    assert left() == left(cpu_model="another", cpus=4096) == []
    assert left(driver="590.2") == left(gpu="NVIDIA H100") == plan


def test_run_folders_are_kept_and_never_shared(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, {"none": fake.oom()}, [spec()])
    report, _, _ = run(path, {}, [spec()])
    assert report.records[0].status == "ok"  # the failure of the first try is not read again
    names = sorted(folder.name for folder in (tmp_path / "r.runs").iterdir())
    assert names == [f"{spec().run_id}-1", f"{spec().run_id}-1-try2"]


def ticking(*times: float) -> Callable[[], float]:
    left = list(times)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_plain_lines_show_phases_and_the_last_step() -> None:
    out = io.StringIO()
    display = PlainDisplay(out, clock=ticking(100.0))
    display.start("launch 1 of 1: none", steps=3)
    for progress in (
        Progress("build"),
        Progress("measure", 1, 3, 10.0, 1.0),
        Progress("measure", 2, 3, 10.0, 2.5),
        Progress("measure", 3, 3, 10.0, 4.0),
    ):
        display.update(progress)
    assert out.getvalue().splitlines() == [
        "launch 1 of 1: none",
        "  build",
        "  measure step 1 of 3, 10 tok/s",
        "  measure step 3 of 3, 10 tok/s, 0 s left",
    ]


def test_plain_lines_come_again_after_a_while() -> None:
    out = io.StringIO()
    display = PlainDisplay(out, clock=ticking(0.0, 5.0, 11.0, 11.0, 12.0))
    for step in range(1, 5):
        display.update(Progress("measure", step, 100))
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["1", "3"]


def test_time_left_counts_the_window_during_warm_up() -> None:
    pace = Pace(15)
    assert pace.left(Progress("build")) is None
    assert pace.left(Progress("warmup", 1, 5, time=50.0)) is None
    assert pace.left(Progress("warmup", 2, 5, time=52.0)) == 2.0 * (3 + 15)
    assert pace.left(Progress("measure", 1, 15, time=54.0)) == 2.0 * 14
    assert pace.left(Progress("drain")) is None


def test_a_terminal_gets_a_bar_and_keeps_the_closing_line() -> None:
    out = io.StringIO()
    display = TerminalDisplay(Console(file=out, force_terminal=True, width=100, highlight=False))
    display.start("launch 1 of 1: none", steps=3)
    display.update(Progress("measure", 2, 3, 1234.0, 1.0))
    display.finish("  none: 2 s a step")
    assert "measure step 2 of 3, 1234 tok/s" in out.getvalue()
    assert out.getvalue().rstrip().endswith("none: 2 s a step")


def test_a_terminal_wraps_lines_at_words() -> None:
    out = io.StringIO()
    display = TerminalDisplay(Console(file=out, force_terminal=True, width=30, highlight=False))
    display.say("none: ok, 1.234 s a step, peak 60.8 GiB. The baseline.")
    path = "results/local/2026-01-02-a-host-with-a-long-name.jsonl"
    display.finish(f"  records: {path}")
    assert out.getvalue().splitlines() == [
        "none: ok, 1.234 s a step, peak",
        "  60.8 GiB. The baseline.",
        "  records:",
        f"    {path}",
    ]


def test_durations() -> None:
    assert [show_seconds(s) for s in (9.4, 200, 7500)] == ["9 s", "3 min 20 s", "2 h 5 min"]
    assert describe(Progress("drain"), None) == "drain"


def test_the_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    tail = ProgressTail(path)
    assert tail.read() == []
    path.write_text('{"phase": "build"}\n{"phase": "mea')
    assert [progress.phase for progress in tail.read()] == ["build"]
    with path.open("a") as file:
        file.write('sure", "step": 1, "of": 3, "tok_s": 2.0, "time": 5.0}\n')
    assert tail.read() == [Progress("measure", 1, 3, 2.0, 5.0)]
    assert tail.read() == []


def test_wall_time_is_told_by_phase(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    entries = [("start", 103.0), ("build", 105.0), ("warmup", 106.0), ("warmup", 108.0), ("measure", 109.5)]
    path.write_text("".join(json.dumps({"phase": phase, "time": at}) + "\n" for phase, at in entries))
    assert phase_seconds(path, 100.0, 110.0) == {
        "launch": 3.0,
        "start": 2.0,
        "build": 1.0,
        "warmup": 3.5,
        "measure": 0.5,
    }
    assert phase_seconds(tmp_path / "none.jsonl", 100.0, 104.0) == {"launch": 4.0}
