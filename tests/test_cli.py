from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbench import cli, commands, fake
from offbench.fake import FakeLauncher, Outcome
from offbench.results_file import read_records
from tests.hosts import host

ROOT = Path(__file__).parent.parent


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLauncher:
    """The command line with a launcher that starts nothing, on a host without a GPU, in an empty folder."""
    stand_in = FakeLauncher()
    monkeypatch.setattr(cli, "make_launcher", lambda: stand_in)
    monkeypatch.setattr(commands, "detect", lambda: host(host_gib=64))
    monkeypatch.chdir(tmp_path)
    return stand_in


def play(launcher: FakeLauncher, **outcomes: Outcome | list[Outcome]) -> None:
    launcher.outcomes.update(outcomes)


def modules(*words: str) -> set[str]:
    """Modules loaded after running the command line with these words in a fresh interpreter."""
    code = f"import sys; from offbench.cli import main; main({list(words)}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [("--help",), ("--version",), ()])
def test_help_loads_neither_torch_nor_pydantic(words: tuple[str, ...]) -> None:
    loaded = modules(*words)
    assert "typer" in loaded
    assert not loaded & {"torch", "pydantic", "rich", "numpy", "pandas"}


@pytest.mark.parametrize(
    "words", [("run", "--help"), ("report", "results/seed-table-a.jsonl"), ("arms",), ("run", "--dry-run")]
)
def test_no_command_loads_torch(words: tuple[str, ...]) -> None:
    assert "torch" not in modules(*words)


def test_run_records_judges_and_shows_plain_lines(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", "--results", "out.jsonl", "--launches", "2"]) == 0
    names = [spec.arm.name for spec in launcher.launched[:6]]
    assert names == ["none", "main", "chunked", "chunked", "overlap", "stream"]
    assert launcher.launched[6:] == launcher.launched[5::-1]
    assert len(read_records([tmp_path / "out.jsonl"]).records) == 12
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "launch 1 of 12: none, repeat 1" in out
    assert "  measure step 15 of 15, 1000 tok/s, 0 s left" in out
    assert "chunked: ok, 3 s a step, x none 1.50, exposed 1.000 s, peak 1.0 GiB. Try --arm overlap" in out
    assert out.rstrip().endswith("\nrecords: out.jsonl\ncompare: offbench report out.jsonl")


def test_a_failed_arm_makes_exit_code_1(launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    play(launcher, main=fake.oom(), chunked=fake.timed_out())
    words = ["run", "--arm", "none", "--arm", "main", "--arm", "chunked", "--results", "o.jsonl"]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert "main: oom in warmup: rank 1: OutOfMemoryError" in out
    assert "chunked: timeout in warmup: not done after 30 min 0 s" in out
    assert "none: ok, 2 s a step" in out


def test_an_interrupt_makes_exit_code_130_and_resume_goes_on(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["run", "--arm", "none", "--arm", "main", "--arm", "overlap", "--results", "o.jsonl"]
    play(launcher, main=[fake.interrupted(), fake.ok()])
    assert cli.main(words) == 130
    assert cli.main([*words, "--resume"]) == 0
    assert [spec.arm.name for spec in launcher.launched] == ["none", "main", "main", "overlap"]
    out = capsys.readouterr().out
    assert "resumed: 1 of 3 launches are in o.jsonl" in out
    assert "main: ok, 4 s a step, x none 2.00" in out  # against the none of the first call
    assert cli.main([*words, "--resume"]) == 0
    assert len(launcher.launched) == 4
    assert len(read_records([tmp_path / "o.jsonl"]).records) == 4


def test_without_resume_repeats_are_added(launcher: FakeLauncher, tmp_path: Path) -> None:
    words = ["run", "--arm", "none", "--results", "o.jsonl"]
    assert (cli.main(words), cli.main(words)) == (0, 0)
    assert [record.launch for record in read_records([tmp_path / "o.jsonl"]).records] == [1, 2]


def test_a_torn_line_of_a_killed_run_is_tolerated(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "o.jsonl").write_text('{"schema_version": 1, "run')
    assert cli.main(["run", "--arm", "none", "--results", "o.jsonl", "--resume"]) == 0
    assert capsys.readouterr().err.startswith("warning: o.jsonl:1: ")
    assert len(read_records([tmp_path / "o.jsonl"]).records) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "--arm", "overlp"], "error: unknown arm overlp: did you mean overlap?"),
        (["run", "--nproc", "3", "--world", "4"], "error: --nproc 3 does not divide a world of 4; use --nproc 2"),
        (["run", "--ac", "half"], "error: --ac half: choose full or none"),
        (["run", "--no-such"], "error: No such option: --no-such"),
        (["run", "--device", "cuda"], "error: --device cuda: no GPU to use (NVML lists no GPU); use --device cpu"),
        (["rum"], "error: No such command 'rum'."),
        (["report", "nowhere.jsonl"], "error: cannot read nowhere.jsonl: No such file or directory"),
        (["report"], "error: Missing argument 'FILE...'."),
        (
            ["run", "--results", "/proc/none/x.jsonl"],
            "error: cannot write results to /proc/none/x.jsonl: No such file or directory; choose another --results",
        ),
        (["run", "--results", "."], "error: cannot write results to .: not a regular file; choose another --results"),
        (
            ["run", "--results", "/dev/null"],
            "error: cannot write results to /dev/null: not a regular file; choose another --results",
        ),
        (
            ["run", "--arm", "none", "--model", "qwen3-30b-a3b"],
            "error: no arm fits: none needs about 468.9 GiB of host memory for 2 processes, 60.8 GiB are available; "
            "use fewer --layers, a shorter --seq-len or tiny",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_starts(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0].startswith(line)
    assert len(captured.err.splitlines()) == 1
    assert captured.out == "", "nothing is said before it is refused"
    assert launcher.launched == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file/x.jsonl", "Not a directory"),
        ("file/deep/x.jsonl", "Not a directory"),
        (".", "not a regular file"),
        ("closed/x.jsonl", "Permission denied"),
        ("closed/deep/x.jsonl", "Permission denied"),
        ("sealed.jsonl", "Permission denied"),
    ],
)
def test_results_that_cannot_be_written_are_refused_in_a_dry_run_too(
    launcher: FakeLauncher,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    path: str,
    why: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    (tmp_path / "sealed.jsonl").touch()
    allowed = os.access  # root may write everywhere
    shut = {"closed", "sealed.jsonl"}
    monkeypatch.setattr(
        "os.access", lambda at, mode: (mode != os.W_OK or Path(at).name not in shut) and allowed(at, mode)
    )
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["run", "--arm", "none", "--dry-run", "--results", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: cannot write results to {path}: {why}; choose another --results\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_shows_specs_and_commands_and_starts_nothing(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", "--arm", "numa", "--arm", "none", "--dry-run", "--results", "o.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "order: chunked (numa) #1, none #1" in out
    assert '"name":"chunked","numa":true' in out
    assert f"command  fake chunked {tmp_path}/o.runs/" in out
    assert launcher.launched == []
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        ((), ("kernel", "kernel")),
        (("--fsdp-copies", "stock", "--readbacks", "copy"), ("stock", "copy")),
    ],
)
def test_on_a_gpu_kernels_make_small_copies_unless_told_otherwise(
    launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], ways: tuple[str, str]
) -> None:
    monkeypatch.setattr(commands, "detect", lambda: host(1))
    monkeypatch.setattr(commands.environment, "capture", lambda _bus_id: {})
    assert cli.main(["run", "--arm", "none", "--arm", "overlap", "--results", "o.jsonl", *words]) == 0
    assert {(spec.arm.fsdp_copies, spec.arm.readbacks) for spec in launcher.launched} == {ways}


