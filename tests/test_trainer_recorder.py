"""A trainer of its own, measured by a few lines in its loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offbench.compare import compare
from offbench.errors import RecordError
from offbench.render import to_csv, to_markdown
from offbench.results_file import read_records
from offbench.trainer_recorder import TrainerRecorder
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def train(rank: int, results: str, arm: str, spoil: bool = False) -> bool:
    model = sharded.build(CPU)
    optimizer: torch.optim.Optimizer
    if arm == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), **sharded.OPTIONS, fused=True)
    else:
        optimizer = sharded.optimizer_of(arm, model, None)
    recorder = TrainerRecorder(
        results, arm=arm, job={"model": "mlp", "width": sharded.WIDTH}, tokens_per_step=8,
        optimizer=optimizer, device=CPU, warmup=2, steps=4,
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
    return (record is not None) == (rank == 0) and step == 5


@pytest.mark.parametrize("arm", ["plain", "chunked", "overlap"])
def test_two_ranks_leave_one_record(arm: str, tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    assert on_ranks(2, train, str(results), arm) == [True, True]
    (record,) = read_records([results]).records
    assert record.status == "ok"
    assert record.job == {"model": "mlp", "width": sharded.WIDTH}
    assert record.spec.arm.name == arm
    assert record.spec.mode.world == 2
    assert len(record.steps) == 4
    assert record.step_s is not None
    assert record.tok_s == pytest.approx(8 / record.step_s)
    assert record.steps[0].loss is not None
    assert record.phases_s.forward is not None
    assert record.env["torch"]
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


def test_an_unwritable_path_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write results"):
        TrainerRecorder(tmp_path / "file" / "x.jsonl", arm="none", job={}, tokens_per_step=1, device=CPU)


def test_report_describes_the_job_and_compares_arms(tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    for arm in ("none", "overlap"):
        on_ranks(1, train, str(results), arm)
    groups = compare(read_records([results]).records)
    text = to_markdown(groups)
    assert len(groups) == 1
    assert f"model mlp, width {sharded.WIDTH}, world 1" in text
    assert "qwen3" not in text
    assert groups[0].rows[1].x_none is not None
    assert ",qwen3" not in to_csv(groups)
