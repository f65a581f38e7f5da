"""A trainer of its own, measured by a few lines in its loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offbench.cli import main
from offbench.compare import compare
from offbench.errors import RecordError, UsageError
from offbench.measure import StepRecorder
from offbench.offload import OffloadedAdamW
from offbench.planner import ideal
from offbench.planner.gather import gather
from offbench.planner.options import PlanOptions
from offbench.planner.sources import compute_of_records
from offbench.record import Link, SmallCopies
from offbench.render import to_csv, to_markdown
from offbench.results_file import read_records
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")


GIB = 1 << 30


def train(rank: int, results: str, arm: str, spoil: bool = False, link: Link | None = None, warmup: int = 2) -> bool:
    if link is not None:  # as a GPU's probe finds it
        StepRecorder._probe = lambda self: (link, [])  # type: ignore[method-assign]
    model = sharded.build(CPU)
    optimizer: torch.optim.Optimizer
    if arm == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    else:
        late = {"lead": 1, "ahead": 0} if arm == "overlap" else {}  # most of a step is left for the next forward
        optimizer = sharded.optimizer_of(arm, model, None, **late)
    recorder = StepRecorder(
        results, arm=arm, job={"model": "mlp", "layers": 4}, tokens_per_step=8,
        optimizer=optimizer, device=CPU, warmup=warmup, steps=4,
    )  # fmt: skip
    for step in range(99):
        recorder.begin()
        loss = model(torch.full((4, sharded.WIDTH), float("nan") if spoil else float(rank + step)))
        recorder.mark("forward")
        loss.backward()
        recorder.mark("backward")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        recorder.report(loss, norm.full_tensor())
        with recorder.optimizer_step():
            optimizer.step()
        optimizer.zero_grad()
        if recorder.end():
            break
    record = recorder.finish()
    finished = [p.detach().to_local().clone() for p in model.parameters()]
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.drain()
    drained = all(torch.equal(p.to_local(), before) for p, before in zip(model.parameters(), finished, strict=True))
    return (record is not None) == (rank == 0) and step == warmup + 3 and drained


@pytest.mark.parametrize(("arm", "warmup"), [("plain", 3), ("chunked", 2), ("overlap", 3)])
def test_two_ranks_leave_one_record(arm: str, warmup: int, tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    assert on_ranks(2, train, str(results), arm, False, None, warmup) == [True, True]
    (record,) = read_records([results]).records
    assert record.status == "ok"
    assert record.job == {"model": "mlp", "layers": 4}
    assert record.spec.arm.name == arm
    assert record.spec.mode.world == 2
    assert len(record.steps) == 4
    assert record.step_s is not None
    assert record.tok_s == pytest.approx(8 / record.step_s)
    assert record.steps[0].loss is not None
    assert record.phases_s.forward is not None
    assert record.env["torch"]
    if warmup == 2:
        assert record.small_copies is None, "the first step is not watched, nor the last before the window"
    else:  # seven units are gathered in forward, and, but for the root, in backward; loss and norm are read back
        small = SmallCopies(uploads_per_step=7 + 6 + 7, readbacks_per_step=1, by_kernel_per_step=0)
        assert record.small_copies == small, "on the CPU without times"
    if arm == "plain":
        assert record.moved.in_bytes_per_step is None
    else:
        assert record.moved.in_bytes_per_step == record.moved.planned_in_bytes_per_step
        assert record.chunks is not None
        assert record.chunks > 4


def test_a_loss_that_is_not_finite_makes_the_record_invalid(tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    on_ranks(1, train, str(results), "plain", True)
    (record,) = read_records([results]).records
    assert record.status == "invalid"
    assert "loss is nan" in (record.reason or "")


def test_a_window_that_did_not_see_its_copies_is_invalid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(OffloadedAdamW, "bytes_per_step", property(lambda self: 1 << 30))  # far above what it moves
    on_ranks(1, pipeline, str(tmp_path / "x.jsonl"))
    (record,) = read_records([tmp_path / "x.jsonl"]).records
    assert record.status == "invalid"
    assert "bytes completed in the window, planned 2147483648" in (record.reason or "")


def test_an_unwritable_path_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write results"):
        StepRecorder(tmp_path / "file" / "x.jsonl", arm="none", job={}, tokens_per_step=1, device=CPU)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"job": {"dtype": torch.bfloat16}}, r"job\['dtype'\] is torch.bfloat16 \(dtype\)"),
        ({"job": {"mesh": [2, 4]}}, "pass str"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0: must be"),
        ({"warmup": 0}, "warmup is 0"),
    ],
)
def test_what_no_record_can_hold_is_found_before_the_run(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        StepRecorder(tmp_path / "x.jsonl", **{"arm": "none", "job": {}, "tokens_per_step": 1} | settings)
    assert not (tmp_path / "x.jsonl").exists()


def test_calls_out_of_order_are_refused_and_those_between_steps_change_nothing(tmp_path: Path) -> None:
    results, one = tmp_path / "x.jsonl", torch.ones(1)
    recorder = StepRecorder(results, arm="none", job={}, tokens_per_step=1, device=CPU, warmup=1, steps=2)
    for call in (recorder.end, lambda: recorder.report(one)):
        with pytest.raises(UsageError, match=r"call begin\(\) first"):
            call()
    for _ in range(3):
        recorder.begin()
        recorder.begin()  # the step before was given up
        recorder.mark("forward")
        for loss, says in ((1.0, "loss is 1.0"), (torch.ones(2), r"loss has shape \(2,\)")):
            with pytest.raises(UsageError, match=says):
                recorder.report(loss)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no loss for this step"):
            recorder.end()
        recorder.report(one)
        with pytest.raises(UsageError, match=r"finish\(\) after \d of 3 steps: wait for end\(\)"):
            recorder.finish()
        done = recorder.end()
        recorder.mark("forward")  # of an evaluation
    with pytest.raises(UsageError, match=r"mark\('fwd'\): phases are forward, backward"):
        recorder.mark("fwd")  # type: ignore[arg-type]
    record = recorder.finish()
    assert done
    assert record is not None
    assert len(record.steps) == 2
    assert [len(recorder._steps.marks(step)) for step in range(3)] == [1, 1, 1]


def test_report_describes_the_job_and_compares_arms(tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    for arm in ("none", "overlap"):
        on_ranks(1, train, str(results), arm)
    groups = compare(read_records([results]).records)
    text = to_markdown(groups)
    assert len(groups) == 1
    assert "model mlp, layers 4, world 1" in text
    assert "qwen3" not in text
    assert groups[0].rows[1].x_none is not None
    assert ",qwen3" not in to_csv(groups)


RATES = Link(in_bytes_per_s=2.0 * GIB, out_bytes_per_s=2.0 * GIB, both_bytes_per_s=3.0 * GIB)


def test_the_floor_is_that_of_its_bytes_on_the_probed_link(tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    for arm in ("none", "chunked"):
        on_ranks(1, train, str(results), arm, False, RATES)
    none, chunked = read_records([results]).records
    assert none.floor.seconds is None
    assert chunked.moved.in_bytes_per_step
    assert chunked.floor.seconds == pytest.approx(2 * chunked.moved.in_bytes_per_step / (3.0 * GIB))
    assert chunked.floor.bound_by == "gpu_link duplex"
    (group,) = compare([none, chunked])
    assert group.rows[1].floor_s == chunked.floor.seconds
    assert group.rows[1].x_none is not None
    assert group.without_ideal == [f"no ideal for none, chunked: {ideal.CPU}"]
    # On a GPU its ideal would be simulated from the optimizer's own schedule.
    assert [(one.schedule or {})["name"] for one in (none, chunked)] == ["none", "chunked"]
    mode = none.spec.mode.model_copy(update={"device": "cuda"})
    there = [one.model_copy(update={"spec": one.spec.model_copy(update={"mode": mode})}) for one in (none, chunked)]
    idle, moving = (row.ideal_s for row in compare(there)[0].rows)
    assert idle
    assert moving
    assert moving > idle


def test_a_plan_takes_state_times_and_rates_from_the_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "mine.jsonl"
    on_ranks(1, train, str(results), "none", False, RATES)
    (record,) = read_records([results]).records
    assert record.local_params
    inputs = gather(PlanOptions(record=results), lambda: pytest.fail("asked for this host"))
    assert inputs.job.state == 8 * record.local_params
    assert (inputs.job.layers, inputs.job.tokens_per_step) == (4, 8)
    assert inputs.compute.forward == record.phases_s.forward
    assert (inputs.links.into, inputs.links.both) == (2.0 * GIB, 3.0 * GIB)
    assert main(["plan", "--record", str(results)]) == 0
    shown = capsys.readouterr().out
    assert f"{record.local_params:,} parameters a rank x 8 bytes of state" in shown
    assert "In your trainer: the schedule of arm" in shown
    silent = record.model_copy(update={"local_params": 0})
    results.write_text(silent.model_dump_json() + "\n")
    with pytest.raises(UsageError, match="give StepRecorder the optimizer"):
        gather(PlanOptions(record=results), lambda: pytest.fail("asked for this host"))


def test_accumulated_passes_are_told_by_the_job(tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    on_ranks(1, train, str(results), "none")
    (record,) = read_records([results]).records
    passes = record.model_copy(update={"job": {"model": "mlp", "grad_accum": 4}})
    once, four = compute_of_records([record]), compute_of_records([passes])
    assert four.forward == pytest.approx(once.forward / 4)
    assert four.total == pytest.approx(once.total)


def pipeline(rank: int, results: str) -> bool:
    """Two model parts with an optimizer each, one more that is not offloaded."""
    parts = [torch.nn.Linear(64, 64) for _ in range(3)]
    schedule = sharded.schedule_of("chunked")
    optimizers: list[torch.optim.Optimizer] = [OffloadedAdamW(p.parameters(), schedule=schedule) for p in parts[:2]]
    optimizers.append(torch.optim.AdamW(parts[2].parameters()))
    recorder = StepRecorder(results, arm="chunked", job={}, tokens_per_step=1, optimizer=optimizers, warmup=1, steps=2)
    done = False
    while not done:
        recorder.begin()
        loss = parts[2](parts[1](parts[0](torch.ones(2, 64)))).square().mean()
        loss.backward()
        recorder.report(loss)
        with recorder.optimizer_step():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        done = recorder.end()
    recorder.finish()
    return True


def test_several_optimizers_are_one_row(tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    on_ranks(1, pipeline, str(results))
    (record,) = read_records([results]).records
    assert record.status == "ok"
    assert record.local_params == 3 * (64 * 64 + 64)
    assert record.state.host_bytes == 2 * 8 * (64 * 64 + 64)
    assert record.moved.in_bytes_per_step == record.moved.planned_in_bytes_per_step
    assert (record.moved.planned_out_bytes_per_step or 0) >= record.state.host_bytes
    assert record.moved.copy_span_s is None
    assert record.chunks == 2


@pytest.mark.gpu
def test_on_a_gpu_the_link_is_probed(tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = OffloadedAdamW(model.parameters(), schedule=sharded.schedule_of("chunked"))
    recorder = StepRecorder(
        tmp_path / "mine.jsonl", arm="chunked", job={}, tokens_per_step=1, optimizer=optimizer, warmup=1, steps=2
    )
    done = False
    while not done:
        recorder.begin()
        loss = model(torch.ones(2, 1024, device="cuda")).square().mean()
        loss.backward()
        recorder.report(loss)
        with recorder.optimizer_step():
            optimizer.step()
        optimizer.zero_grad()
        done = recorder.end()
    record = recorder.finish()
    assert record is not None
    assert record.warnings == []
    assert record.link.both_bytes_per_s is not None
    assert record.link.both_bytes_per_s > GIB
    assert record.floor.bound_by == "gpu_link duplex"
