from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbench.cli import main
from offbench.config import Mode, RunSpec
from offbench.errors import UsageError
from offbench.floor import of_launch
from offbench.ladder.plan import Outcome, Rung, climb
from offbench.machine_floor import floors
from offbench.record import Link as LinkRates
from offbench.record import Moved, RunRecord
from offbench.report import with_shared_links
from offbench.topo import cache as topo_cache
from offbench.topo import shared
from offbench.topo.command import TopoOptions, topo_command
from offbench.topo.text import disagreement, floor_lines, measurement_lines
from offbench.topology.imports import load_machine
from offbench.topology.model import Machine, Measurement, Note, Source
from tests.test_draw import one_gpu
from tests.test_ladder import PAIRS, Fabric, cards, machine, pairs, socket_halves

GIB = 2**30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "offbench" / "topo"


def shown(options: TopoOptions, of: Machine, **given: Any) -> str:
    out = io.StringIO()
    assert topo_command(options, look=lambda: of, out=Console(file=out, width=80), **given) == 0
    return out.getvalue()


def fabric(crew: Fabric) -> Callable[..., list[Outcome]]:
    def measure(of: Machine, rungs: Sequence[Rung], on_rung: Callable[[int, Rung], None]) -> list[Outcome]:
        return list(climb(rungs, crew, on_rung))

    return measure


SEED = Fabric(*cards(), *pairs(52, 104), *socket_halves(104, 155))


def test_the_shipped_machine_prints_the_published_floors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", "--from", "seed-8xh200", "--bytes", "28.4GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  duplex        1.47   socket 0, both, 2 alike          155.0 measured    19.4" in lines
    assert "                       slack: uplink 25%, GPU link 67%" in lines
    assert "  uplink only   1.09   uplink A, in, 4 alike            52.0 measured     26.0" in lines
    assert "  serial        2.18   uplink A, in turn, 4 alike       52.0 measured     13.0" in lines
    assert "  link rate    0.968   uplink A, in, 4 alike            58.7 line rate    29.3" in lines
    assert "  pipeline      1.50   socket 0, both, 2 alike          155.0 measured    18.9" in lines
    assert "                       0.038 s of it: first chunk in, last one out" in lines
    assert max(map(len, lines)) <= 81


def test_a_model_says_how_much_moves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", "--from", "seed-8xh200", "--model", "qwen3-30b-a3b", "--world", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    duplex = found["floors"][0]
    assert duplex["bytes_in"] == duplex["bytes_out"] == 3_816_515_328 * 8
    assert duplex["seconds"] == pytest.approx(1.4676, abs=1e-3)
    assert duplex["bound_by"] == {"link": "socket0", "direction": "both"}
    assert (duplex["complete"], duplex["ranks"]) == (True, 8)
    variants = [floor["variant"] for floor in found["floors"]]
    assert variants == ["duplex", "uplink only", "serial", "link rate", "pipeline"]
    assert [floor["ends_s"] for floor in found["floors"]] == [0, 0, 0, 0, pytest.approx(2 / 52)]


