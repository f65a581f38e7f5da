from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbench.device import CpuDevice, Device, Stamp
from offbench.record import Peak, RunRecord
from offbench.window import RankResult, Scalars, Traffic, WindowRecorder, first_non_finite, gather, window_valid


class ScriptedDevice(CpuDevice):
    """A device whose clock and memory move only when the test says so; it logs what the recorder asks of it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0.0
        self.held = self.peak = 0
        self.log: list[str] = []

    def stamp(self) -> Stamp:
        return Stamp(None, self.now)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def hold(self, size: int) -> None:
        self.held = size
        self.peak = max(self.peak, size)

    def peak_allocated(self) -> int | None:
        return self.peak

    def peak_reserved(self) -> int | None:
        return self.peak + 1

    def reset_peaks(self) -> None:
        self.log.append("reset")
        self.peak = self.held

    def alloc_retries(self) -> int | None:
        """Two a second."""
        return round(2 * self.now)

    def used(self) -> int | None:
        return self.held + 2


def scripted_step(recorder: WindowRecorder, device: ScriptedDevice, seconds: float, loss: float, peak: int) -> Scalars:
    """One step of two micro-batches: forward 2 x 20 %, backward 2 x 15 %, clip 5 %, step 10 %, rest 15 %."""
    recorder.begin()
    for _ in range(2):
        device.now += 0.20 * seconds
        recorder.mark("forward")
        device.now += 0.15 * seconds
        recorder.mark("backward")
    device.hold(peak)
    device.hold(100)
    device.now += 0.05 * seconds
    recorder.mark("clip")
    recorder.report(torch.tensor(loss), torch.tensor(3.0), None)
    with recorder.optimizer_step():
        device.now += 0.10 * seconds
    device.now += 0.15 * seconds
    return recorder.end()


def scripted_run() -> tuple[ScriptedDevice, RankResult]:
    device = ScriptedDevice()
    recorder = WindowRecorder(device, warmup=2, steps=3)
    starts = []
    for i, seconds in enumerate([25.0, 5.0, 2.0, 2.0, 3.0]):
        starts.append(recorder.at_window_start)
        assert scripted_step(recorder, device, seconds, loss=10.0 - i, peak=1000 - 100 * i) == Scalars(
            10.0 - i, 3.0, None
        )
        device.now += 0.5  # between two steps: part of the next one
    device.now -= 0.5
    assert starts == [False, False, True, False, False]
    assert "synchronize" not in device.log

    def drain() -> None:
        device.log.append("drain")
        device.now += 0.75

    recorder.close(drain)
    return device, recorder.result()


def test_window_and_steps_share_their_boundaries() -> None:
    _, result = scripted_run()
    assert result.first_step_s == pytest.approx(25.0)
    assert result.step_s == pytest.approx([2.5, 2.5, 3.5])
    assert result.window_s == pytest.approx(sum(result.step_s))
    assert result.tail_s == pytest.approx(0.75)
    assert result.drained_s == pytest.approx(result.window_s + 0.75)


def test_phases_add_up_over_micro_batches() -> None:
    _, result = scripted_run()
    work, between = 7.0 / 3, 0.5
    assert result.phase_s == pytest.approx(
        {"forward": 0.4 * work + between, "backward": 0.3 * work, "clip": 0.05 * work, "step": 0.1 * work}
    )
    assert result.host_in_step_s is not None
    assert 0 < result.host_in_step_s < 0.1


@pytest.mark.parametrize("silent", [None, 0, 2])
def test_what_the_forwards_end_with_is_told_where_every_one_of_the_window_does(silent: int | None) -> None:
    """One step of warm-up, two that count, two passes each; in the passes of one of them it may be left out."""
    device = ScriptedDevice()
    recorder = WindowRecorder(device, warmup=1, steps=2)
    for step, seconds in enumerate((100.0, 1.0, 3.0)):
        recorder.begin()
        for micro in range(2):
            device.now += 7.0
            if step != silent or micro == 0:
                recorder.loss_begins()
            device.now += seconds
            recorder.mark("forward")
            device.now += 9.0
            recorder.mark("backward")
        recorder.report(torch.tensor(1.0), None, None)
        with recorder.optimizer_step():
            pass
        recorder.end()
    recorder.close(lambda: None)
    found = recorder.result().phase_s
    assert found["forward"] == pytest.approx(2 * (7 + 2))
    assert found.get("loss") == (None if silent == 2 else pytest.approx(2 * 2.0))


def test_peaks_are_of_the_first_step_and_of_the_window_alone() -> None:
    device, result = scripted_run()
    assert result.peak.first_step_allocated_bytes == 1000
    assert result.peak.first_step_reserved_bytes == 1001
    assert result.peak.steady_allocated_bytes == 800, "the second warm-up step reached 900"
    assert result.peak.device_used_bytes == 102
    assert result.peak.staging_bytes is None
    assert result.peak.alloc_retries == round(2 * result.window_s) == 17, "those of the window alone"
    assert device.log == ["reset", "reset", "drain", "synchronize"]


def test_every_step_keeps_its_scalars() -> None:
    _, result = scripted_run()
    assert [scalars.loss for scalars in result.scalars] == [10.0, 9.0, 8.0, 7.0, 6.0]
    assert {scalars.clip_factor for scalars in result.scalars} == {None}


def test_finished_step_is_the_one_before_the_last() -> None:
    device = ScriptedDevice()
    recorder = WindowRecorder(device, warmup=1, steps=2)
    seen = []
    for seconds in (4.0, 2.0, 3.0):
        scripted_step(recorder, device, seconds, 1.0, 0)
        seen.append(recorder.finished_step_s())
    assert seen == [None, pytest.approx(4.0), pytest.approx(2.0)]
    assert recorder.boundary.host_s == pytest.approx(9.0)


def test_a_step_without_scalars_is_refused() -> None:
    recorder = WindowRecorder(ScriptedDevice(), warmup=1, steps=1)
    recorder.begin()
    with pytest.raises(AssertionError, match="nothing was sent"):
        recorder.end()


def test_no_result_before_the_window_is_over_and_drained() -> None:
    device = ScriptedDevice()
    recorder = WindowRecorder(device, warmup=1, steps=1)
    scripted_step(recorder, device, 1.0, 1.0, 0)
    with pytest.raises(RuntimeError, match="1 of 2 steps"):
        recorder.close(lambda: None)
    with pytest.raises(RuntimeError, match="close the recorder"):
        recorder.result()


def test_cpu_run_measures_time_and_no_memory() -> None:
    recorder = WindowRecorder(Device.of(torch.device("cpu")), warmup=1, steps=2)
    for _ in range(recorder.total):
        recorder.begin()
        time.sleep(0.01)
        recorder.mark("forward")
        recorder.report(torch.tensor(1.0), None, None)
        with recorder.optimizer_step():
            time.sleep(0.005)
        recorder.end()
    recorder.close(lambda: time.sleep(0.01))
    result = recorder.result()
    assert all(0.015 <= seconds < 0.5 for seconds in result.step_s)
    assert 0.005 <= (result.host_in_step_s or 0.0) <= result.phase_s["step"] < 0.5
    assert 0.01 <= result.tail_s < 0.5
    assert set(result.peak.model_dump().values()) == {None}


def rank(step_s: list[float], **changes: object) -> RankResult:
    """A rank with one warm-up step and the given window."""
    base = RankResult(
        warmup=1,
        step_s=step_s,
        window_s=sum(step_s),
        drained_s=sum(step_s) + 1.0,
        tail_s=1.0,
        first_step_s=9.0,
        phase_s={"forward": 1.0, "backward": 2.0},
        host_in_step_s=0.25,
        scalars=[Scalars(5.0, 1.0, 1.0)] * (1 + len(step_s)),
        peak=Peak(steady_allocated_bytes=10),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_gather_takes_the_slowest_rank() -> None:
    slow_late = rank([1.0, 4.0], phase_s={"forward": 3.0, "backward": 1.0}, first_step_s=12.0)
    slow_early = rank(
        [3.0, 1.0],
        tail_s=2.0,
        drained_s=8.0,
        scalars=[Scalars(5.0, 1.0, 1.0), Scalars(7.0, 9.0, 0.5), Scalars(9.0, 9.0, 0.5)],
        peak=Peak(steady_allocated_bytes=30, device_used_bytes=7),
    )
    figures = gather([slow_late, slow_early], tokens_per_step=1000)
    assert figures.step_s == 2.5
    assert [row.step_s for row in figures.steps] == [3.0, 4.0]
    assert figures.median_step_s == figures.last10_step_s == 3.5
    assert figures.drained_step_s == 4.0
    assert figures.tail_s == 2.0
    assert figures.tok_s == 400.0
    assert figures.first_step_s == 12.0
    assert [row.loss for row in figures.steps] == [6.0, 7.0]
    assert [(row.step_s, row.loss, row.clip_factor) for row in figures.warmup_steps] == [(None, 5.0, 1.0)]
    assert figures.steps[0].grad_norm == 1.0
    assert (figures.phases_s.forward, figures.phases_s.backward, figures.phases_s.clip) == (3.0, 2.0, None)
    assert figures.phases_s.host_in_step == 0.25
    assert (figures.peak.steady_allocated_bytes, figures.peak.device_used_bytes) == (30, 7)
    assert figures.peak.steady_reserved_bytes is None


def test_figures_are_fields_of_a_record() -> None:
    figures = vars(gather([rank([1.0])], tokens_per_step=1))
    assert set(figures) <= set(RunRecord.model_fields)


@given(st.integers(1, 4), st.lists(st.floats(1e-3, 1e3), min_size=12, max_size=12))
def test_step_s_is_bounded_by_the_slowest_steps(ranks: int, seconds: list[float]) -> None:
    share = 12 // ranks
    results = [rank(seconds[i * share : (i + 1) * share]) for i in range(ranks)]
    figures = gather(results, tokens_per_step=1)
    largest = [row.step_s or 0.0 for row in figures.steps]
    assert figures.step_s <= sum(largest) / share * (1 + 1e-9)
    assert figures.step_s >= min(seconds) * (1 - 1e-9)
    assert figures.drained_step_s > figures.step_s


def test_the_first_figure_that_is_not_finite_is_named() -> None:
    good = rank([1.0])
    bad = rank([1.0], scalars=[Scalars(5.0, None, None), Scalars(5.0, math.inf, 1.0)])
    assert first_non_finite([good, good]) is None
    assert first_non_finite([good, bad]) == "grad_norm is inf in step 2 (warm-up counted) on rank 1"


CHUNK = 10
WAY = Traffic("in", 100, 400, 20, 20, 100)


def test_window_that_saw_all_its_copies_is_valid() -> None:
    assert window_valid([WAY, replace(WAY, direction="out")], steps=3, chunk_bytes=CHUNK) is None
    assert window_valid([replace(WAY, completed_at_end=400 - CHUNK)], 3, CHUNK) is None
    assert window_valid([replace(WAY, completed_at_end=400 + CHUNK)], 3, CHUNK) is None
    assert window_valid([replace(WAY, in_flight_at_end=0)], 3, CHUNK) is None
    assert window_valid([replace(WAY, in_flight_at_end=5, completed_at_end=400 + CHUNK + 15)], 3, CHUNK) is None
    assert window_valid([replace(WAY, in_flight_at_end=5, completed_at_end=401 + CHUNK + 15)], 3, CHUNK) is not None
    assert window_valid([replace(WAY, in_flight_at_end=30)], 3, CHUNK, in_flight_slack=10) is None
    assert window_valid([], 3, CHUNK) is None, "an arm that moves nothing"


@pytest.mark.parametrize("completed", [400 - CHUNK - 1, 400 + CHUNK + 1])
def test_window_with_other_bytes_than_planned_is_invalid(completed: int) -> None:
    reason = window_valid([WAY, replace(WAY, direction="out", completed_at_end=completed)], 3, CHUNK)
    assert reason is not None
    assert reason.startswith(f"out: {completed - 100} bytes completed in the window, planned 300")


def test_window_that_leaves_more_in_flight_is_invalid() -> None:
    reason = window_valid([replace(WAY, in_flight_at_end=21)], 3, CHUNK)
    assert reason == "in: 21 bytes in flight at the end of the window, 20 at its start"
    assert window_valid([replace(WAY, in_flight_at_end=31)], 3, CHUNK, in_flight_slack=10) is not None


@pytest.mark.gpu
def test_a_slow_side_stream_delays_no_step_and_fills_the_tail() -> None:
    device = Device.of(torch.device("cuda"))
    side = torch.cuda.Stream()
    x = torch.ones(1, device="cuda")
    recorder = WindowRecorder(device, warmup=1, steps=4)
    for step in range(recorder.total):
        if step == 1:
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000_000)  # about a second at 2 GHz
        recorder.begin()
        torch.cuda._sleep(10_000_000)
        recorder.mark("forward")
        recorder.report(x.sum() + step, x.sum(), None)
        with recorder.optimizer_step():
            torch.cuda._sleep(1_000_000)
        assert recorder.end().loss == 1.0 + step
    assert not side.query(), "the recorder waited for another stream"
    recorder.close(lambda: torch.cuda.current_stream().wait_stream(side))
    result = recorder.result()
    assert result.window_s == pytest.approx(sum(result.step_s), rel=1e-3)
    assert 0.01 < result.window_s < 0.3
    assert result.tail_s > 0.5
    assert (result.peak.steady_allocated_bytes or 0) > 0
