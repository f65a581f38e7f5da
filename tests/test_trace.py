"""`offbench trace`: figures of a trace whose every span is known, and of random ones, whose parts must add up."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbench.cli import main
from offbench.trace import TraceSummary, summarize
from offbench.trace.events import WAITS
from offbench.trace.spans import common, seconds, union, without

SYNTHETIC = Path(__file__).parent / "data" / "traces" / "synthetic-one-gpu.json"
"""Two steps, written by hand, in microseconds. In the first an upload of 1.2 MB is launched at 20, follows a kernel
that ends at 100, and starts when the bulk move-in ends, at 1000; a kernel runs beside from 300 to 400. In the second a
read-back follows a kernel that ends at 1500 and starts at 2510, 10 after the bulk write-back; another upload waits 5
for nothing. One upload, at 0, was launched before the trace began."""
EVENTS = json.loads(SYNTHETIC.read_text())["traceEvents"]
US = 1e-6
GIB = 1 << 30
IN, OUT = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"


def us(value: float) -> Any:
    return pytest.approx(value * US, abs=1e-8)


def test_the_figures_of_a_known_trace() -> None:
    found = summarize(EVENTS)
    assert (found.steps, found.span_s) == (2, us(2606))
    assert (found.small_h2d, found.small_d2h) == (1.5, 0.5)
    assert found.longest_small_wait_s == us(1010)
    assert found.idle_while_small_waits_s == us(800 + 1010 + 5)
    assert (found.bulk_in.count, found.bulk_in.nbytes, found.bulk_in.busy_s) == (1, GIB, us(1000))
    assert (found.bulk_out.count, found.bulk_out.nbytes, found.bulk_out.busy_s) == (1, GIB, us(1000))
    into, out = found.small_in, found.small_out
    assert (into.count, into.nbytes, into.unlaunched) == (3, 512 + 1179760 + 552, 1)
    assert (into.wait_s, into.longest_wait_s) == (us(905), us(900))
    assert (into.behind_bulk_s, into.longest_behind_bulk_s) == (us(900), us(900))
    assert (out.count, out.wait_s, out.behind_bulk_s) == (1, us(1010), us(1000))


def test_streams_and_host_waits_of_a_known_trace() -> None:
    found = summarize(EVENTS)
    rows = [(use.stream, use.kernels, use.copies, use.memsets, use.busy_s) for use in found.streams]
    assert rows == [(7, 3, 4, 0, us(683)), (17, 0, 1, 0, us(1000)), (21, 0, 1, 0, us(1000)), (25, 1, 1, 1, us(110))]
    waits = [(kind.call, kind.count, kind.total_s, kind.longest_s) for kind in found.host_waits]
    assert waits == [("cudaEventSynchronize", 2, us(1029), us(1017)), ("cudaDeviceSynchronize", 1, us(50), us(50))]


def test_what_was_launched_before_the_first_marked_step_is_left_out() -> None:
    """A step that is not marked, of the same operations, all launched before the others; a write-back runs on."""
    before = [
        event | {"ts": event["ts"] - 2800, "args": moved(event["args"], 10_000)}
        for event in EVENTS
        if event["ph"] == "X" and not event["name"].startswith("ProfilerStep")
    ]
    assert rounded(summarize([*before, *EVENTS])) == rounded(summarize(EVENTS))
    late = next(event for event in before if event["cat"] == "gpu_memcpy" and event["name"] == OUT)
    late["dur"] += 2805  # it ends at 2505
    found = summarize([*before, *EVENTS])
    assert (found.bulk_out.count, found.small_out.behind_bulk_s) == (1, us(1005)), "it still holds others up"


def rounded(found: TraceSummary) -> str:
    """As JSON, to the nanosecond."""
    return json.dumps(json.loads(json.dumps(asdict(found)), parse_float=lambda text: round(float(text), 9)))


def moved(args: dict[str, Any], correlations: int) -> dict[str, Any]:
    return args | {"correlation": args["correlation"] + correlations} if "correlation" in args else args


def test_the_threshold_and_the_steps_can_be_given() -> None:
    found = summarize(EVENTS, steps=4, small_bytes=1 << 20)
    assert (found.bulk_in.count, found.small_in.count, found.small_h2d) == (2, 2, 0.5)
    untold = [event for event in EVENTS if not str(event.get("name")).startswith("ProfilerStep")]
    assert (summarize(untold).steps, summarize(untold).small_h2d) == (None, None)


def test_without_launches_a_wait_is_unknown_not_zero() -> None:
    found = summarize([event for event in EVENTS if event.get("name") != "cudaMemcpyAsync"])
    assert found.small_in.unlaunched == found.small_in.count == 3
    assert found.small_in.wait_s is found.longest_small_wait_s is found.idle_while_small_waits_s is None


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaStreamSynchronize", True),
        ("cuCtxSynchronize", True),
        ("cuMemcpyDtoH_v2", True),
        ("cudaMemcpy", True),
        ("cudaMemcpyAsync", False),
        ("cuMemcpyHtoDAsync_v2", False),
        ("cudaEventQuery", False),
        ("cudaStreamWaitEvent", False),
    ],
)
def test_which_calls_make_the_host_wait(name: str, waits: bool) -> None:
    assert bool(WAITS.match(name)) is waits


# Random traces


@st.composite
def traces(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Work in order on a few streams of two GPUs, launched before it starts, or not at all."""
    at: dict[tuple[int, int], int] = {}
    events: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 25))):
        key = draw(st.tuples(st.integers(0, 1), st.sampled_from([7, 17, 21])))
        start = at.get(key, 100) + draw(st.integers(0, 30))
        length = draw(st.integers(0, 30))
        at[key] = start + length
        category, name, nbytes = draw(
            st.sampled_from(
                [
                    ("kernel", "k", 0),
                    ("gpu_memset", "Memset (Device)", 4),
                    ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 99),
                    ("gpu_memcpy", IN, 100),
                    ("gpu_memcpy", OUT, 100),
                    ("gpu_memcpy", IN, GIB),
                    ("gpu_memcpy", OUT, GIB),
                ]
            )
        )
        args = {"device": key[0], "stream": key[1], "correlation": number, "bytes": nbytes}
        events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": args})
        if draw(st.booleans()):
            launch = draw(st.integers(0, start))
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaX", "ts": launch, "dur": 1}
            events.append({**call, "args": {"correlation": number}})
    return draw(st.permutations(events))


