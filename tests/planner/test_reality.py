"""The simulation beside the rows we ship: published ones from the inputs published with them, ours from our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbench.planner.reality import CLOSE, QUEUE, UNBOUND, UNKNOWN, Compared, against
from offbench.record import RunRecord, read_records
from offbench.seed import TABLE_A, TABLE_B, published

RESULTS = Path(__file__).parent.parent.parent / "results"
NATIVE = read_records([RESULTS / "h200-rehearsal-native.jsonl"]).records


def compared(records: list[RunRecord]) -> list[Compared]:
    found, skipped = against(records)
    assert not skipped
    return found


def test_published_rows_are_within_five_percent_or_have_a_reason() -> None:
    none, main, chunked, bounded, bound, overlap, overlap_bound, off = compared(list(published(TABLE_A)))
    for row in (none, bound, off):
        assert abs(row.error) <= CLOSE
        assert row.reason is None
    for row in (main, chunked, bounded):  # slower than local buffers allow, by no more than remote ones explain
        assert -0.12 < row.error < -CLOSE
        assert row.reason == UNBOUND
    assert overlap_bound.reason == QUEUE
    assert overlap.reason == f"{QUEUE}; {UNBOUND}"
    assert overlap.error < overlap_bound.error < -CLOSE


def test_published_rows_with_activation_offload_are_left_out_by_name() -> None:
    found, skipped = against(list(published(TABLE_B)))
    assert not found
    assert all("copies of activations are not simulated" in line for line in skipped)
    assert len(skipped) == 4


@pytest.mark.parametrize("arm", ["none", "main", "chunked"])
def test_our_synchronous_rows_are_within_five_percent(arm: str) -> None:
    rows = [row for row in against(NATIVE)[0] if row.name == arm]
    assert rows
    assert all(abs(row.error) <= CLOSE and row.reason is None for row in rows)


def test_our_overlap_rows_are_slower_than_any_flat_rate_model() -> None:
    rows = [row for row in against(NATIVE)[0] if row.name in {"overlap", "overlap (slots 2)", "overlap (slots 8)"}]
    assert len(rows) >= 3
    assert all(row.error < -CLOSE and row.reason == QUEUE for row in rows)


def test_a_row_far_off_for_no_known_reason_says_so() -> None:
    chunked = next(r for r in NATIVE if r.spec.arm.name == "chunked")
    assert chunked.step_s is not None
    slow = chunked.model_copy(update={"step_s": 2 * chunked.step_s})
    found, _ = against([*(r for r in NATIVE if r.spec.arm.name == "none"), slow])
    assert found[-1].reason == UNKNOWN
    assert found[-1].error == pytest.approx(-0.5, abs=0.02)


def test_rows_without_a_baseline_or_a_time_are_named() -> None:
    chunked = next(r for r in NATIVE if r.spec.arm.name == "chunked")
    failed = chunked.model_copy(update={"status": "oom", "step_s": None})
    found, skipped = against([chunked, failed])
    assert not found
    assert skipped == [
        "chunked: left out, no row of arm none with phases and rates for the same job",
        "chunked: left out, status oom",
    ]
