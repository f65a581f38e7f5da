"""`offbench verify`: the matrix holds what it says, verdicts follow from the ranks' answers, faults are found."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from offbench import arms
from offbench.arms.arm import Arm
from offbench.cli import main
from offbench.errors import UsageError
from offbench.offload import OffloadedAdamW, meanwhile
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.engine import Engine, Work
from offbench.offload.flow import FlowEngine
from offbench.offload.flow_step import FlowStep
from offbench.offload.gradient_pool import GradientPool
from offbench.offload.schedule import Schedule
from offbench.offload.streams import Why
from offbench.verify import cases as matrix
from offbench.verify import command, ranks, table, trainees, trial
from offbench.verify.cases import ADVERSARIES, LARGE_MODELS, PLAIN, SMALL_MODELS, Case, Variant, cases, paces, variants
from offbench.verify.table import Answer, judge
from offbench.verify.trainees import build
from offbench.verify.trial import Difference, Trial, first_difference, first_not_finite
from tests.ranks import on_ranks
from tests.test_cli import modules

EVERY = [case for world in matrix.WORLDS for case in cases(world, quick=False)]
QUICK = [case for world in matrix.WORLDS for case in cases(world, quick=True)]


def test_the_full_matrix_is_every_combination() -> None:
    seen = {(c.world, c.ep, c.dtype, c.clip, c.accumulation, c.resume) for c in EVERY if c.not_applicable is None}
    assert len(seen) == (3 + 2) * 16  # worlds 1, 2, 4 at EP 1, worlds 2, 4 at EP 2; 16 jobs each


@pytest.mark.parametrize("jobs", [EVERY, QUICK], ids=["full", "quick"])
def test_each_condition_occurs_and_names_are_unique(jobs: list[Case]) -> None:
    possible = [case for case in jobs if case.not_applicable is None]
    assert {c.world for c in possible} == {1, 2, 4}
    assert {c.ep for c in possible} == {1, 2}
    assert {c.dtype for c in possible} == {"bf16", "fp32"}
    assert {c.clip for c in possible} == {c.resume for c in possible} == {True, False}
    assert {c.accumulation for c in possible} == {1, 4}
    assert {c.ep for c in possible if c.broadcast} == {1, 2}
    assert {c.implementation for c in possible} == {"fused", "foreach"}
    assert {c.world for c in possible if c.waits} >= {1, 2}
    assert {c.world for c in possible if c.pool} >= {1, 2}
    assert len({c.name for c in jobs}) == len(jobs)


def test_every_exact_arm_is_tried_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rough = Arm("rough", "-", "-", "-", lambda spec: Schedule("rough", offloaded=False), exact=False)
    monkeypatch.setitem(arms.ARMS, "rough", rough)
    assert {variant.arm for variant in variants([])} == set(arms.ARMS) - {"rough"}
    assert [variant.name for variant in variants(["overlap", "numa"])] == [
        "chunked", "chunked/whole", "overlap", "overlap/whole",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="--arm rough: it is not exact"):
        variants(["rough"])


OVERLAP_SCHEDULE = Variant("overlap").schedule(1 << 20)


def test_cells_take_turns_at_every_pace_the_adversary_has() -> None:
    turns = [paces("cpu", 2, OVERLAP_SCHEDULE, row, 3, quick=False) for row in range(len(ADVERSARIES) + 1)]
    assert {pace for turn in turns for pace in turn} == {PLAIN, *ADVERSARIES}
    assert all(len(set(turn)) == 2 for turn in turns)
    assert paces("cpu", 2, Variant("none").schedule(1 << 20), 0, 0, quick=False) == [PLAIN]
    assert len(paces("cpu", 2, OVERLAP_SCHEDULE, 0, 0, quick=True)) == 2
    assert len(paces("cpu", 2, OVERLAP_SCHEDULE, 1, 0, quick=True)) == 1


@pytest.mark.parametrize("column", range(len(variants([]))))
def test_each_variant_meets_every_pace(column: int) -> None:
    """In the full matrix in every world, in the quick one over the worlds."""

    def met(world: int, quick: bool) -> set[matrix.Pace]:
        rows = range(len(cases(world, quick)))
        return {pace for row in rows for pace in paces("cpu", world, OVERLAP_SCHEDULE, row, column, quick)}

    assert all(met(world, quick=False) == {PLAIN, *ADVERSARIES} for world in matrix.WORLDS)
    assert set().union(*(met(world, quick=True) for world in matrix.WORLDS)) == set(ADVERSARIES)


@pytest.mark.parametrize("column", range(2))
def test_on_cuda_each_condition_meets_both_paces(column: int) -> None:
    """Copies as they are could start too early, slow ones end too late; an arm without side streams has one pace."""
    assert paces("cuda", 2, OVERLAP_SCHEDULE, 0, column, quick=True) == list(matrix.ON_DEVICE)
    rows = [
        (case, paces("cuda", 2, OVERLAP_SCHEDULE, row, column, False, case.waits))
        for row, case in enumerate(cases(2, False))
    ]
    assert all(len(turn) == 1 + case.waits for case, turn in rows[1:])
    seen = {(key, value, pace) for case, turn in rows[1:] for key, value in vars(case).items() for pace in turn}
    for key in ("model", "ep", "dtype", "clip", "accumulation", "resume", "broadcast", "waits"):
        for value in {value for name, value, _ in seen if name == key}:
            assert {pace for *condition, pace in seen if condition == [key, value]} == set(matrix.ON_DEVICE)
    for arm in ("none", "main", "zerocopy"):
        assert paces("cuda", 2, Variant(arm).schedule(1 << 20), 0, column, quick=True) == [PLAIN]


@pytest.mark.parametrize("world", matrix.WORLDS)
@pytest.mark.parametrize("quick", [True, False])
def test_a_case_that_waits_meets_a_pace_at_which_copies_end_meanwhile(world: int, quick: bool) -> None:
    for row in range(len(EVERY)):
        turn = paces("cpu", world, OVERLAP_SCHEDULE, row, 0, quick, waits=True)
        assert len(set(turn)) == 2
        assert any(pace == PLAIN or dict(pace.streams or ())["in"] != "lazy" for pace in turn)


def values(**changed: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    names = ("parameter", "exp_avg", "exp_avg_sq")
    moments = {name: torch.tensor([[1.0, math.nan], [0.0, 2.0]]) for name in names}
    return {"block.weight": moments | {"step": torch.tensor(6.0)} | changed, "norm.weight": dict(moments)}


def test_nan_equals_itself_bit_for_bit() -> None:
    assert first_difference(values(), values()) is None


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"exp_avg": torch.tensor([[1.0, math.nan], [-0.0, 2.0]])},
            "block.weight: exp_avg[1, 0] is -0.0, not 0.0 (rank 0, )",
        ),
        ({"step": torch.tensor(5.0)}, "block.weight: step is 5.0, not 6.0 (rank 0, )"),
    ],
)
def test_the_first_difference_is_named(changed: dict[str, torch.Tensor], line: str) -> None:
    found = first_difference(values(), values(**changed))
    assert found is not None
    assert found.describe() == line


def test_a_value_that_is_not_finite_is_named() -> None:
    assert first_not_finite(values()) == "parameter of block.weight"
    finite = {name: torch.ones(2, 2) for name in ("parameter", "exp_avg", "exp_avg_sq")}
    assert first_not_finite({"a": finite}) is None
    assert first_not_finite({"a": finite, "b": finite | {"exp_avg": torch.tensor(math.inf)}}) == "exp_avg of b"


CASE, OVERLAP, NONE = Case(2), Variant("overlap"), Variant("none")


def verdicts(*answers: Answer, failure: str | None = None) -> list[str]:
    return [cell.verdict for cell in judge([CASE], [NONE, OVERLAP], answers, False, failure)]


def said(variant: Variant, rank: int, verdict: str) -> Answer:
    return Answer(CASE.name, variant.name, rank, verdict, "why")


def test_the_worst_rank_decides() -> None:
    both = [said(NONE, rank, "pass") for rank in (0, 1)]
    assert verdicts(*both, said(OVERLAP, 0, "pass"), said(OVERLAP, 1, "FAIL")) == ["pass", "FAIL"]
    assert verdicts(*both, said(OVERLAP, 0, "FAIL"), said(OVERLAP, 1, "not judgeable")) == ["pass", "not judgeable"]


def test_a_rank_that_ended_early_fails_its_cell_and_the_rest_is_not_run() -> None:
    cells = judge([CASE], [NONE, OVERLAP], [said(NONE, 0, "pass"), said(NONE, 1, "started")], False, "it broke")
    assert [(cell.verdict, cell.text) for cell in cells] == [
        ("FAIL", "the ranks ended: it broke"),
        ("not run", "the ranks had ended: it broke"),
    ]
    assert table.exit_code(cells) == table.exit_code(cells[1:]) == 1


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (["pass", "pass"], 0),
        (["pass", "not judgeable"], 0),
        (["not judgeable", "n/a"], 1),  # nothing proven is no proof
        (["pass", "FAIL"], 1),
    ],
)
def test_exit_codes(found: list[str], code: int) -> None:
    cells = judge([CASE], [NONE, OVERLAP], [said(v, 0, w) for v, w in zip((NONE, OVERLAP), found, strict=True)], False)
    assert table.exit_code(cells) == code


def test_the_table_has_a_line_a_case_and_names_what_differs() -> None:
    impossible = replace(CASE, world=1, model="moe", ep=2)
    answers = [
        said(NONE, 0, "pass"),
        Answer(CASE.name, "overlap", 0, "FAIL", Difference("w", "step", (), 1.0, 2.0, 0, "p").describe()),
        *(Answer(impossible.name, variant.name, 0, "n/a", "EP 2 on 1 rank") for variant in (NONE, OVERLAP)),
    ]
    assert table.to_table(judge([CASE, impossible], [NONE, OVERLAP], answers, rehearsed=False)) == [
        "case                          none  overlap",
        "2 ranks, mlp, bf16, clip      pass  FAIL",
        "1 rank, moe EP 2, bf16, clip  n/a (EP 2 on 1 rank)",
        "",
        "FAIL: overlap, 2 ranks, mlp, bf16, clip: w: step is 2.0, not 1.0 (rank 0, p)",
        "1 of 4 cells equal torch.optim.AdamW bit for bit; 1 FAIL, 2 n/a",
    ]


def test_json_has_every_cell_and_no_nan() -> None:
    difference = {"parameter": "w", "expected": 1.0, "found": math.nan}
    cells = judge([CASE], [OVERLAP], [Answer(CASE.name, "overlap", 0, "FAIL", "why", difference)], rehearsed=True)
    body = json.loads(table.to_json(cells, "cuda", "2.15.0"), parse_constant=pytest.fail)
    assert body["cells"][0]["difference"] == {"parameter": "w", "expected": 1.0, "found": "nan"}
    assert body["cells"][0]["rehearsed"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--arm", "overlp"], "error: unknown arm overlp: did you mean overlap?"),
        (["--nproc", "3"], "error: --nproc 3: choose 1, 2 or 4"),
        (["--device", "tpu"], "error: --device tpu: choose auto, cuda or cpu"),
        (["--format", "xml"], "error: --format xml: choose table or json"),
        (["--device", "cpu", "--drop-wait", "nap"], "error: --drop-wait nap: choose ARENA_READY, "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert main(["verify", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_loads_no_torch_and_hides_the_planted_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch" not in modules("verify", "--help")
    assert main(["verify", "--help"]) == 0
    assert "drop-wait" not in capsys.readouterr().out


WORDS = ["verify", "--quick", "--device", "cpu"]


def only(monkeypatch: pytest.MonkeyPatch, *chosen: Case) -> None:
    """These cases alone, so that a launch takes a second or two."""
    monkeypatch.setattr(command, "cases", lambda world, quick, size: [replace(case, size=size) for case in chosen])


def test_exact_arms_pass(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, Case(2, resume=True), Case(2, "moe", 2))
    assert main([*WORDS, "--nproc", "2", "--format", "json"]) == 0
    captured = capfd.readouterr()
    cells = json.loads(captured.out)["cells"]
    assert {cell["verdict"] for cell in cells} == {"pass"}
    assert {cell["arm"] for cell in cells} == {arm.name for arm in arms.ARMS.values() if arm.exact}
    assert "2 ranks, moe EP 2, bf16, clip (2 of 2): " in captured.err


@pytest.mark.parametrize(
    ("world", "wait", "arm"), [(1, "READ", "overlap"), (2, "READ", "overlap"), (1, "LOADED", "chunked")]
)
def test_a_planted_fault_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], world: int, wait: str, arm: str
) -> None:
    only(monkeypatch, Case(world), Case(world, clip=False))
    words = [*WORDS, "--nproc", str(world), "--arm", arm, "--arm", "none", "--drop-wait", wait]
    assert main(words) == 1
    out = capfd.readouterr().out
    assert "clip  pass  FAIL" in out
    assert f"FAIL: {arm}, {Case(world).name}: blocks.0.up.weight: parameter[0, 0] is " in out


@pytest.mark.parametrize(
    ("arm", "engine", "method", "wait"),
    [
        ("overlap", Engine, "queue_more", "LOADED"),
        ("overlap", Engine, "queue_more", "UPDATED"),
        ("stream", FlowEngine, "queue_more", "LOADED"),
        ("stream", FlowEngine, "_move_one", "SLOT_FREE"),
        ("stream", FlowEngine, "_move_one", "GRADIENT_FREE"),
        ("stream", FlowEngine, "_keep_coming", "UPDATED"),
    ],
)
def test_a_wait_lost_only_while_the_host_waits_is_found(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arm: str,
    engine: type[Engine],
    method: str,
    wait: str,
) -> None:
    """On one rank by the case that waits, and by no other."""
    honest = getattr(engine, method)

    def forgetful(self: Any, *arguments: Any) -> Any:
        streams = self._streams
        assert isinstance(streams, AdversarialStreams)
        streams.drop = Why[wait]
        try:
            return honest(self, *arguments)
        finally:
            streams.drop = None

    monkeypatch.setattr(engine, method, forgetful)
    only(monkeypatch, Case(1), Case(1, waits=True))
    assert main([*WORDS, "--nproc", "1", "--arm", arm, "--arm", "none", "--format", "json"]) == 1
    cells = json.loads(capfd.readouterr().out)["cells"]
    assert {cell["verdict"] for cell in cells if cell["case"] == Case(1).job} == {"pass"}
    waiting = {(cell["arm"], cell["verdict"]) for cell in cells if cell["case"] == Case(1, waits=True).job}
    assert waiting == {("none", "pass"), (arm, "FAIL")}


def test_resident_state_that_is_not_updated_while_the_host_waits_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the case that keeps some and waits, and by no other."""
    honest = FlowEngine._queue_kept

    def lazy(self: FlowEngine, step: FlowStep, works: Sequence[Work], goes_on: bool = True) -> None:
        if not goes_on:
            for work in works:
                work.run = lambda calls: None
        honest(self, step, works, goes_on)

    monkeypatch.setattr(FlowEngine, "_queue_kept", lazy)
    cases = Case(1, waits=True), Case(1, waits=True, kept=5)
    only(monkeypatch, *cases)
    assert main([*WORDS, "--nproc", "1", "--arm", "stream", "--format", "json"]) == 1
    cells = json.loads(capfd.readouterr().out)["cells"]
    assert [(cell["case"], cell["verdict"]) for cell in cells] == [
        (case.job, "FAIL" if case.kept else "pass") for case in cases
    ]