def test_dry_run_shows_the_folder_of_the_launch_that_is_still_to_do(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["run", "--arm", "none", "--results", "o.jsonl"]
    assert cli.main(words) == 0
    assert cli.main([*words, "--launches", "2", "--resume", "--dry-run"]) == 0
    run_id = read_records([tmp_path / "o.jsonl"]).records[0].run_id
    assert f"command  fake none {tmp_path}/o.runs/{run_id}-2\n" in capsys.readouterr().out


def test_the_default_results_file_is_local(launcher: FakeLauncher, tmp_path: Path) -> None:
    assert cli.main(["run", "--arm", "none"]) == 0
    assert len(list((tmp_path / "results" / "local").glob("*.jsonl"))) == 1


def test_table_seed_runs_both_tables(launcher: FakeLauncher) -> None:
    assert cli.main(["run", "--table", "seed", "--results", "o.jsonl"]) == 0
    assert len(launcher.launched) == 12


def test_profile_goes_to_a_folder_that_is_checked_first(
    launcher: FakeLauncher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["run", "--arm", "none", "--results", "o.jsonl", "--profile"]
    assert cli.main([*words, "traces/new"]) == 0
    assert launcher.extras.profile == Path("traces/new")
    assert launcher.extras.split
    assert (tmp_path / "traces/new").is_dir()
    (tmp_path / "file").touch()
    assert cli.main([*words, "file/below"]) == 2
    assert "error: --profile file/below: Not a directory; choose another folder" in capsys.readouterr().err
    assert cli.main([*words, "traces/dry", "--dry-run"]) == 0
    assert not (tmp_path / "traces/dry").exists()
    assert len(launcher.launched) == 1


def test_the_split_can_be_left_out(launcher: FakeLauncher) -> None:
    assert cli.main(["run", "--arm", "none", "--results", "o.jsonl", "--no-split"]) == 0
    assert not launcher.extras.split
    assert launcher.extras.watch
    assert cli.main(["run", "--arm", "main", "--results", "o.jsonl", "--no-watch"]) == 0
    assert launcher.extras.split
    assert not launcher.extras.watch


def test_report_is_machine_readable(launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["run", "--results", "o.jsonl"])
    capsys.readouterr()
    assert cli.main(["report", "o.jsonl", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["groups"][0]["rows"]
    assert [row["arm"] for row in rows] == ["none", "main", "chunked", "chunked", "overlap", "stream"]


def test_arms_describes_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["arms"]) == 0
    out = capsys.readouterr().out
    for name in ("none", "main", "chunked", "overlap", "stream"):
        assert f"\n{name}  (exact)" in "\n" + out
    assert "numa  (the same as --arm chunked --numa)" in out


def test_arms_speaks_as_the_command_line_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["arms"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "  options --chunk 1GiB --pieces 4 --slots 2 --first-step bounded\n" in out
    assert "  options --chunk 1GiB --pieces 4 --slots 4 --lead 8 --ahead 4\n          --first-step bounded\n" in out
    assert "--staging from step() on" in out
    assert "to --at-loss\n" in out
    assert not re.search(r"_bytes|_budget|1073741824|`|None", out)


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "offbench", "run", "--arm", "nonsense"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
