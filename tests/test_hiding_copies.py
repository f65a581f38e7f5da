"""The notes say what the records say: predicted, measured and unexplained of arm stream's first rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbench.record import RunRecord
from offbench.results_file import read_records
from offbench.units import GIB

ROOT = Path(__file__).parent.parent
NOTES = (ROOT / "docs" / "hiding-copies.md").read_text()
RECORDS = read_records([ROOT / "results" / "h200-stream-first.jsonl"]).records
NONE, *STREAM = RECORDS
ADAMW_BYTES = 8


def table(first_cell: str) -> list[list[str]]:
    """Cells of the notes' table whose header begins so, without the first column."""
    lines = NOTES[NOTES.index(f"| {first_cell} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]


def phases(record: RunRecord) -> list[float]:
    found = record.phases_s
    return [value for value in (found.forward, found.backward, found.clip, found.step) if value is not None]


def figures(record: RunRecord) -> list[float]:
    """B, r, needed, bound, step, x none, exposed, unexplained, peak, as the notes define them."""
    forward, _, clip, step = phases(NONE)
    held, rate, params = record.peak.state_at_backward_end_bytes, record.link.in_bytes_per_s, record.local_params
    peak, took, none = record.peak.steady_allocated_bytes, record.step_s, NONE.step_s
    assert held
    assert rate
    assert params
    assert peak
    assert took
    assert none
    needed = (ADAMW_BYTES * params - held) / rate
    bound = max(0.0, needed - (forward + clip + step))
    exposed = took - none
    return [held / GIB, rate / GIB, needed, bound, took, took / none, exposed, exposed - bound, peak / GIB]


@pytest.mark.parametrize("row", range(3))
def test_a_stream_row(row: int) -> None:
    for written, found in zip(table("row | B GiB")[row], figures(STREAM[row]), strict=True):
        decimals = len(written.partition(".")[2])
        assert abs(float(written) - found) <= 0.5001 * 10**-decimals, (written, found)


def test_the_phases() -> None:
    start = NOTES.index("| | forward | backward |")
    lines = NOTES[start:].split("\n\n")[0].splitlines()[2:]
    written = [[float(cell) for cell in line.strip("|").split("|")[1:]] for line in lines]
    assert written == [[pytest.approx(value, abs=0.5001e-4) for value in phases(record)] for record in RECORDS]


def test_the_rest_is_what_is_left_of_the_unexplained() -> None:
    start = NOTES.index("| | unexplained s |")
    lines = NOTES[start:].split("\n\n")[0].splitlines()[2:]
    for line, record in zip(lines, STREAM, strict=True):
        unexplained, host, rest = (float(cell) for cell in line.strip("|").split("|")[1:])
        *_, exposed, left, _ = figures(record)
        step = phases(record)[-1]
        assert (unexplained, host, rest) == pytest.approx((left, step, left - step), abs=0.51e-3)
        assert exposed >= left