def made_in_the_pool(rank: int) -> tuple[list[int], list[int]]:
    """Gradients made in compute's pool, by run: of torch's AdamW, and of two arms."""
    pools: list[GradientPool] = []

    class Noted(GradientPool):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model)
            pools.append(self)

    trial.GradientPool = Noted  # type: ignore[misc]
    found = [], []
    for case in [case for case in cases(2, quick=True) if case.pool]:
        one = Trial(case, rank, torch.device("cpu"))
        expected = one.reference()
        found[0].extend(pool.made for pool in pools)
        for variant in variants(["none", "overlap"]):
            assert one.differs(expected, variant, PLAIN) is None
    found[1].extend(pool.made for pool in pools)
    return found


def test_the_case_with_a_gradient_pool_compares_arms_with_it_to_torch_without_it() -> None:
    groups = SMALL_MODELS.blocks + 1
    for reference, arms_of in on_ranks(2, made_in_the_pool):
        assert reference == []
        assert arms_of == [groups * 4 * matrix.STEPS] * 3, "none, overlap and its other variant"


def queued_in_waits(rank: int, world: int, kind: str, folder: str) -> None:
    """Of the quick matrix's case that waits, by variant: what differs, and updates that were queued in waits. Of a
    larger world it is a rehearsal. Into a file, for it is a process of its own."""
    torch.set_num_threads(1)
    device = ranks._join(rank, ranks.Launch(world, 1, kind, (), (), quick=True), folder)
    jobs = cases(world, quick=True, size=LARGE_MODELS if kind == "cuda" else SMALL_MODELS)
    ((row, case),) = [(row, case) for row, case in enumerate(jobs) if case.waits and not case.kept]
    queued = [0]

    def count(engine: type[Engine]) -> None:
        queue_more = engine.queue_more

        def counting(self: Engine) -> bool:
            there = len(self._waiting())
            found = queue_more(self)
            queued[0] += there - len(self._waiting())
            return found

        engine.queue_more = counting  # type: ignore[method-assign]

    count(Engine)
    count(FlowEngine)
    one, found = Trial(case, rank, device), {}
    expected = one.reference()
    for column, variant in enumerate(variants([])):
        schedule = variant.schedule(case.chunk_bytes)
        if schedule.deferred:
            queued[0] = 0
            turn = paces(kind, world, schedule, row, column, quick=True, waits=True)
            differences = [one.differs(expected, variant, pace) for pace in turn]
            found[variant.name] = [each.describe() for each in differences if each is not None], queued[0]
    torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_case_that_waits_has_updates_queued_in_its_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: int, kind: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    method = "spawn" if kind == "cuda" else "fork"
    mp.start_processes(queued_in_waits, (world, kind, str(tmp_path)), nprocs=1, start_method=method)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert found.keys() == {v.name for v in variants([]) if v.schedule(1 << 20).deferred}
    assert {arm: differences for arm, (differences, _) in found.items() if differences} == {}
    assert {arm: count for arm, (_, count) in found.items() if count < trial.STEPS - 1} == {}, "one a forward"