@settings(max_examples=60, deadline=None)
@given(traces())
def test_the_parts_add_up(events: list[dict[str, Any]]) -> None:
    found = summarize(events, steps=1)
    copies = [event for event in events if event["cat"] == "gpu_memcpy"]
    assert sum(use.copies for use in found.streams) == len(copies)
    work = sum(use.kernels + use.copies + use.memsets for use in found.streams)
    assert work == sum(event["cat"] != "cuda_runtime" for event in events)
    for name, bulk, small in ((IN, found.bulk_in, found.small_in), (OUT, found.bulk_out, found.small_out)):
        ours = [event for event in copies if event["name"] == name]
        assert bulk.count + small.count == len(ours)
        assert bulk.nbytes + small.nbytes == sum(event["args"]["bytes"] for event in ours)
        if small.wait_s is not None:
            assert small.unlaunched < small.count
            assert 0 <= small.longest_wait_s <= small.wait_s + 1e-12
            assert 0 <= small.longest_behind_bulk_s <= small.behind_bulk_s + 1e-12 <= small.wait_s + 2e-12
    for use in found.streams:  # in order, so no moment is busy twice
        assert use.busy_s <= found.span_s + 1e-12
        assert use.kernel_s + use.copy_s <= use.busy_s + 1e-12
    waits = [small.wait_s for small in (found.small_in, found.small_out) if small.wait_s is not None]
    assert (found.idle_while_small_waits_s is None) == (not waits)
    assert (found.idle_while_small_waits_s or 0.0) <= sum(waits) + 1e-12


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@settings(max_examples=100, deadline=None)
@given(SPANS, SPANS)
def test_spans_are_the_moments_they_stand_for(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def moments(spans: list[Any]) -> set[int]:
        return {moment for start, end in spans for moment in range(start, end)}

    ours, others = union(left), union(right)
    assert (moments(ours), moments(others)) == (moments(left), moments(right))
    for result, expected in (
        (ours, moments(left)),
        (common(ours, others), moments(left) & moments(right)),
        (without(ours, others), moments(left) - moments(right)),
    ):
        assert moments(result) == expected
        assert seconds(result) == len(expected)
        assert all(a[1] < b[0] for a, b in pairwise(result))


# The command


def test_text_and_json_tell_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(SYNTHETIC.read_bytes()))
    assert main(["trace", str(packed), "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert (held["small_h2d"], held["small_in"]["unlaunched"], len(held["streams"])) == (1.5, 1, 4)
    assert main(["trace", str(SYNTHETIC)]) == 0
    said = capsys.readouterr().out
    assert "1 GPU, 2 steps, 0.003 s of device work; all figures of what they launched" in said
    assert "bulk copies out: 1, 1.0 GiB in 0.001 s, 1000.0 GiB/s" in said
    assert "small copies in (below 4MiB): 3, 1.5 a step, 1 launched before the trace began; waited 0.001 s" in said
    assert "compute idle while a small copy waited: 0.002 s" in said
    assert main(["trace", str(SYNTHETIC), "--small", "100B", "--steps", "1"]) == 0
    assert "small copies in (below 100B): none" in capsys.readouterr().out
    unmarked = tmp_path / "unmarked.json"
    unmarked.write_text(json.dumps([event for event in EVENTS if not event["name"].startswith("ProfilerStep")]))
    assert main(["trace", str(unmarked), "--steps", "2"]) == 0
    assert "1 GPU, 2 steps, 0.003 s of device work; all figures of the whole trace" in capsys.readouterr().out


def test_the_bare_list_of_events_is_a_trace_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(EVENTS))
    assert main(["trace", str(path)]) == 0
    assert "2 steps" in capsys.readouterr().out


KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"device": 0, "stream": 7}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json", "not a trace: no JSON"),
        (b"\xff\xfe\x00", "not a trace: no JSON"),
        (b"[" * 200_000, "not a trace: no JSON"),
        (b'{"runs": []}', "no list of traceEvents"),
        (b"7", "no list of traceEvents"),
        (b'{"traceEvents": []}', "no kernel or copy of a GPU in it"),
        (b'{"traceEvents": [7, {"ph": "X", "cat": "cpu_op"}]}', "no kernel or copy of a GPU in it"),
        (json.dumps([{**KERNEL, "ts": "x"}]).encode(), "event 0, a kernel, has no time"),
        (json.dumps([{**KERNEL, "dur": -1}]).encode(), "event 0, a kernel, has no time"),
        (json.dumps([7, {**KERNEL, "args": None}]).encode(), "event 1, a kernel, does not say its device"),
        (gzip.compress(b"{}" * 500, mtime=0)[:20], "damaged gzip file"),
        (b"\x1f\x8bnothing", "damaged gzip file"),
    ],
)
def test_what_is_no_trace_is_one_line(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["trace", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: {path}: ")
    assert said in err
    assert err.count("\n") == 1


def test_missing_files_folders_and_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err
    assert main(["trace", str(SYNTHETIC), "--small", "big"]) == 2
    assert "--small big: not a size" in capsys.readouterr().err


def test_it_imports_no_torch() -> None:
    code = "import sys; from offbench.cli import main; main(['trace', sys.argv[1]]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(SYNTHETIC)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
