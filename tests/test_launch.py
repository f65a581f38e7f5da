"""Launches on the CPU through the command line: gloo, the whole record. Two under torchrun, the others forked."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from offbench import cli, rank
from offbench.offload import updates
from offbench.offload.adamw import OffloadedAdamW
from offbench.offload.gradient_pool import GradientPool
from offbench.offload.small_copies import KernelCopies
from offbench.outcome import AFTERWARDS
from offbench.workload.activation_offload import ActivationOffload
from offbench.workload.broadcast import Broadcaster
from tests.forked import ForkedLauncher

Record = dict[str, Any]
ON_THE_CPU = ("run", "--device", "cpu", "--model", "tiny", "--results")


def recorded(results: Path) -> list[Record]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def launch(results: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[Record]]:
    done = subprocess.run(
        [sys.executable, "-m", "offbench", *ON_THE_CPU, str(results), *options],
        check=False,
        text=True,
        capture_output=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done, recorded(results)


def fork(results: Path, *options: str, sabotage: Callable[[], None] | None = None) -> tuple[int, list[Record]]:
    """The same with forked ranks; the command line's exit code and the records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "make_launcher", lambda: ForkedLauncher(sabotage))
        patch.setenv("OMP_NUM_THREADS", "1")
        return cli.main([*ON_THE_CPU, str(results), *options]), recorded(results)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Of two ranks each: overlap under torchrun, the others forked."""
    results = tmp_path_factory.mktemp("run") / "out.jsonl"
    options = ("--nproc", "2", "--ep", "2", "--warmup", "1", "--steps", "2", "--numa")
    code, found = fork(results, "--arm", "none", "--arm", "chunked", *options)
    assert code == 0, found
    done, found = launch(results, "--arm", "overlap", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return {record["spec"]["arm"]["name"]: record for record in found}


def test_every_check_of_a_launch_holds(records: dict[str, Record]) -> None:
    assert list(records) == ["none", "chunked", "overlap"]
    for record in records.values():
        assert record["status"] == "ok"
        assert set(record["checks"].values()) == {"ok"}
        assert record["host"]["numa"] == "not applicable"
        assert [(row["rank"], row["numa"]) for row in record["ranks"]] == [
            (0, "not applicable"),
            (1, "not applicable"),
        ]
        assert {row["local_bytes"] for row in record["ranks"]} == {None}, "no GPU to be near to"
        assert record["env"]["affinity_joined"] == record["env"]["affinity_after"] == record["env"]["affinity"]
        assert not any("rank" in warning for warning in record["warnings"])
        assert len(record["steps"]) == 2
        assert 0 < record["phases_s"]["loss"] < record["phases_s"]["forward"]
        (first,) = record["warmup_steps"]
        assert first["step_s"] is None
        assert 0 < first["loss"] != record["steps"][0]["loss"], "another batch"
        assert first["grad_norm"] > 0
        assert record["tok_s"] * record["step_s"] == pytest.approx(record["tokens_per_step"])
        assert record["env"]["torch"]
        assert record["spec"]["arm"]["fsdp_copies"] == "stock", "no GPU, no copy engine"
        assert record["spec"]["arm"]["readbacks"] == "copy"


def test_arms_train_the_same_bit_for_bit(records: dict[str, Record]) -> None:
    def course(name: str) -> list[object]:
        trained = records[name]["warmup_steps"] + records[name]["steps"]
        steps = [(step["loss"], step["grad_norm"], step["clip_factor"]) for step in trained]
        return [*steps, records[name]["params_checksum"]]

    assert course("none") == course("chunked") == course("overlap")


def test_norms_are_those_before_clipping_and_the_factor_says_what_became_of_them(
    records: dict[str, Record],
) -> None:
    """DeepSpeed#7302, #7220, #8068, transformers#37566, prime-rl#3234"""
    for record in records.values():
        max_norm = record["spec"]["workload"]["max_norm"]
        assert max_norm == 1.0
        assert record["adamw"] == record["spec"]["workload"]["adamw"]
        for step in record["steps"]:
            assert step["clip_factor"] == pytest.approx(min(1.0, max_norm / (step["grad_norm"] + 1e-6)), rel=1e-5)


def test_bytes_moved_are_those_of_the_state(records: dict[str, Record]) -> None:
    for name, record in records.items():
        state = record["local_params"] * 8
        moved = record["moved"]
        if name == "none":
            assert moved["in_bytes_per_step"] == 0
            continue
        assert record["chunks"] > 4
        assert record["state"] == {"device_bytes": 0, "host_bytes": state}
        for way in ("in", "out"):
            assert moved[f"{way}_bytes_per_step"] == moved[f"planned_{way}_bytes_per_step"]
            assert moved[f"{way}_bytes_per_step"] == pytest.approx(state, rel=0.02)