def test_memory_of_the_host_has_a_floor_where_cpus_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", "--from", "seed-8xh200", "--bytes", "28.4GiB", "--dram", "250GiB/s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  DRAM          1.82   memory of node 0, both, 2 alike  250.0 assumed" in lines
    short = ["topo", "--from", "seed-8xh200", "--bytes", "28.4GiB", "--world", "5", "--dram", "250GiB/s"]
    assert main(short) == 0
    assert "slack: memory 75%" in capsys.readouterr().out, "one rank's against four ranks' node"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bytes", "lots"], "--bytes lots: not a size"),
        (["--bytes", "1GiB", "--model", "tiny"], "give one"),
        (["--model", "nothing"], "unknown model nothing"),
        (["--world", "8"], "--world changes a floor"),
        (["--remote", "1"], "--remote changes a floor"),
        (["--dram", "300GiB/s"], "--dram adds a floor"),
        (["--from", "seed-8xh200", "--bytes", "1GiB", "--dram", "fast"], "--dram fast: not a rate"),
        (["--from", "seed-8xh200", "--bytes", "1GiB", "--remote", "9"], "only 8 ranks"),
        (["--from", "seed-8xh200", "--measure"], "leave out --from"),
        (["--from", ""], "--from is empty; give a machine (seed-8xh200)"),
        (["--from", "seed-8xh200", "--bytes", ""], "--bytes : not a size"),
        (["--from", "seed-8xh200", "--model", ""], "unknown model"),
        (["--from", "seed-8xh200", "--bytes", "1GiB", "--dram", ""], "--dram : not a rate"),
        (["--from", "seed-8xh200", "--bytes", "1GiB", "--world", "0"], "'--world'"),
        (["--from", "sead-8xh200"], "did you mean seed-8xh200"),
        (["--from", "seed-8xh200", "--save", "/nowhere/x.json"], "--save /nowhere/x.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_nothing_here_loads_torch_or_cuda() -> None:
    code = (
        "import sys; from offbench.cli import main; code = main(['topo', '--bytes', '1GiB']);"
        "assert code == 0 and 'torch' not in sys.modules;"
        "assert 'libcuda' not in open('/proc/self/maps').read()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_a_floor_says_what_to_do() -> None:
    note = Note("degraded", "no-gpu", "no GPU found (NVML: nothing)", "describe one with --from")
    bare = Machine(Source("live"), notes=(note,))
    text = shown(TopoOptions(size="1GiB"), bare)
    assert "no floor: no GPU here; describe a machine with --from, as in --from seed-8xh200" in text
    assert "degraded: no GPU found (NVML: nothing)\n  -> describe one with --from\n" in text
    with pytest.raises(UsageError, match=r"--measure needs a GPU: no GPU found \(NVML: nothing\)"):
        topo_command(TopoOptions(measure=True), look=lambda: bare)


def test_mig_instances_get_no_floor_of_their_own() -> None:
    whole = one_gpu()
    part = replace(whole, gpus=(replace(whole.gpus[0], mig_parent="GPU-x"),))
    assert "no floor: MIG instances share" in shown(TopoOptions(size="1GiB"), part)


def test_one_gpu_of_a_larger_job_says_who_is_missing() -> None:
    text = shown(TopoOptions(model="qwen3-30b-a3b"), one_gpu())
    assert "7 of 8 ranks are not on this machine" in text
    assert "1 rank here" in text
    assert "* incomplete, the true floor may be higher: capacity not known of 1 socket" in text


def test_gpus_hidden_from_this_process_get_no_rank() -> None:
    of = machine(PAIRS)
    two = replace(of, gpus=tuple(replace(g, cuda_ordinal=g.index if g.index < 2 else None) for g in of.gpus))
    assert "1.0 GiB out a rank, 2 ranks here" in shown(TopoOptions(size="1GiB"), two)
    text = shown(TopoOptions(size="1GiB", world=8), two)
    assert "2 ranks here" in text
    assert "6 of 8 ranks are not on this machine" in text


def test_text_that_looks_like_markup_stays_as_it_is() -> None:
    note = Note("warning", "x", "CUDA_VISIBLE_DEVICES=[0] hides [bold]some[/bold]", "")
    assert "CUDA_VISIBLE_DEVICES=[0] hides [bold]some[/bold]" in shown(
        TopoOptions(), replace(one_gpu(), notes=(note,))
    )
    assert "Box [9], guest" in shown(TopoOptions(), one_gpu())


def test_measuring_shows_keeps_and_reuses_the_rates(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = machine(PAIRS)
    text = shown(TopoOptions(measure=True, size="8GiB"), of, measure=fabric(SEED))
    said = capsys.readouterr().out
    assert "measurements, about" in said
    assert "the ladder took" in said
    assert "pair or socket: the socket limits" in text
    assert "  alone (1 GPU)                     50.0            50.0            88.0" in text
    assert "  all (8 GPUs)                     208.0           208.0           310.0" in text
    assert "  equal bytes: 8.0 GiB in and out on 8 GPUs took 0.413 s, 38.8 GiB/s a GPU" in text
    assert "trust the measurement" not in text
    assert len(list(cache.iterdir())) == 1
    again = shown(TopoOptions(size="8GiB"), of)
    assert "socket 0, both, 2 alike          155.0 measured" in again
    assert "equal bytes: 8.0 GiB" in again
    elsewhere = replace(of, gpus=tuple(replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in of.gpus))
    assert "measured" not in shown(TopoOptions(), elsewhere)


def test_json_while_measuring_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = TopoOptions(measure=True, json=True)
    assert topo_command(options, fabric(SEED), lambda: machine(PAIRS)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pair_or_socket"] == "socket"
    assert {row["rung"] for row in found["measurements"]} == {
        "alone",
        "group",
        "socket",
        "all",
        "remote",
        "node",
        "matrix",
        "equal",
    }
    socket = next(link for link in found["links"] if link["id"] == "socket0")
    assert socket["measured_gib_s"]["both"] == pytest.approx(155)


def test_a_snapshot_is_read_back_without_uuids(tmp_path: Path) -> None:
    of = replace(one_gpu(), gpus=(replace(one_gpu().gpus[0], uuid="GPU-secret"),))
    path = tmp_path / "snapshot.json"
    text = shown(TopoOptions(save=path, size="1GiB"), of)
    assert "read it back with --from" in text
    assert "GPU-secret" not in path.read_text()
    assert load_machine(str(path)).links == of.links
    assert "58.7 line rate" in shown(TopoOptions(source=str(path), size="1GiB"), Machine(Source("live")))


def test_a_cache_that_cannot_be_written_is_a_warning(cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where a folder should be")
    text = shown(TopoOptions(measure=True), machine(PAIRS), measure=fabric(SEED))
    assert "could not be kept" in text


def test_a_user_without_a_home_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    text = shown(TopoOptions(measure=True), machine(PAIRS), measure=fabric(SEED))
    assert "could not be kept for later runs: no home folder; set\n  XDG_CACHE_HOME" in text


def test_a_cache_of_another_layout_is_ignored(cache: Path) -> None:
    of = machine(PAIRS)
    assert topo_cache.keep(of, "2026-01-01T00:00:00+00:00").parent == cache
    assert topo_cache.recall(of) == of, "nothing was measured"
    next(cache.iterdir()).write_text('{"schema": 99}')
    assert topo_cache.recall(of) == of


def test_a_launch_uses_what_was_measured_of_the_shared_links(cache: Path) -> None:
    of = machine(PAIRS)
    assert topo_cache.launch_tree(of, 8) is None
    shown(TopoOptions(measure=True), of, measure=fabric(SEED))
    tree = topo_cache.launch_tree(topo_cache.recall(of), 8)
    moved = Moved(in_bytes_per_step=28.4 * GIB, out_bytes_per_step=28.4 * GIB)
    alone = LinkRates(in_bytes_per_s=50 * GIB, out_bytes_per_s=50 * GIB, both_bytes_per_s=88 * GIB)
    assert of_launch(moved, alone, tree).bound_by == "socket0 duplex"
    assert of_launch(moved, alone, tree).seconds == pytest.approx(8 * 28.4 / 155)
    assert of_launch(moved, alone).bound_by == "gpu_link duplex"


@pytest.mark.parametrize("mode", [{"device": "cpu"}, {"nproc": 1}, {"emulate_link": 38.8 * GIB}])
def test_launches_that_share_no_real_link_look_nothing_up(mode: dict[str, Any]) -> None:
    assert shared.shared_machine(Mode.model_validate(mode)) is None


def test_a_launch_on_several_gpus_looks_its_machine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    of = machine(PAIRS)
    shown(TopoOptions(measure=True), of, measure=fabric(SEED))
    monkeypatch.setattr(shared, "detect", lambda: of)
    found = shared.shared_machine(Mode())
    assert found is not None
    assert topo_cache.identity(found) == topo_cache.identity(of), "what was measured does not change who it is"
    tree = topo_cache.launch_tree(found, 8)
    assert tree is not None
    assert set(tree[1]) == set(range(8))
    assert "socket0" in tree[1][0]


def test_a_report_counts_links_that_were_measured_after_the_launch() -> None:
    of = machine(PAIRS)
    rates = LinkRates(in_bytes_per_s=50 * GIB, out_bytes_per_s=50 * GIB, both_bytes_per_s=88 * GIB)
    moved = Moved(in_bytes_per_step=28.4 * GIB, out_bytes_per_step=28.4 * GIB)
    row = RunRecord(
        run_id="x",
        status="ok",
        spec=RunSpec(mode=Mode(nproc=8)),
        moved=moved,
        link=rates,
        floor=of_launch(moved, rates, chunk_bytes=GIB),
        env={"machine": topo_cache.identity(of)},
    )
    assert with_shared_links(row) == row, "nothing was measured yet"
    shown(TopoOptions(measure=True), of, measure=fabric(SEED))
    found = with_shared_links(row).floor
    assert (found.seconds, found.bound_by) == (pytest.approx(8 * 28.4 / 155), "socket0 duplex")
    assert found.pipeline_seconds == pytest.approx(8 * 28.4 / 155 + 2 / 50)
    for name in (None, "0" * 16, "../" + topo_cache.identity(of)):
        stranger = row.model_copy(update={"env": {"machine": name}})
        assert with_shared_links(stranger) == stranger
    slow = row.model_copy(update={"floor": row.floor.model_copy(update={"seconds": 9.0})})
    assert with_shared_links(slow) == slow, "a floor is never lowered"


def test_the_workload_and_the_formula_may_differ() -> None:
    formula = floors(load_machine("seed-8xh200"), 8 * GIB, 8 * GIB)[0]
    took = (formula.seconds or 0) * 1.2
    row = Measurement("equal", tuple(range(8)), "both", (1.0,) * 8, 8 * 16 * GIB / took, took, 3)
    assert "trust the measurement" in (disagreement(row, formula) or "")
    assert disagreement(replace(row, seconds=formula.seconds or 0), formula) is None
    assert "8.0 GiB in and out on 8 GPUs" in "".join(measurement_lines(replace(machine(), measurements=(row,))))


def test_nothing_moves_and_nothing_known_have_words() -> None:
    of = machine(PAIRS)
    unknown = list(floor_lines(of, floors(of, GIB, GIB)))
    assert any("no link it crosses has a known capacity" in line for line in unknown)
    assert any("capacity not known of 8 GPU links, 4 uplinks, 2 sockets" in line for line in unknown)
    seed = load_machine("seed-8xh200")
    assert any("nothing moves" in line for line in floor_lines(seed, floors(seed, 0, 0)))