def test_on_a_device_the_event_that_is_awaited_is_behind_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __getattr__(self, name: str) -> Any:
            return lambda: calls.append(name)

    module = SimpleNamespace(_sleep=lambda cycles: calls.append(f"sleep {cycles}"), Event=Event)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    before = meanwhile.waits()
    trainees.hold_host(torch.device("cuda"))
    assert calls == [f"sleep {trainees.SLEEP_CYCLES}", "record", "query", "synchronize"]
    assert meanwhile.waits() == before + 1


@pytest.mark.parametrize("broadcast", [Case(2, broadcast=True), Case(2, "moe", 2, broadcast=True)])
def test_a_broadcast_that_does_not_drain_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], broadcast: Case
) -> None:
    only(monkeypatch, broadcast)
    monkeypatch.setattr(OffloadedAdamW, "settled", lambda self: nullcontext())
    assert main([*WORDS, "--nproc", "2", "--arm", "overlap", "--arm", "none", "--format", "json"]) == 1
    cells = json.loads(capfd.readouterr().out)["cells"]
    assert [(cell["arm"], cell["verdict"]) for cell in cells] == [
        ("none", "pass"), ("overlap", "FAIL"), ("overlap", "FAIL"),
    ]  # fmt: skip
    assert {cell["difference"]["what"] for cell in cells[1:]} == {"replica"}