def test_unmeasured_figures_are_null(records: dict[str, Record]) -> None:
    record = records["overlap"]
    assert record["peak"]["steady_allocated_bytes"] is None
    assert record["link"]["both_bytes_per_s"] is None
    assert record["mfu"] is None
    assert record["small_copies"]["longest_wait_s"] is None
    assert record["host_lead"] is None


def test_small_copies_are_counted_in_every_record_and_alike_in_all_arms(records: dict[str, Record]) -> None:
    """Layers and two more units gather and scatter; the CPU has no mailbox for expert counts."""
    counts = [record["small_copies"] for record in records.values()]
    assert counts[0]["uploads_per_step"] > 2 * records["none"]["spec"]["workload"]["layers"]
    assert (counts[0]["readbacks_per_step"], counts[0]["by_kernel_per_step"]) == (1, 0)
    assert counts == 3 * [counts[0]]


def traced(folder: Path, record: Record) -> list[dict[str, Any]]:
    """The events of the launch's one trace, which has two steps."""
    (name,) = record["traces"]
    with gzip.open(folder / name, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    steps = sorted(event["name"] for event in events if event["name"].startswith("ProfilerStep#"))
    assert steps == ["ProfilerStep#4", "ProfilerStep#5"], "after the window of steps 1 to 3 and one to warm up"
    updates = sorted(event["ts"] for event in events if event["name"].startswith("Optimizer.step#"))
    begun = min(event["ts"] for event in events if event["name"] == steps[0])
    assert (len(updates), [at < begun for at in updates].count(True)) == (3, 1), "it, too, under the profiler"
    return events


def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    options = ["--arm", "none", "--arm", "stream", "--mode", "rehearsal", "--world", "8", "--nproc", "1", "--ep", "8"]
    options += ["--profile", str(tmp_path / "traces"), "--gradient-pool", "auto"]
    options += ["--activation-offload", "--activation-copies", "kernel"]
    code, found = fork(tmp_path / "r.jsonl", *options, "--warmup", "1", "--steps", "2")
    assert code == 0, found
    for record in found:
        assert record["checks"]["activations"] == "ok"
        assert record["small_copies"]["readbacks_per_step"] > 0
        # Nobody counts memory here, so all of them, from the third backward on: fp32, one value a parameter.
        assert record["gradient_pool_bytes"] == pytest.approx(4 * record["local_params"], rel=0.02), "but for padding"
    first, second = found
    assert first["spec"]["mode"]["kind"] == "rehearsal"
    assert [s["loss"] for s in first["steps"]] == [s["loss"] for s in second["steps"]]
    assert first["expert_tokens_max_over_mean"] == 1.0
    for record in found:
        events = traced(tmp_path / "traces", record)
        stamps = [e["name"] for e in sorted(events, key=lambda e: e["ts"]) if e["name"].startswith("offbench::")]
        one_step = ["begin", "forward", "backward", "clip", "step", "end"]
        assert stamps == [f"offbench::{name}" for name in 2 * one_step]
        assert record["split"] is None, "no GPU, no compute stream"


def test_two_more_windows_check_the_step(tmp_path: Path) -> None:
    """Under torchrun, with a trace, too."""
    options = ["--arm", "chunked", "--mode", "rehearsal", "--world", "2", "--nproc", "1", "--layers", "1"]
    options += ["--profile", str(tmp_path / "traces")]
    options += ["--check-window", "--no-watch"]
    done, (record,) = launch(tmp_path / "w.jsonl", *options, "--warmup", "1", "--steps", "2")
    assert record["small_copies"] is None, "nobody watched"
    assert record["gradient_pool_bytes"] is None, "FSDP2's own"
    assert record["window_slope_s"] > 0
    # A CPU's steps may well differ by more than 0.5 %: then the launch is invalid, for this reason alone.
    wrong = [name for name, found in record["checks"].items() if found != "ok"]
    assert (wrong, done.returncode) in (([], 0), (["window slope"], 1))
    assert len(record["steps"]) == 2, "the two windows enter no other figure"
    assert traced(tmp_path / "traces", record)


def break_what_follows() -> None:
    def broken(*_: object) -> tuple[None, None, None]:
        if int(os.environ["LOCAL_RANK"]) == 1:
            raise torch.OutOfMemoryError("no memory for a trace")
        return None, None, None

    rank.trace = broken  # type: ignore[assignment]


def test_what_fails_after_the_window_costs_nothing_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--arm", "overlap", "--nproc", "2", "--warmup", "1", "--steps", "2")
    code, (record,) = fork(tmp_path / "a.jsonl", *options, sabotage=break_what_follows)
    assert (code, record["status"], record["reason"]) == (1, "ok", None), "measured, but it failed"
    assert (record["failure"]["type"], record["failure"]["phase"]) == ("OutOfMemoryError", "extras")
    assert set(record["checks"].values()) == {"ok"}
    assert record["step_s"] > 0
    (warning,) = record["warnings"]
    assert warning == f"{AFTERWARDS}: rank 1: OutOfMemoryError: no memory for a trace"
    assert f"  {warning}\n" in capsys.readouterr().out


def test_a_job_that_no_rank_could_build_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """--activation-offload without checkpointing breaks one of the workload's own rules, asked before any launch."""
    done, found = launch(tmp_path / "c.jsonl", "--arm", "none", "--ac", "none", "--activation-offload", "--nproc", "2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--ac full" in done.stderr
    assert found == []


def test_a_state_budget_moves_less(tmp_path: Path) -> None:
    options = ("--arm", "overlap", "--nproc", "1", "--warmup", "1", "--steps", "2", "--no-watch")
    _, (all_moves,) = fork(tmp_path / "a.jsonl", *options)
    code, (record,) = fork(tmp_path / "b.jsonl", *options, "--state-budget", "2MiB")
    assert code == 0, record
    assert set(record["checks"].values()) == {"ok"}
    saved = all_moves["moved"]["in_bytes_per_step"] - record["moved"]["in_bytes_per_step"]
    assert 0 < saved <= 2 << 20
    assert record["params_checksum"] == all_moves["params_checksum"]


def no_updates() -> None:
    updates.run_calls = lambda *_, **__: None  # type: ignore[assignment]


def no_kernel_copies() -> None:
    KernelCopies.__init__ = lambda self: setattr(self, "copies_in", 0)  # type: ignore[method-assign]
    KernelCopies.restore = lambda self: None  # type: ignore[method-assign]


def no_activation_offload() -> None:
    ActivationOffload._save = lambda self, block, x: x  # type: ignore[method-assign]


def no_pool() -> None:
    def empty(self: GradientPool, *_: object) -> None:
        self._comms = []

    GradientPool.__init__ = empty  # type: ignore[method-assign]


SABOTAGE = {
    "updates": no_updates,
    "fsdp copies": no_kernel_copies,
    "gradient pool": no_pool,
    "activations": no_activation_offload,
}


@pytest.mark.parametrize("check", SABOTAGE)
def test_an_arm_that_does_not_do_its_work_is_invalid(check: str, tmp_path: Path) -> None:
    """Each rank breaks the arm from inside."""
    options = (
        "--arm",
        "overlap",
        "--activation-offload",
        "--nproc",
        "1",
        "--warmup",
        "1",
        "--steps",
        "1",
        "--no-watch",
    )
    options += ("--fsdp-copies", "kernel", "--gradient-pool", "compute")
    code, (record,) = fork(tmp_path / "s.jsonl", *options, sabotage=SABOTAGE[check])
    assert code == 1
    assert record["status"] == "invalid"
    assert record["reason"].startswith(f"{check}: ")


BROADCAST = ("--nproc", "2", "--ep", "2", "--warmup", "2", "--steps", "2", "--no-watch")
BROADCAST += ("--broadcast-every", "2", "--lr", "1e-4")


def test_weight_broadcasts_are_recorded_and_checked(tmp_path: Path) -> None:
    code, found = fork(tmp_path / "b.jsonl", "--arm", "none", "--arm", "overlap", *BROADCAST)
    assert code == 0, found
    for record in found:
        sent = record["broadcast"]
        assert record["checks"]["replica"] == "ok"
        assert sent["broadcasts"] == 2
        assert sent["full_bytes"] == 2 * record["params"]
        assert 0 < sent["delta_bytes"] <= sent["full_bytes"]
        assert 0 < sent["changed"] <= 1
        assert 0 <= sent["drain_s"] < sent["delta_s"] < sum(step["step_s"] for step in record["steps"])
        assert sent["full_s"] > 0
    first, second = ({k: r["broadcast"][k] for k in ("delta_bytes", "changed")} for r in found)
    assert first == second


def no_drain() -> None:
    OffloadedAdamW.settled = lambda self: nullcontext()  # type: ignore[assignment,method-assign]


def no_delta() -> None:
    Broadcaster._send_delta = lambda *_: None  # type: ignore[assignment,method-assign]
    Broadcaster._send_whole = lambda *_: None  # type: ignore[assignment,method-assign]


REPLICA_SABOTAGE = {"no drain": no_drain, "no delta": no_delta}


@pytest.mark.parametrize("fault", REPLICA_SABOTAGE)
def test_a_stale_replica_is_invalid(fault: str, tmp_path: Path) -> None:
    options = ("--arm", "overlap", "--lead", "1", "--ahead", "0", *BROADCAST)
    code, (record,) = fork(tmp_path / "s.jsonl", *options, sabotage=REPLICA_SABOTAGE[fault])
    assert code == 1
    assert record["status"] == "invalid"
    assert record["checks"]["replica"].endswith("such)")
