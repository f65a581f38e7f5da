"""Where a step's time went: traces in which each cause is known by construction, and random ones, whose parts tile."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from offbench.cli import main
from offbench.record import Split, TimeParts
from offbench.trace.blame import Blame
from offbench.trace.events import parse
from offbench.trace.summary import SMALL_BYTES
from offbench.trace.timeline import difference, split
from tests.test_trace import IN, OUT, traces

COMPUTE, GATHER, UPDATE, MOVES_IN, MOVES_OUT = 7, 14, 25, 29, 33
HOST, AUTOGRAD = 100, 200
BULK = 1 << 30


class Trace:
    """Events in microseconds. Unless said otherwise an operation was launched at 1, long before it starts."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def _add(self, category: str, name: str, start: float, end: float, thread: int, **args: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": thread}
        self.events.append(event | {"args": args})

    def mark(self, name: str, start: float, end: float, thread: int = HOST) -> Trace:
        self._add("user_annotation", name, start, end, thread)
        return self

    def wait(self, start: float, end: float, thread: int = HOST) -> Trace:
        self._add("cuda_runtime", "cudaEventSynchronize", start, end, thread)
        return self

    def overhead(self, start: float, end: float) -> Trace:
        self._add("overhead", "Buffer Flush", start, end, 0)
        return self

    def run(
        self,
        stream: int,
        start: float,
        end: float,
        launched: float | None = 1,
        *,
        copy: str | None = None,
        nbytes: int = BULK,
        thread: int = HOST,
    ) -> Trace:
        number = len(self.events)
        args = {"device": 0, "stream": stream, "correlation": number, "bytes": nbytes if copy else 0}
        self._add("gpu_memcpy" if copy else "kernel", copy or "k", start, end, 0, **args)
        if launched is not None:
            self._add("cuda_runtime", "cudaLaunchKernel", launched - 1, launched, thread, correlation=number)
        return self

    def split(self) -> Split:
        found = split(parse(self.events))
        assert found is not None
        return found


def gap(launched: float | None = 1, **last: Any) -> Trace:
    """A step from 0 to 1000: compute runs from 0 to 100 and from 400 to 1000 (us)."""
    trace = Trace().mark("ProfilerStep#1", 0, 500).run(COMPUTE, 0, 100)
    return trace.run(COMPUTE, 400, 1000, launched, **last)


def causes(parts: TimeParts) -> dict[str, float]:
    """The parts that are not zero, microseconds."""
    found = {
        name: value * 1e6 for name, value in parts.model_dump().items() if name != "kernels" and value is not None
    }
    return {name.removesuffix("_s"): pytest.approx(us, abs=0.01) for name, us in found.items() if abs(us) > 1e-3}


