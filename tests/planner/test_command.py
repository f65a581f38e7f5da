from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offbench import cli, commands
from offbench.arms import ARMS
from offbench.errors import UsageError
from offbench.planner import command
from offbench.planner.choose import Candidate, candidates, choose, pareto
from offbench.planner.gather import Inputs, PlanOptions, gather
from offbench.planner.inputs import Compute, Links
from offbench.planner.simulate import Simulated, Waits
from offbench.planner.sources import SEED_COMPUTE, SEED_LINKS, links_of_machine
from offbench.topology.imports import load_machine
from offbench.topology.model import Machine, Source
from tests.hosts import host
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
    assert "in 33 chunks of up to 1GiB" in text
    assert "published for this job and machine: prime-rl#4427" in text
    assert "26.0 in, 26.0 out, 38.8 both ways" in text
    assert "uplink A 52.0 / 2" in text
    assert "socket0 155.0 / 4" in text
    rows = {
        line.split("  ")[0]: line.split() for line in shown if line.startswith(("none ", "main ", "chunk", "over"))
    }
    assert set(rows) == {"none", "main", "chunked, 2 slots", *(f"overlap, {n} slots" for n in (2, 4, 8))}
    assert rows["none"][1:4] == ["2.255", "1.00", "58.1k"]
    assert rows["main"][1] == "4.442"
    assert any(
        line.startswith("Take overlap, 4 slots: no schedule that offloads stays within 1.05 x") for line in shown
    )
    assert "lower bound" in text


def test_the_recommended_command_is_one_that_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offered = next(line for line in lines(capsys, *SEED) if line.startswith("Measure it: "))
    words = shlex.split(offered.removeprefix("Measure it: "))
    assert words[:2] == ["offbench", "run"]
    monkeypatch.setattr(commands, "detect", lambda: host(gpus=8, host_gib=2000))
    monkeypatch.setattr(commands.environment, "capture", lambda _bus_id: {})
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words[1:], "--dry-run"]) == 0
    assert "would append 3 records" in capsys.readouterr().out


def test_a_record_gives_model_times_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(capsys, "--record", str(NATIVE), "--target", "1.2")
    text = "\n".join(shown)
    assert "measured: median of 2 launches of none, 1 GPU copying" in text
    assert "clip 0.0134" in text
    assert any(
        line.startswith("Take overlap, 2 slots: the least state on the GPU of all within 1.2 x") for line in shown
    )
    elsewhere = inputs(record=NATIVE, source="seed-8xh200")
    assert elsewhere.links.both == pytest.approx(38.75 * GIB)
    assert elsewhere.compute.forward == pytest.approx(0.498, abs=0.001)


def test_times_from_flops_say_what_they_assume() -> None:
    found = inputs(model="qwen3-30b-a3b", seq_len=8192, source="seed-8xh200")
    assert "400 TFLOP/s" in found.compute_from
    # 6 x active parameters and attention at 8,192 tokens: 37.6e9 FLOPs a token
    assert found.compute.forward + found.compute.backward == pytest.approx(8192 * 37.6e9 / 400e12, rel=0.02)
    twice = inputs(model="qwen3-30b-a3b", seq_len=8192, source="seed-8xh200", tflops=800.0)
    assert twice.compute.backward == pytest.approx(found.compute.backward / 2)


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
    assert shown[-1].startswith("In your trainer: the schedule of arm overlap, 2 slots")
    split = inputs(params=8 * GIB, forward=1.0, backward=1.0, one_way="9GiB/s").job.layout
    assert split.nbytes == pytest.approx(8 * GIB, rel=1e-4)


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
    assert any(line.startswith("main ") and line.endswith("-9.3 %") for line in shown)
    assert any("small copies queue behind bulk ones" in line for line in shown)


REFUSED = [
    (("--model", "qwen"), "did you mean qwen3-30b-a3b"),
    (("--model", "tiny", "--bytes", "1GiB"), "--model and --bytes each say"),
    (("--record", str(NATIVE), "--layers", "4"), "--layers: the times of --record"),
    (("--from", "seed-8xh200", "--one-way", "1GiB/s"), "--one-way and --from"),
    (("--both-ways", "1GiB/s"), "--both-ways needs --one-way"),
    (("--one-way", "2GiB/s", "--both-ways", "1GiB/s"), "is less than --one-way"),
    (("--from", "seed-8xh200", "--update", "1"), "--forward and --backward go together"),
    (("--from", "seed-8xh200", "--bytes", "1GiB"), "how long does a step compute"),
    (("--from", "seed-8xh200", "--target", "0.9"), "--target 0.9"),
    (("--from", "seed-8xh200", "--target", "nan"), "--target nan"),
    (("--from", "seed-8xh200", "--ep", "3"), "--ep 3: must divide"),
    (("--params", "1000", "--ep", "2"), "--ep needs a --model"),
    (("--record", str(ROOT / "results" / "seed-table-a.jsonl")), "no measured row of arm none"),
    ((), "no GPU here"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_bad_input_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "this_host", nowhere)
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_planning_loads_no_torch() -> None:
    code = f"import sys; from offbench.cli import main; main({['plan', *SEED]}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False"


def row(arm: str, step_s: float, state: int) -> Candidate:
    return Candidate(ARMS[arm].resolve(), Simulated(step_s, Waits(), 0, state, 0), 0.0)


def test_the_front_is_what_nobody_beats_and_of_equals_the_first() -> None:
    none, slow, fast, same = row("none", 1.0, 9), row("main", 2.0, 9), row("chunked", 1.5, 2), row("overlap", 1.5, 2)
    assert pareto([none, slow, fast, same]) == [none, fast]


def test_the_choice_is_the_least_state_within_the_target_else_the_fastest() -> None:
    none, small, middle = row("none", 1.0, 9), row("chunked", 1.5, 2), row("overlap", 1.04, 4)
    assert choose([none, small, middle], 1.05).candidate is middle
    assert choose([none, small, middle], 1.6).candidate is small
    tight = choose([none, small, middle], 1.01)
    assert (tight.candidate, tight.meets_target) == (middle, False)
    assert "keep it there (none)" in tight.reason


def test_a_faster_link_never_makes_a_candidate_slower() -> None:
    fast = Links(52 * GIB, 52 * GIB, 77.6 * GIB)
    pairs = zip(
        candidates(QWEN, SEED_COMPUTE, SEED_LINKS, GIB), candidates(QWEN, SEED_COMPUTE, fast, GIB), strict=True
    )
    assert all(quick.simulated.step_s <= slow.simulated.step_s for slow, quick in pairs)
    assert choose(candidates(QWEN, Compute(3, 3, 0.05), fast, GIB), 1.05).meets_target