def test_a_fault_of_one_rank_is_found(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    honest = trial.snapshot

    def off_by_a_bit(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> trial.Snapshot:
        found = honest(model, optimizer)
        if torch.distributed.get_rank() == 1 and isinstance(optimizer, OffloadedAdamW):
            found["norm.weight"]["exp_avg_sq"].view(torch.int32)[3] ^= 1
        return found

    monkeypatch.setattr(trial, "snapshot", off_by_a_bit)
    only(monkeypatch, Case(2))
    assert main([*WORDS, "--nproc", "2", "--arm", "none"]) == 1
    assert "norm.weight: exp_avg_sq[3] is " in capfd.readouterr().out


def test_a_job_that_does_not_repeat_itself_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    again = iter((0.0, 1.0))
    reference = Trial.reference

    def drifting(self: Trial, resume: bool = False) -> object:
        found = reference(self, resume)
        found["head.weight"]["parameter"][0, 0] += next(again)
        return found

    monkeypatch.setattr(Trial, "reference", drifting)
    only(monkeypatch, Case(1))
    assert main([*WORDS, "--nproc", "1", "--arm", "main"]) == 1
    out = capfd.readouterr().out
    assert "not judgeable: main, 1 rank, mlp, bf16, clip: torch.optim.AdamW against itself: head.weight: " in out
    assert "pass" not in out


def test_a_job_that_ends_in_nan_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "LR", math.nan)
    only(monkeypatch, Case(1), Case(1, resume=True))
    assert main([*WORDS, "--nproc", "1", "--arm", "main"]) == 1
    out = capfd.readouterr().out
    assert "not judgeable: main, 1 rank, mlp, bf16, clip: torch.optim.AdamW ends with a parameter of blocks.0" in out
    assert "pass" not in out


def test_the_reference_runs_no_more_often_than_it_must(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A resumed case shares the uninterrupted run; an arm without offload that agrees shows that the job repeats."""
    runs: list[tuple[bool, bool]] = []
    agrees = iter((True, True, False))

    def reference(self: Trial, resume: bool = False) -> trial.Snapshot:
        runs.append((self.case.clip, resume))
        return {"w": {"parameter": torch.ones(2)}}

    def differs(self: Trial, *_: object) -> Difference | None:
        return None if next(agrees, True) else Difference("w", "parameter", (0,), 1.0, 2.0)

    monkeypatch.setattr(Trial, "reference", reference)
    monkeypatch.setattr(Trial, "differs", differs)
    monkeypatch.setattr(ranks, "_any", lambda here, trial: here)
    jobs = (Case(1), Case(1, resume=True), Case(1, clip=False, resume=True))
    for arms_, expected in (
        (["none"], [(True, False), (False, False), (False, True)]),
        (["main"], [(True, False), (True, False), (True, True), (False, False), (False, True)]),
    ):
        launch = ranks.Launch(1, 1, "cpu", jobs, tuple(variants(arms_)), quick=True)
        known: ranks.References = {}
        with open(tmp_path / arms_[0], "w") as out:
            for row, case in enumerate(jobs):
                ranks._train(ranks._Line(Trial(case, 0, torch.device("cpu")), row, launch, out), known)
        assert runs == expected
        last = json.loads((tmp_path / arms_[0]).read_text().splitlines()[-1])
        assert last[2] == ("FAIL" if arms_ == ["none"] else "pass")
        runs.clear()


def test_on_cuda_models_are_larger_and_missing_gpus_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[ranks.Launch] = []
    groups: list[int] = []

    def run(together: list[ranks.Launch], folder: Path) -> list[tuple[list[Answer], str]]:
        launches.extend(together)
        groups.append(len(together))
        return [([], "this machine has no GPU")] * len(together)

    monkeypatch.setattr(ranks, "run", run)
    for gpus, words in ((1, []), (2, ["--nproc", "2"])):
        monkeypatch.setattr(command, "visible_gpus", lambda env, gpus=gpus: (["an H200"] * gpus, None))
        assert main(["verify", "--device", "cuda", "--quick", *words]) == 1
    assert [(launch.world, launch.processes, launch.rehearsed) for launch in launches] == [
        (1, 1, False), (2, 1, True), (2, 2, False),
    ]  # fmt: skip
    assert groups == [2, 1]  # what one GPU does alone, at the same time
    two = launches[-1].cases
    assert {case.size for case in two} == {LARGE_MODELS}
    assert {case.chunk_bytes for case in two} == {1 << 20}
    assert {case.ep for case in two if case.model == "moe"} == {2}


def test_parts_share_the_cases_and_neighbours_stay_together(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command._parts(4, 1, "cpu") == command._parts(37, 2, "cpu") == command._parts(37, 2, "cuda") == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    assert [command._parts(jobs, 1, "cuda") for jobs in (4, 8, 37)] == [1, 2, 4]
    jobs = (Case(1), Case(1, resume=True), Case(1, "moe", 2), Case(1, clip=False))
    launch = ranks.Launch(1, 1, "cpu", jobs, tuple(variants(["none"])), quick=True, parts=2)
    answers, failure = ranks.run([launch], tmp_path)[0]
    assert failure is None
    assert [answer.case for answer in answers if answer.verdict != "started"] == [case.name for case in jobs]
    full = replace(launch, cases=tuple(cases(2, quick=False)), parts=4)
    many = [sum(c.accumulation for row, c in enumerate(full.cases) if full.part_of(row) == part) for part in range(4)]
    assert max(many) - min(many) < 4, "less than a case with many backwards"
    first = [json.loads(line)[0] for line in (tmp_path / "0.0" / "0.jsonl").read_text().splitlines()]
    assert set(first) == {case.name for case in jobs[:2]}


def larger(rank: int) -> list[int]:
    """Chunks of each model as a GPU trains it."""
    found = []
    for case in (Case(2, size=LARGE_MODELS), Case(2, "moe", 2, size=LARGE_MODELS)):
        model = build(case, rank, torch.device("cpu")).model
        schedule = Variant("chunked", (("pieces", 1),)).schedule(case.chunk_bytes)
        found.append(len(OffloadedAdamW(model.parameters(), schedule=schedule).chunks))
    return found


def test_the_larger_models_have_more_chunks_than_slots() -> None:
    assert on_ranks(2, larger) == [[7, 5]] * 2


def test_a_rank_that_breaks_is_a_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Trial, *_: object) -> None:
        raise RuntimeError("no such slot")

    monkeypatch.setattr(Trial, "differs", broken)
    only(monkeypatch, Case(1), Case(1, clip=False))
    assert main([*WORDS, "--nproc", "1", "--arm", "none"]) == 1
    out = capfd.readouterr().out
    assert "FAIL: none, 1 rank, mlp, bf16, clip: the ranks ended: RuntimeError: no such slot" in out
    assert "not run: none, 1 rank, mlp, bf16, no clip" in out


def test_ranks_end_with_an_interruption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = []

    def interrupted(context: ranks.ProcessContext) -> bool:
        begun.extend(context.processes)
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks.ProcessContext, "join", interrupted)
    launch = ranks.Launch(2, 2, "cpu", (Case(2), Case(2, "moe")), tuple(variants([])), quick=True)
    with pytest.raises(ranks.Interrupted):
        ranks.run([launch], tmp_path)
    assert [process.exitcode for process in begun] == [-signal.SIGKILL] * 2


def test_what_was_found_before_an_interruption_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    differs, main_process = Trial.differs, os.getpid()

    def ended_in_the_second(self: Trial, *arguments: Any) -> Any:
        if not self.case.clip:
            os.kill(main_process, signal.SIGTERM)
            time.sleep(60)
        return differs(self, *arguments)

    monkeypatch.setattr(Trial, "differs", ended_in_the_second)
    only(monkeypatch, Case(1), Case(1, clip=False))
    assert main([*WORDS, "--nproc", "1", "--arm", "none", "--arm", "chunked"]) == 130
    captured = capfd.readouterr()
    assert captured.out.splitlines()[1:3] == [
        "1 rank, mlp, bf16, clip     pass     pass     pass",
        "1 rank, mlp, bf16, no clip  not run  not run  not run",
    ]
    assert "not run: none, 1 rank, mlp, bf16, no clip and 2 more cells: interrupted" in captured.out
    assert "1 rank, mlp, bf16, clip (1 of 2): " in captured.err
    assert "rank 0: pass" in captured.err


def test_an_interrupted_cell_counts_only_when_every_rank_has_answered() -> None:
    answers = [said(NONE, 0, "pass"), said(NONE, 1, "started"), said(OVERLAP, 0, "pass")]
    cells = judge([CASE], [NONE, OVERLAP], answers, rehearsed=False, interrupted=True)
    assert [(cell.verdict, cell.text) for cell in cells] == [("not run", "interrupted")] * 2


def test_one_process_rehearses_a_larger_world(tmp_path: Path) -> None:
    chosen = (Case(2), Case(4, "moe", 2, resume=True))
    launches = [
        ranks.Launch(case.world, 1, "cpu", (case,), tuple(variants(["overlap"])), quick=True) for case in chosen
    ]
    for case, launch, found in zip(chosen, launches, ranks.run(launches, tmp_path), strict=True):
        cells = judge(launch.cases, launch.variants, found[0], launch.rehearsed)
        assert [(cell.verdict, cell.rehearsed) for cell in cells] == [("pass", True)] * 2
        assert table.to_table(cells)[1].startswith(f"{case.name}, rehearsed  pass")
        assert pickle.loads(pickle.dumps(launch)) == launch  # as a spawned rank gets it


def conditions(rank: int) -> list[str]:
    """Cases whose result is that of the base case: conditions without effect would prove nothing."""
    device = torch.device("cpu")
    base = Trial(Case(2), rank, device).reference()
    others = [Case(2, clip=False), Case(2, accumulation=4), Case(2, dtype="fp32")]
    return [case.name for case in others if first_difference(base, Trial(case, rank, device).reference()) is None]


def test_each_condition_changes_the_result() -> None:
    assert on_ranks(2, conditions) == [[], []]
