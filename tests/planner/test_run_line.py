"""The command that a plan offers is one that runs, and runs what was simulated."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from offbench import cli, commands
from offbench.arms import ARMS
from offbench.planner.choose import Choice, at_budget, stream_at
from offbench.planner.policy import Policy
from offbench.planner.text import run_line
from offbench.resolve import resolve
from tests.hosts import host
from tests.planner.test_command import GIB, NATIVE, SEED, inputs, lines, planned


@pytest.mark.parametrize(
    ("more", "arm"),
    [
        ((), "stream"),
        (("--target", "1.43", "--state-budget", "4GiB", "--fsdp-copies", "stock"), "zerocopy"),
        (("--target", "3.2", "--seq-len", "8192", "--fsdp-copies", "stock", "--readbacks", "copy"), "chunked"),
    ],
)
def test_the_recommended_command_is_one_that_runs(
    more: tuple[str, ...],
    arm: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    offered = next(line for line in lines(capsys, *SEED, *more) if line.startswith("Measure it: "))
    words = shlex.split(offered.removeprefix("Measure it: "))
    assert words[:2] == ["offbench", "run"]
    assert words[words.index("--arm", len(words) - words[::-1].index("--arm") - 1) + 1] == arm
    monkeypatch.setattr(commands, "detect", lambda: host(gpus=8, host_gib=2000))
    monkeypatch.setattr(commands.environment, "capture", lambda _bus_id: {})
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words[1:], "--dry-run"]) == 0
    assert f"would append {words.count('--arm')} records" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arm", "slots", "budget", "beside"),
    [
        ("main", None, 4, True),
        ("chunked", None, 0, True),
        ("overlap", None, 7, True),
        ("overlap", 2, 0, False),
        ("overlap", 8, 0, False),  # --slots 8 would hold for chunked as well
        ("stream", None, 0, True),
        ("stream", None, 7, True),
        ("zerocopy", None, 4, True),
    ],
)
def test_the_command_offered_runs_what_was_simulated(
    arm: str, slots: int | None, budget: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, seen = planned(), []
    taken = stream_at(at, budget * GIB) if arm == "stream" else at_budget(at, arm, budget * GIB, slots)
    monkeypatch.setattr(commands, "run_command", lambda options, *_: seen.append(options) or 0)
    rows = [ARMS["none"].resolve(), *([at_budget(at, "chunked", budget * GIB).arm] if beside else []), taken.arm]
    for copies, readbacks in (("kernel", "kernel"), ("stock", "kernel"), ("stock", "copy")):
        small = {"fsdp_copies": copies, "readbacks": readbacks}
        line = run_line(inputs(source="seed-8xh200", **small), Choice(taken, True, ""))
        assert cli.main(shlex.split(line)[1:]) == 0
        specs = resolve(seen[-1], host(gpus=8, host_gib=2000)).specs
        everywhere = {"numa": True, **small}
        assert [spec.arm for spec in specs] == list(dict.fromkeys(row.model_copy(update=everywhere) for row in rows))
    cap = ARMS[arm].schedule(specs[-1].arm).chunk_bytes
    assert cap == (GIB if arm in {"main", "zerocopy"} else GIB // 4)
    assert at.simulate(Policy.of(ARMS[arm].schedule(specs[-1].arm))) == taken.simulated


def test_a_plan_of_an_emulated_record_is_measured_on_the_same_link(capsys: pytest.CaptureFixture[str]) -> None:
    emulated = NATIVE.with_name("h200-rehearsal-emulated-38.8.jsonl")
    few = ("--record", str(emulated), "--state-budget", "14GiB")
    shown = lines(capsys, *few)
    assert shown[-1].endswith(" --emulate-link 38.8GiB/s")
    assert not any("zerocopy" in line for line in shown)  # it makes no copies that could be repeated
    assert "--emulate-link" not in lines(capsys, *few, "--from", "seed-8xh200")[-1]