SIDE_UPDATE: tuple[Any, ...] = (UPDATE, 355, 395)
KNOWN: dict[str, tuple[Trace, dict[str, float]]] = {
    "the host launched late": (gap(395), {"launch": 300}),
    "a launch takes a little to arrive": (gap(386), {"launch": 300}),
    "a launch does not take so long to arrive": (gap(380), {"launch": 280, "unexplained": 20}),
    "the host itself waited for the device": (gap(395).wait(50, 300), {"host_wait": 200, "launch": 100}),
    "the profiler held the host up": (gap(395).overhead(50, 250), {"profiler": 150, "launch": 150}),
    "another thread's wait is not the launching one's": (gap(395).wait(50, 300, AUTOGRAD), {"launch": 300}),
    "an update waited for its move-in": (
        gap().run(MOVES_IN, 50, 350, copy=IN).run(*SIDE_UPDATE),
        {"move_in": 255, "update": 45},
    ),
    "the move-in waited for the one before it": (
        gap().run(MOVES_IN, 50, 200, copy=IN).run(MOVES_IN, 202, 350, copy=IN).run(*SIDE_UPDATE),
        {"move_in": 253, "between": 2, "update": 45},
    ),
    "the move-in waited for a slot": (
        gap().run(MOVES_OUT, 50, 200, copy=OUT).run(MOVES_IN, 210, 350, copy=IN).run(*SIDE_UPDATE),
        {"slot": 110, "move_in": 145, "update": 45},
    ),
    "the move-in was launched late": (
        gap().run(MOVES_IN, 210, 350, 205, copy=IN).run(*SIDE_UPDATE),
        {"launch": 110, "move_in": 145, "update": 45},
    ),
    "compute waited for a write-back": (gap().run(MOVES_OUT, 50, 390, copy=OUT), {"tail": 300}),
    "the write-back waited for its update": (
        gap().run(UPDATE, 50, 200).run(MOVES_OUT, 210, 390, copy=OUT),
        {"update": 110, "tail": 190},
    ),
    "compute waited for a gather, launched late": (
        gap().mark("FSDP::all_gather (blocks.1)", 130, 145).run(GATHER, 150, 390, 140),
        {"launch": 50, "gather": 250},
    ),
    "the gather waited for an update": (
        gap().mark("FSDP::all_gather (blocks.1)", 5, 30).run(GATHER, 300, 390, 20).run(UPDATE, 50, 290),
        {"update": 200, "gather": 100},
    ),
    "a wait takes a little to end": (
        gap().run(MOVES_IN, 50, 240, copy=IN).run(UPDATE, 325, 395),
        {"move_in": 225, "update": 75},
    ),
    "a wait does not take so long to end": (
        gap().run(MOVES_IN, 50, 200, copy=IN).run(UPDATE, 325, 395),
        {"unexplained": 225, "update": 75},
    ),
    "an update held the multiprocessors": (gap().run(UPDATE, 90, 480), {"update": 300}),
    "a small copy was served after a bulk one": (
        gap(copy=IN, nbytes=8).run(MOVES_IN, 20, 396, copy=IN),
        {"behind_bulk": 296, "between": 4},
    ),
    "bulk copies of the other way hold no small one up": (
        gap(copy=IN, nbytes=8).run(MOVES_OUT, 20, 420, copy=OUT),
        {"unexplained": 300},
    ),
    "nobody knows why": (gap(), {"unexplained": 300}),
    "the launch is not in the trace": (gap(None), {"unexplained": 300}),
}
"""What the 300 us between the two kernels went to."""


@pytest.mark.parametrize(("trace", "expected"), KNOWN.values(), ids=KNOWN)
def test_a_gap_goes_to_its_cause(trace: Trace, expected: dict[str, float]) -> None:
    assert causes(trace.split().total) == {"step": 1000, "compute": 700, **expected}


def test_where_two_things_lasted_the_later_one_is_the_cause() -> None:
    """A move-in runs until 200, the host launches at 300, an update that waited for nothing runs from 320."""
    trace = gap().run(MOVES_IN, 50, 200, copy=IN).run(UPDATE, 310, 390, 300)
    assert causes(trace.split().total) == {"step": 1000, "compute": 700, "launch": 210, "update": 90}


def test_kernels_queued_behind_each_other_have_little_between() -> None:
    trace = Trace().mark("ProfilerStep#1", 0, 10).run(COMPUTE, 0, 100).run(COMPUTE, 105, 200).run(COMPUTE, 200, 300)
    assert causes(trace.split().total) == {"step": 300, "compute": 295, "between": 5}


def step_of(trace: Trace, at: float, number: int) -> Trace:
    """1000 us: two micro batches, clip and AdamW, each queued in time but for AdamW."""
    for micro in (at, at + 300):
        trace.run(COMPUTE, micro, micro + 100, micro - 10 if micro > at else at + 1)
        trace.run(COMPUTE, micro + 100, micro + 300, micro - 5 if micro > at else at + 5, thread=AUTOGRAD)
    trace.run(COMPUTE, at + 600, at + 700, at + 400)
    trace.mark(f"Optimizer.step#{number}", at + 720, at + 790).run(COMPUTE, at + 780, at + 1000, at + 770)
    return trace.mark(f"ProfilerStep#{number}", at, at + 850)


def test_phases_are_those_of_the_host_and_autograds_thread() -> None:
    """Micro batches alternate, so each of the two phases adds up; AdamW belongs to no other phase."""
    trace = Trace()
    for number in range(2):
        step_of(trace, 1000 * number, number)
    found = trace.split()
    assert found.steps == 2
    assert causes(found.forward) == {"step": 200, "compute": 200}
    assert causes(found.backward) == {"step": 400, "compute": 400}
    assert causes(found.clip) == {"step": 120, "compute": 100, "launch": 20}
    assert causes(found.step) == {"step": 280, "update": 220, "launch": 60}
    assert causes(found.total) == {"step": 1000, "compute": 700, "update": 220, "launch": 80}
    assert (found.forward.kernels, found.backward.kernels, found.clip.kernels, found.step.kernels) == (2, 2, 1, 0)


