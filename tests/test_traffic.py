"""The account of what moved, from events whose times the test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from offbench.device import Stamp
from offbench.offload.copies import Ledger
from offbench.traffic import TrafficLog, union


@dataclass(frozen=True)
class At:
    """An event that passed at `ms`."""

    ms: float

    def elapsed_time(self, other: At) -> float:
        return other.ms - self.ms


@dataclass
class FakeOptimizer:
    ledger: Ledger | None
    bytes_per_step: int
    resident: int = 0

    def where(self) -> dict[str, int]:
        return {"device": self.resident}


@dataclass
class FakeDevice:
    torch_device: torch.device = field(default_factory=lambda: torch.device("cuda"))


def stamp(ms: float) -> Stamp:
    return Stamp(At(ms), 0.0)


def book(ledger: Ledger, step: int, in_ms: list[float], out_ms: list[float]) -> None:
    """One step of chunks of 10 bytes whose copies end at the given times; those in take 20 ms, those out 10."""
    ledger.step = step
    for ms in in_ms:
        ledger.copied("in", 10, At(ms - 20), At(ms))  # type: ignore[arg-type]
    for ms in out_ms:
        ledger.copied("out", 10, At(ms - 10), At(ms))  # type: ignore[arg-type]
    ledger.held(20, At(step * 100.0), At(out_ms[-1]))  # type: ignore[arg-type]


@pytest.fixture
def log() -> TrafficLog:
    """Steps end at 100, 200, 300 ms; the copies of each step's two chunks run over into the next step."""
    ledger: Any = Ledger()
    optimizer: Any = FakeOptimizer(ledger, 20)
    made = TrafficLog(optimizer, FakeDevice())  # type: ignore[arg-type]
    assert ledger.keep
    book(ledger, 1, [105, 130], [120, 150])
    made.note(1, stamp(100))
    book(ledger, 2, [205, 230], [220, 250])
    made.note(2, stamp(200))
    book(ledger, 3, [305, 330], [320, 350])
    made.note(3, stamp(300))
    made._notes = [made._notes[0], made._notes[2]]  # the window is steps 2 and 3
    return made


def test_bytes_count_in_the_window_in_which_their_copy_ends(log: TrafficLog) -> None:
    for way in log.traffic():
        assert (way.completed_at_start, way.completed_at_end) == (0, 40)
        assert (way.in_flight_at_start, way.in_flight_at_end) == (20, 20)
    moved = log.moved(2, copy_repeat=2.5)
    assert moved.in_bytes_per_step == moved.out_bytes_per_step == 20
    assert moved.copies_in_per_step == 2
    assert moved.copy_repeat == 2.5


def test_the_span_runs_from_hand_over_to_the_last_write_back(log: TrafficLog) -> None:
    assert log.moved(2, 1.0).copy_span_s == pytest.approx(0.050)


def test_copies_side_by_side_count_once_and_only_inside_the_window(log: TrafficLog) -> None:
    # 100-105, 110-130 (out 110-120 beside it), 140-150, 185-205, 210-230, 240-250, and 285-300 of a longer one
    assert log.moved(1, 1.0).copy_busy_s == pytest.approx(0.100)
    assert log.moved(2, 1.0).copy_busy_s == pytest.approx(0.050)


def test_the_union_of_spans() -> None:
    assert union([(0, 4), (2, 3), (3, 6), (8, 9)], 1, 8.5) == 5.5
    assert union([], 0, 1) == 0


def test_state_is_there_once_its_copy_in_has_ended_until_its_copy_out_has(log: TrafficLog) -> None:
    # in at 105, 130, 205, 230, 305, 330; out at 120, 150, 220, 250, 320, 350
    assert [log.state_at([stamp(ms)]) for ms in (104, 110, 125, 140, 190, 240)] == [0, 10, 0, 10, 0, 10]
    assert log.state_at([stamp(190), stamp(240)]) == 10
    log._optimizer.resident = 7  # type: ignore[attr-defined]
    assert log.state_at([stamp(190)]) == 7
    ledger: Any = Ledger()
    ledger.copied("in", 10, None, At(50))
    late = TrafficLog(FakeOptimizer(ledger, 20), FakeDevice())  # type: ignore[arg-type]
    assert late.state_at([stamp(100)]) == 10, "it came before the log began"


def test_an_arm_that_leaves_copies_for_later_shows_it() -> None:
    ledger: Any = Ledger()
    optimizer: Any = FakeOptimizer(ledger, 20)
    log = TrafficLog(optimizer, FakeDevice())  # type: ignore[arg-type]
    log.note(1, stamp(100))
    book(ledger, 2, [205, 430], [220, 450])
    log.note(2, stamp(300))
    ways = {way.direction: way for way in log.traffic()}
    assert ways["in"].completed_at_end - ways["in"].completed_at_start == 10
    assert ways["in"].in_flight_at_end > ways["in"].in_flight_at_start - 20
    assert ways["out"].in_flight_at_end == 30


def test_nothing_is_known_about_device_memory_on_the_cpu() -> None:
    optimizer: Any = FakeOptimizer(None, 0)
    log = TrafficLog(optimizer, FakeDevice(torch.device("cpu")))  # type: ignore[arg-type]
    assert log.state_at([Stamp(None, 1.0)]) is None
