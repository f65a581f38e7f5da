"""The real launcher under torchrun, with a stand-in worker: every way a launch can end, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbench import launcher
from offbench.config import Mode, RunSpec, Workload
from offbench.extras import Extras
from offbench.launcher import Exit, TorchrunLauncher, end_all, launch_env, members
from offbench.outcome import AFTERWARDS, UNENDED, classify
from offbench.progress import Progress

ROOT = Path(__file__).parent.parent
SPEC = RunSpec(workload=Workload(model="tiny", layers=1), mode=Mode(device="cpu", world=2, nproc=2))


def launch(folder: Path, act: str, timeout_s: float = 100.0) -> tuple[Exit, list[Progress]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STAND_IN": act, "OMP_NUM_THREADS": "1"}
    seen: list[Progress] = []
    end = TorchrunLauncher("tests.stand_in", env).launch(SPEC, folder, timeout_s, seen.append)
    return end, seen


def test_ok(tmp_path: Path) -> None:
    end, seen = launch(tmp_path, "ok")
    outcome = classify(tmp_path, end, 100)
    assert (end.code, outcome.status) == (0, "ok")
    assert outcome.measured["env"] == {"arm": "none", "omp": "1"}
    assert [progress.phase for progress in seen] == ["build"]
    assert list(tmp_path.glob("logs/**/stderr.log"))


def hang(folder: Path) -> bool:
    """Whether both ranks wait for ever, each with its helper."""
    return len(list(folder.glob("waiting-*"))) == 2


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No patience with stand-ins, which refuse to end."""
    monkeypatch.setattr(launcher, "GRACE_S", 0.3)


@pytest.mark.usefixtures("hasty")
def test_a_hang_becomes_a_timeout_with_stacks_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock() -> float:
        """99 s pass when both ranks hang."""
        return time.monotonic() + 99 * hang(tmp_path)

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    end, _ = launch(tmp_path, "hang", timeout_s=99)
    assert members(tmp_path) == []
    outcome = classify(tmp_path, end, 99)
    assert (outcome.status, outcome.phase) == ("timeout", "build")
    assert outcome.failure is not None
    assert outcome.failure.stacks is not None
    assert set(outcome.failure.stacks) == {"rank 0", "rank 1"}
    assert all("wait_for_ever" in stack for stack in outcome.failure.stacks.values())


def test_a_crash_carries_the_failing_ranks_own_error(tmp_path: Path) -> None:
    end, _ = launch(tmp_path, "crash")
    assert members(tmp_path) == []
    outcome = classify(tmp_path, end, 100)
    assert (outcome.status, outcome.reason) == ("crash", "rank 1: ValueError: bad")
    assert outcome.failure is not None
    assert outcome.failure.stack == "here"


def test_a_rank_killed_from_outside_is_a_crash_with_its_last_words(tmp_path: Path) -> None:
    end, _ = launch(tmp_path, "die")
    assert members(tmp_path) == []
    outcome = classify(tmp_path, end, 100)
    assert outcome.status == "crash"
    assert outcome.reason == "rank 1 was killed by SIGKILL, perhaps for host memory; its last words: about to die"
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.type, outcome.phase) == (1, "SIGKILL", "build")


def test_a_killed_rank_is_named_even_when_its_peer_reports(tmp_path: Path) -> None:
    peer = {"rank": 0, "time_ns": 1, "type": "RuntimeError", "message": "Connection reset by peer", "peer": True}
    (tmp_path / "failure-0.json").write_text(json.dumps(peer))
    (tmp_path / "torchrun.log").write_text(
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 5)  (SIGTERM)\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 3)\n"
        "  exitcode  : -11 (pid: 6)  (SIGSEGV)\n"
    )
    outcome = classify(tmp_path, Exit(code=1), 100)
    assert outcome.reason == "rank 3 was killed by SIGSEGV"
    assert outcome.failure is not None
    assert outcome.failure.rank == 3
    own = {"rank": 1, "time_ns": 9, "type": "ValueError", "message": "bad", "peer": False}
    (tmp_path / "failure-1.json").write_text(json.dumps(own))
    assert classify(tmp_path, Exit(code=1), 100).reason == "rank 1: ValueError: bad"