def test_stamps_that_the_stream_shows_come_first() -> None:
    """step() makes compute wait for a write-back until 190: only its own stamp, queued behind, can tell."""
    trace = Trace().mark("ProfilerStep#1", 0, 100).run(COMPUTE, 20, 60, 15).run(MOVES_OUT, 20, 185, copy=OUT)
    at = {
        "begin": (0, 3),
        "forward": (30, 60),
        "backward": (35, 62),
        "clip": (40, 64),
        "step": (50, 190),
        "end": (55, 192),
    }
    for name, (queued, start) in at.items():
        trace.run(COMPUTE, start, start + 1, queued + 3).mark(f"offbench::{name}", queued, queued + 5)
    found = trace.split()
    assert causes(found.forward) == {"step": 57, "compute": 41, "launch": 16}
    assert causes(found.backward) == {"step": 2, "compute": 1, "between": 1}
    assert causes(found.step) == {"step": 128, "compute": 2, "between": 1, "tail": 125}
    unseen = [event for event in trace.events if not event["name"].startswith("offbench::")]
    assert causes(split(parse(unseen)).step) == {}, "torch's marks do not say where step() is here"


def test_the_difference_is_slowed_compute_and_more_waits() -> None:
    slow = Trace().mark("ProfilerStep#1", 0, 500).run(COMPUTE, 0, 120).run(COMPUTE, 420, 1100, 415)
    apart = difference(slow.split(), gap(395).split())
    assert causes(apart.total) == {"step": 100, "compute": 100}
    assert apart.kernels_digest == slow.split().kernels_digest
    assert apart.total.kernels == 0
    more = difference(gap(395).run(COMPUTE, 1000, 1010).split(), gap(395).split())
    assert (more.total.kernels, more.kernels_digest) == (1, None)
    other = gap(395)
    other.events[1]["name"] = "another"
    assert difference(other.split(), gap(395).split()).kernels_digest is None
    assert difference(Split(), gap().split()).total == TimeParts()


def test_without_marked_steps_or_kernels_there_is_no_split() -> None:
    assert split(parse(Trace().run(COMPUTE, 0, 1).events)) is None
    assert split(parse(Trace().mark("ProfilerStep#1", 0, 5).events)) is None


@settings(max_examples=60, deadline=None)
@given(traces())
def test_the_pieces_of_a_gap_lie_end_to_end(events: list[dict[str, Any]]) -> None:
    parsed = parse(events)
    ops = [op for op in parsed.ops if op.device == 0]
    ours = [i for i, op in enumerate(ops) if op.stream == COMPUTE]
    blame = Blame(ops, COMPUTE, parsed, SMALL_BYTES)
    for before, after in pairwise(ours):
        pieces = sorted(blame.pieces(after, ops[before].end))
        assert sum(piece.end - piece.start for piece in pieces) == pytest.approx(
            max(0.0, ops[after].start - ops[before].end), abs=1e-12
        )
        assert all(one.end <= other.start + 1e-12 for one, other in pairwise(pieces))


def written(path: Path, trace: Trace) -> str:
    path.write_text(json.dumps({"traceEvents": trace.events}))
    return str(path)


def test_the_command_says_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = written(tmp_path / "stream.json", gap().run(MOVES_OUT, 50, 390, copy=OUT))
    base = written(tmp_path / "none.json", gap(395).run(COMPUTE, 1000, 1010))
    assert main(["trace", ours, "--against", base]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[-6:] for line in said if line.startswith("tail")] == [
        ["0.0003", "0.0003", "0.0000", "0.0000", "0.0000", "30.00"],
        ["0.0003", "0.0003", "0.0000", "0.0000", "0.0000", "30.00"],
    ]
    assert "slowed compute is not only that: other kernels ran (-1 a step)" in said
    assert main(["trace", ours, "--against", base, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["split"]["total"]["tail_s"] == held["difference"]["total"]["tail_s"] == pytest.approx(3e-4)
    assert main(["trace", ours, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] is None


def test_steps_must_be_marked_to_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = written(tmp_path / "stream.json", gap())
    bare = written(tmp_path / "bare.json", Trace().run(COMPUTE, 0, 100))
    assert main(["trace", ours, "--against", bare]) == 2
    assert capsys.readouterr().err == (
        f"error: {bare}: --against needs kernels and marked steps in both traces; call prof.step() after each\n"
    )
    assert main(["trace", bare]) == 0
    assert "not known, no step is marked (prof.step())" in capsys.readouterr().out