def test_a_rank_killed_before_it_said_anything_was_starting(tmp_path: Path) -> None:
    (tmp_path / "torchrun.log").write_text("  rank : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 6)  (SIGKILL)\n")
    outcome = classify(tmp_path, Exit(code=1), 100)
    assert (outcome.status, outcome.phase) == ("crash", "start")
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.phase) == (0, "start")
    assert classify(tmp_path, Exit(code=None, interrupted=True), 1).phase == "start"
    late = classify(tmp_path, Exit(code=None, timed_out=True), 1)
    assert (late.reason or "").startswith("not done after 1 s, in start; ")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (Exit(code=None, interrupted=True), "ended by a signal before it was done"),
        (Exit(code=None, timed_out=True), "not done after 1 s, in extras; stacks are in the record, logs in "),
        (Exit(code=1), "torchrun ended with code 1 and no rank left a report"),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_a_launch_that_handed_its_figures_over_is_measured_however_it_ended(
    tmp_path: Path, end: Exit, why: str, complete: bool
) -> None:
    status = "ok" if complete else "invalid"
    reason = None if complete else "window slope: asked for, but not measured"
    result = {"status": status, "reason": reason, "step_s": 2.0, "complete": complete}
    (tmp_path / "result.json").write_text(json.dumps(result | {"warnings": ["first"]}))
    (tmp_path / "progress.jsonl").write_text(json.dumps({"phase": "extras", "step": 0, "of": 0, "time": 1.0}) + "\n")
    outcome = classify(tmp_path, end, 1)
    assert (outcome.status, outcome.reason, outcome.measured["step_s"]) == (status, result["reason"], 2.0)
    first, warning = outcome.measured["warnings"]
    assert first == "first"
    assert warning.startswith(f"{UNENDED if complete else AFTERWARDS}: {why}")
    assert (outcome.failure is None) == end.interrupted
    assert "complete" not in outcome.measured, "it is no field of a record"
    assert classify(tmp_path, Exit(code=0), 1).measured["warnings"] == ["first"]


@pytest.mark.usefixtures("hasty")
def test_an_interrupt_ends_the_launch_and_a_second_one_does_not_stop_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_again(process: subprocess.Popen[bytes], folder: Path) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            stopped.append(True)
        end_all(process, folder)

    def interrupt_once_running() -> None:
        while not hang(tmp_path):
            pass_time.wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    stopped: list[bool] = []
    monkeypatch.setattr(launcher, "end_all", interrupted_again)
    pass_time = threading.Event()
    helper = threading.Thread(target=interrupt_once_running, daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        helper.start()
        end, _ = launch(tmp_path, "hang")
        helper.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.interrupted
    assert not stopped
    assert members(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_the_environment_is_explicit(tmp_path: Path) -> None:
    cpu = launch_env(SPEC, tmp_path, {})
    assert (cpu["CUDA_VISIBLE_DEVICES"], int(cpu["OMP_NUM_THREADS"]) >= 1) == ("", True)
    cuda = launch_env(RunSpec(), tmp_path, {"OMP_NUM_THREADS": "3", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"})
    assert cuda["OMP_NUM_THREADS"] == "3"
    assert cuda["PYTORCH_ALLOC_CONF"] == cuda["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
    assert launch_env(RunSpec(), tmp_path, {})["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert cuda["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (cuda["OFFBENCH_PROFILE"], cuda["OFFBENCH_CHECK_WINDOW"]) == ("", "")
    assert launch_env(SPEC, tmp_path, {}, Extras(check_window=True))["OFFBENCH_CHECK_WINDOW"] == "1"
    assert (cuda["OFFBENCH_SPLIT"], cpu["OFFBENCH_SPLIT"]) == ("1", ""), "a CPU has no queue to look at"
    assert launch_env(RunSpec(), tmp_path, {}, Extras(split=False))["OFFBENCH_SPLIT"] == ""
    for extras in (Extras(watch=False, split=False), Extras(check_window=True, profile=tmp_path / "kept")):
        assert Extras.of(launch_env(RunSpec(), tmp_path, {}, extras)) == extras
    assert Extras.of({}) == Extras(split=False), "a rank that nobody launched"


def test_the_command_names_every_choice(tmp_path: Path) -> None:
    command = TorchrunLauncher().command(RunSpec(), tmp_path)
    assert command[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"),
        *("--log-dir", str(tmp_path / "logs"), "--redirects", "3", "-m", "offbench.worker"),
    ]


@pytest.mark.parametrize(
    ("failures", "status", "reason"),
    [
        ([{"rank": 0, "time_ns": 1, "peer": True}, {"rank": 1, "time_ns": 9, "oom": True}], "oom", "rank 1: E: m"),
        ([{"rank": 0, "time_ns": 7}, {"rank": 1, "time_ns": 3}], "crash", "rank 1: E: m"),
        ([{"rank": 0, "time_ns": 7, "peer": True}], "crash", "rank 0: E: m"),
    ],
)
def test_the_earliest_failure_that_is_no_peers_decides(
    tmp_path: Path, failures: list[dict[str, object]], status: str, reason: str
) -> None:
    from offbench.fake import failed

    end = failed(*({"type": "E", "message": "m\nn"} | failure for failure in failures))(SPEC, tmp_path)
    outcome = classify(tmp_path, end, 1)
    assert (outcome.status, outcome.reason, outcome.phase) == (status, reason, "warmup")


def test_an_end_without_any_file_is_explained(tmp_path: Path) -> None:
    assert classify(tmp_path, Exit(code=-9), 1).reason == (
        "torchrun ended with code -9 and no rank left a report: killed from outside, perhaps for host memory; "
        "see torchrun.log"
    )
    assert classify(tmp_path, Exit(code=0), 1).status == "crash"
