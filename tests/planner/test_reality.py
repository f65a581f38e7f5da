"""The simulation beside the rows we ship: published ones from the inputs published with them, ours from our own."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from offbench.arms import ARMS
from offbench.planner.ideal import policy_ideal
from offbench.planner.inputs import of_model
from offbench.planner.reality import (
    CLOSE,
    KERNELS,
    LARGE,
    LAUNCHES,
    SHARED,
    SLOWER,
    UNKNOWN,
    UNSTEADY,
    Compared,
    against,
    waiting,
)
from offbench.planner.result import Span
from offbench.planner.simulate import simulate
from offbench.planner.sources import (
    baseline,
    compute_of_records,
    layout_of,
    links_of_records,
    none_rows,
    schedule_of,
)
from offbench.planner.tasks import SmallCopies
from offbench.planner.text import HOST
from offbench.record import Link, RunRecord
from offbench.results_file import read_records
from offbench.seed import TABLE_A, TABLE_B, published
from offbench.workload import presets

RESULTS = Path(__file__).parent.parent.parent / "results"
NATIVE, EMULATED, COPIES = (
    read_records([RESULTS / f"h200-rehearsal-{name}.jsonl"]).records
    for name in ("native", "emulated-38.8", "fsdp-copies")
)
ALL = read_records([RESULTS / "h200-all-arms.jsonl"]).records
STREAM = read_records([RESULTS / "h200-stream-first.jsonl"]).records


def seconds(record: RunRecord, none: Sequence[RunRecord] = ()) -> float | None:
    found = policy_ideal(record, none)
    return None if found is None else found.step_s


def compared(records: list[RunRecord]) -> list[Compared]:
    found, skipped = against(records)
    assert not skipped
    return found


def remote_s(row: Compared) -> float:
    """What the reason says the row takes at the rates of remote buffers."""
    assert row.reason is not None
    found = re.search(r"at 0\.8 of them it takes ([\d.]+) s", row.reason)
    assert found
    return float(found[1])


def test_published_rows_are_within_five_percent_or_have_a_reason() -> None:
    none, main, chunked, bounded, bound, overlap, overlap_bound, off = compared(list(published(TABLE_A)))
    for row in (none, bound, off, overlap_bound):
        assert abs(row.error) <= CLOSE
        assert row.reason is None
    for row in (main, chunked, bounded, overlap):  # slower than local buffers allow, by what remote ones explain
        assert -0.15 < row.error < -CLOSE
        # main and chunked within 2 %; overlap is 6 % off: which of its small copies wait is not known.
        assert remote_s(row) == pytest.approx(row.actual_s, rel=0.061 if row is overlap else 0.02)


def test_the_published_overlap_is_met_only_if_uploads_wait() -> None:
    overlap = compared(list(published(TABLE_A)))[6]
    assert overlap.simulated_s == pytest.approx(3.52, rel=0.04)
    assert overlap.free_s == pytest.approx(3.09, rel=0.01)


def test_published_rows_with_activation_offload_as_well() -> None:
    main, chunked, overlap, bound = compared(list(published(TABLE_B)))
    assert abs(bound.error) <= CLOSE
    for row in (main, chunked, overlap):
        assert -0.16 < row.error < -CLOSE
        assert remote_s(row) == pytest.approx(row.actual_s, rel=0.06)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("h200-*.jsonl")), ids=lambda file: file.stem)
def test_our_rows_are_within_five_percent_or_have_a_reason(file: Path) -> None:
    records = read_records([file]).records
    rows, skipped = against(records)
    # Only what failed, or has no `none` beside it, cannot be compared.
    assert all("left out, status" in line or "no row of arm none" in line for line in skipped)
    assert rows or len(skipped) == len(records)
    written = in_the_docs(file.stem)
    for row in rows:
        assert row.reason != UNKNOWN
        assert (abs(row.error) <= CLOSE) == (row.reason is None)
        error = f"{100 * row.error:+z.1f}"
        figures = f"{row.simulated_s:.3f}", f"{row.actual_s:.3f}", "0.0" if error == "+0.0" else error
        if figures in written:
            written.remove(figures)
        else:  # one that docs/plan.md leaves out
            assert row.name.startswith("none"), figures
            assert abs(row.error) < 0.01
    assert not written


def in_the_docs(name: str) -> list[tuple[str, str, str]]:
    """Simulated, actual and error of a file's rows, as docs/plan.md has them."""
    found: list[tuple[str, str, str]] = []
    here = ""
    for line in (RESULTS.parent / "docs" / "plan.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if named := re.match(r"`(h200-[^`]*)`|table [AB]", cells[0]):
            here = named[1]
        if here == name and len(cells) == 4 and cells[3].endswith("%"):
            simulated, actual, error = (re.split("[,;] ", cell.removesuffix(" %")) for cell in cells[1:])
            shared = simulated * (len(actual) if len(simulated) == 1 else 1)
            found += zip(shared, actual, error, strict=True)
    return found


@pytest.mark.parametrize("records", [NATIVE, EMULATED, COPIES], ids=["native", "emulated", "fsdp copies"])
def test_synchronous_rows_are_within_three_percent(records: list[RunRecord]) -> None:
    rows = compared(records)
    assert len(rows) == len(records)
    assert all(abs(row.error) <= 0.025 for row in rows if not row.name.startswith("overlap"))


def test_stream_rows_are_simulated_with_the_staging_they_held_and_peak_where_they_did() -> None:
    none, native, roomy, emulated = STREAM
    for row in (native, roomy, emulated):
        assert schedule_of(row).loss_bytes == (row.spec.arm.loss_bytes or row.peak.staging_bytes)
    assert schedule_of(none) == ARMS["none"].schedule(none.spec.arm)
    # `none` copies nothing, so that of the native link gives the times of the emulated row as well.
    assert [row.simulated_s for row in compared(STREAM)] == pytest.approx([1.894, 1.946, 2.002, 2.080], abs=0.001)


def test_the_loss_takes_its_share_of_the_forward_by_forwards_of_two_depths() -> None:
    deep = baseline(read_records([RESULTS / "h200-stream-fourth.jsonl"]).records)
    flat = baseline(read_records([RESULTS / "h200-x2-rehearsal.jsonl"]).records)
    assert (deep[0].spec.workload.layers, flat[0].spec.workload.layers) == (48, 24)
    both, half = compute_of_records(deep), compute_of_records(flat)
    rest = 2 * half.forward - both.forward  # what no layer takes
    assert rest == pytest.approx(0.071, abs=0.001)
    # By FLOPs the same at both depths, and a little less than that: the rest also has the embedding and the start.
    assert both.loss == pytest.approx(half.loss, rel=0.02)
    assert 0.9 < both.loss / rest < 1


def test_deferred_rows_are_met_only_if_state_is_there_a_loss_and_a_layer_before_the_forward_ends() -> None:
    files = [read_records([file]).records for file in sorted(RESULTS.glob("h200-*.jsonl"))]
    quiet = [
        (row, policy_ideal(row, none_rows(records, row)))
        for records in files
        for row in records
        if row.status == "ok" and row.spec.arm.name in {"overlap", "stream"} and not waiting(row).any
        if row.spec.mode.nproc == 1 and not row.spec.workload.activation_offload
    ]
    errors = [ideal.step_s / row.step_s - 1 for row, ideal in quiet if ideal and row.step_s]
    assert len(quiet) - 1 == len(errors) >= 24  # of one job no `none` was run
    assert max(errors) < CLOSE
    assert statistics.median(map(abs, errors)) < 0.012
    instant = [replace(compute_of_records(none_rows(ALL, row)), loss=0.0) for row, _ in quiet[:2]]
    for (row, _), compute in zip(quiet, instant, strict=False):
        schedule, links = schedule_of(row), links_of_records([row])
        assert schedule
        assert links
        layout = of_model(presets.find("qwen3-30b-a3b"), 8, 8, 48, schedule.chunk_bytes)
        assert simulate(schedule, layout, compute, links).step_s < 0.96 * (row.step_s or 0)


def test_real_rows_of_two_gpus_are_off_by_slower_copies_or_whole_parameters() -> None:
    records = [r for r in read_records([RESULTS / "h200-x2-real.jsonl"]).records if r.spec.mode.kind == "real"]
    rows, _ = against(records)
    assert len(rows) == len(records) == 19
    reasons = {(row.name.split(" ")[0], row.reason) for row in rows if row.reason}
    rates = "57.0 GiB/s of a GPU and not 68.8, at which it takes 2.747 s"
    assert reasons == {("stream", f"{LARGE} up to 1.5 GiB"), ("chunked", f"{SLOWER} {rates}")}
    assert sum(row.reason is not None for row in rows) == 4
    for factor in (0.9, 1.2):  # faster than simulated, and slower by more than such waits
        other = [
            r.model_copy(update={"step_s": factor * (r.step_s or 0)}) if r.spec.arm.name == "stream" else r
            for r in records
        ]
        found = {row.reason for row in against(other)[0] if row.name.startswith("stream")}
        assert found <= {None, UNKNOWN}


def test_a_row_is_simulated_in_the_chunks_it_moved_in() -> None:
    row = next(r for r in read_records([RESULTS / "h200-x2-real.jsonl"]).records if r.spec.arm.name == "stream")
    schedule = schedule_of(row)
    assert schedule is not None
    assert row.chunks == len(layout_of(row, schedule).chunks) == 39  # of before large parameters were cut
    today = layout_of(row.model_copy(update={"chunks": None}), schedule)
    assert max(chunk.nbytes for chunk in today.chunks) <= 768 << 20
    assert layout_of(row.model_copy(update={"chunks": len(today.chunks)}), schedule) == today


def test_a_row_whose_updates_had_more_of_the_link_than_others_says_so() -> None:
    records = read_records([RESULTS / "h200-x2-cut.jsonl"]).records
    rows = [row for row in against(records)[0] if row.reason]
    (fast,) = rows
    assert fast.name.startswith("zerocopy")
    assert fast.reason == f"{KERNELS} 67.0 GiB/s of a GPU and not 54.8, at which it takes 2.259 s"
    assert fast.actual_s == pytest.approx(2.259, rel=0.002)
    narrow = Link(in_bytes_per_s=20e9, out_bytes_per_s=20e9, both_bytes_per_s=40e9)
    probed = [r.model_copy(update={"link": narrow}) if r.spec.arm.name == "zerocopy" else r for r in records]
    said = [row.reason for row in against(probed)[0] if row.name.startswith("zerocopy")]
    assert [reason.split()[9] for reason in said if reason] == ["55.6", "59.1", "67.0"], "what was measured"
    slow = [r.model_copy(update={"step_s": 3.0}) if r.step_s == fast.actual_s else r for r in records]
    assert UNKNOWN in {row.reason for row in against(slow)[0]}


def test_a_row_of_two_gpus_whose_copies_met_less_than_its_probes_says_so() -> None:
    records = read_records([RESULTS / "h200-x2-rehearsal.jsonl"]).records
    (_, overlap, stream), _ = against(records)
    for row, probed, own_s in ((overlap, 62.9, 1.140), (stream, 60.8, 1.119)):
        # One way after the other, as stream mostly copies, shows no both-ways rate: the other row does.
        assert row.reason == f"{SHARED} 80.8 GiB/s of a GPU and not {probed}, at which it takes {own_s:.3f} s"
        assert own_s == pytest.approx(row.actual_s, rel=0.025)
    unknown = records[1].model_copy(update={"moved": records[1].moved.model_copy(update={"copy_busy_s": None})})
    assert against([records[0], unknown])[0][1].reason == UNKNOWN
    alone = records[1].spec.model_copy(update={"mode": records[1].spec.mode.model_copy(update={"nproc": 1})})
    none = records[0].model_copy(update={"spec": records[0].spec.model_copy(update={"mode": alone.mode})})
    assert against([none, records[1].model_copy(update={"spec": alone})])[0][1].reason == UNKNOWN


def test_a_row_of_an_unsteady_machine_says_so() -> None:
    none, native, *_ = STREAM
    slow = [native.steps[0].model_copy(update={"step_s": seconds}) for seconds in (1.94, 1.95, 2.11, 2.2)]
    unsteady = native.model_copy(update={"steps": slow, "step_s": 2.05})
    found, _ = against([none, unsteady])
    assert found[-1].reason == f"{UNSTEADY} 1.940 to 2.200 s, and of the fastest the error is +0.3 %"
    steady = native.model_copy(update={"steps": slow[2:], "step_s": 2.15})
    assert against([none, steady])[0][-1].reason == UNKNOWN


def stock_overlap(records: list[RunRecord]) -> list[RunRecord]:
    return [r for r in records if r.status == "ok" and r.spec.arm.name == "overlap" and waiting(r).any]


def test_our_overlap_rows_need_the_small_copies_to_wait() -> None:
    files = [read_records([file]).records for file in sorted(RESULTS.glob("h200-*.jsonl"))]
    rows = [row for records in files for row in against(records)[0] if row.small_s]
    assert len(rows) == sum(len(stock_overlap(records)) for records in files) == 9
    # Whole chunks and pieces, both links, uploads alone, read-backs alone: without the waits all are far too fast.
    assert all(row.free_s < 0.91 * row.actual_s for row in rows)
    assert all(abs(row.error) <= 0.042 for row in rows)


@pytest.mark.parametrize(
    ("emulated", "close", "all_close"), [(False, 0.12, 0.1), (True, 0.01, 0.07)], ids=["native", "emulated"]
)
def test_small_copies_wait_as_long_as_they_were_seen_to(emulated: bool, close: float, all_close: float) -> None:
    row = next(r for r in stock_overlap(ALL) if (r.spec.mode.emulate_link is not None) == emulated)
    compute, links = compute_of_records(baseline(ALL, like=row)), links_of_records([row])
    assert links is not None
    assert row.small_copies is not None
    schedule, spans = schedule_of(row), list[Span]()
    layout = of_model(presets.find("qwen3-30b-a3b"), 8, 8, 48, schedule.chunk_bytes)
    found = simulate(schedule, layout, compute, links, small_copies_wait=waiting(row), spans=spans)
    # The first upload is the longest: behind all that step() has queued.
    first = next(span.start for span in spans if span.compute == "forward")
    assert first == pytest.approx(row.small_copies.longest_upload_s, rel=close)
    # All waits of the step, against what its own forward and step() took beyond those of `none`.
    phases = row.phases_s
    assert phases.forward
    assert phases.step
    measured = phases.forward + phases.step - compute.forward
    assert found.waits.total == pytest.approx(measured, rel=all_close)


def test_what_traces_say_stands_beside_the_simulation_and_explains_a_late_host() -> None:
    rows = {(row.name, row.actual_s): row for row in compared(ALL)}
    traced = [row.traced for row in rows.values() if row.traced]
    assert len(traced) == 8
    native, emulated = (row for row in rows.values() if row.name == "overlap")
    for row, behind_bulk in ((native, 0.333), (emulated, 1.018)):
        assert row.traced is not None
        assert row.traced.behind_bulk_s == pytest.approx(behind_bulk, abs=0.001)
        # The slower host of a traced step comes after the upload at times: fewer wait.
        assert 0.6 < row.traced.behind_bulk_s / row.small_s < 0.75
    stream = next(r for r in ALL if r.spec.arm.name == "stream")
    assert stream.step_s is not None
    late = stream.model_copy(update={"step_s": stream.step_s + 0.1})
    found, _ = against([*ALL, late])
    assert found[
        -1
    ].reason == f"{LAUNCHES} 0.245 s a step longer than in those of none, which is not simulated and " + (
        "covers the 0.132 s"
    )
    later = stream.model_copy(update={"step_s": stream.step_s + 0.3})
    assert against([*ALL, later])[0][-1].reason == UNKNOWN


def test_every_traced_step_is_explained_to_half_a_percent() -> None:
    files = [read_records([file]).records for file in sorted(RESULTS.glob("h200-*.jsonl"))]
    totals = [record.split.total for records in files for record in records if record.split]
    assert len(totals) >= 9
    for total in totals:
        assert total.step_s is not None
        assert total.unexplained_s is not None
        assert abs(total.unexplained_s) < 0.005 * total.step_s


def test_which_small_copies_wait_is_read_from_the_record() -> None:
    overlap = next(r for r in NATIVE if r.spec.arm.name == "overlap")
    assert waiting(overlap) == SmallCopies(uploads=True, readbacks=True)
    fixed = overlap.spec.arm.model_copy(update={"fsdp_copies": "kernel"})
    quiet = overlap.spec.model_copy(update={"arm": fixed.model_copy(update={"readbacks": "kernel"})})
    assert waiting(overlap.model_copy(update={"spec": quiet})) == SmallCopies()
    silent = overlap.spec.workload.model_copy(update={"count_readback": False})
    spec = overlap.spec.model_copy(update={"arm": fixed, "workload": silent})
    assert waiting(overlap.model_copy(update={"spec": spec})) == SmallCopies()


def test_accumulated_forwards_but_the_first_count_as_backward() -> None:
    none, *_ = NATIVE
    twice = none.spec.workload.model_copy(update={"grad_accum": 2})
    row = none.model_copy(update={"spec": none.spec.model_copy(update={"workload": twice})})
    found, forward = compute_of_records([row]), none.phases_s.forward
    assert forward is not None
    assert found.forward == pytest.approx(forward / 2)
    assert found.total == pytest.approx(compute_of_records([none]).total)


def test_head_and_loss_take_what_was_measured_or_their_share_of_flops() -> None:
    none, *_ = NATIVE
    assert none.phases_s.forward
    by_flops = compute_of_records([none]).loss
    assert none.phases_s.loss is None
    assert 0.1 < by_flops / none.phases_s.forward < 0.2
    rows = [
        none.model_copy(update={"phases_s": none.phases_s.model_copy(update={"loss": share * none.phases_s.forward})})
        for share in (0.05, 0.08, 0.4)
    ]
    assert compute_of_records(rows).loss == pytest.approx(0.08 * none.phases_s.forward)
    assert compute_of_records([none, none, rows[0]]).loss == pytest.approx(by_flops)
    theirs = rows[0].model_copy(update={"job": {"model": "mine"}})
    assert compute_of_records([theirs]).loss == pytest.approx(0.05 * none.phases_s.forward)


def test_what_no_block_of_none_took_is_less_than_the_share_of_flops() -> None:
    """By the records whose blocks were timed."""
    rest, flops = [], []
    for file in sorted(RESULTS.glob("h200-*.jsonl")):
        for record in read_records([file]).records:
            if record.spec.arm.name != "none" or record.host_lead is None or record.phases_s.loss is not None:
                continue
            if record.phases_s.forward:
                assert len(record.host_lead.forward_s) == record.spec.workload.layers
                rest.append(record.phases_s.forward - sum(record.host_lead.forward_s))
                flops.append(compute_of_records([record]).loss)
    prose = " ".join((RESULTS.parent / "docs" / "plan.md").read_text().split())
    words = f"by the {len(rest)} launches of `none` whose blocks were timed in one step, it is {min(rest):.3f} to"
    assert f"{words} {max(rest):.3f} s." in prose
    most = max(share - found for share, found in zip(flops, rest, strict=True))
    assert f"ideals of such rows are up to {most:.3f} s too long" in prose


def test_a_row_far_off_for_no_known_reason_says_so() -> None:
    chunked = next(r for r in NATIVE if r.spec.arm.name == "chunked")
    assert chunked.step_s is not None
    slow = chunked.model_copy(update={"step_s": 2 * chunked.step_s})
    found, _ = against([*(r for r in NATIVE if r.spec.arm.name == "none"), slow])
    assert found[-1].reason == UNKNOWN
    assert found[-1].error == pytest.approx(-0.5, abs=0.02)


def test_a_row_whose_updates_are_the_copies_is_simulated_too() -> None:
    overlap = next(r for r in NATIVE if r.spec.arm.name == "overlap")
    spec = overlap.spec.model_copy(update={"arm": ARMS["zerocopy"].resolve()})
    row = overlap.model_copy(update={"spec": spec})
    found, skipped = against([*NATIVE, row])
    assert not skipped
    assert found[-1].name == "zerocopy"
    # No copy engine takes part, so nothing waits behind it; and its ideal is all it is.
    assert found[-1].simulated_s == pytest.approx(found[-1].free_s)
    assert seconds(row, baseline(NATIVE)) == pytest.approx(found[-1].free_s, rel=0.01)


def test_rows_without_a_baseline_or_a_time_are_named() -> None:
    chunked = next(r for r in NATIVE if r.spec.arm.name == "chunked")
    failed = chunked.model_copy(update={"status": "oom", "step_s": None})
    found, skipped = against([chunked, failed])
    assert not found
    assert skipped == [
        "chunked: left out, no row of arm none with phases and rates for the same job",
        "chunked: left out, status oom",
    ]


def test_what_launches_cost_beside_the_simulation() -> None:
    above = []
    for path in RESULTS.glob("h200-*.jsonl"):
        records = read_records([path]).records
        for record in records:
            arm, mode = record.spec.arm, record.spec.mode
            by_kernels = (arm.fsdp_copies, arm.readbacks) == ("kernel", "kernel")
            if record.spec.workload.activation_offload:
                continue  # by the copy engines inputs wait for state, not for the host
            if arm.name in ("overlap", "stream") and by_kernels and (mode.kind, mode.nproc) == ("rehearsal", 1):
                ideal = seconds(record, none_rows(records, record))
                if record.status == "ok" and record.step_s and ideal:
                    above.append(record.step_s - ideal)
    prose = " ".join((RESULTS.parent / "docs" / "plan.md").read_text().split())
    less = [-one for one in above if one < 0]
    assert (
        f"took {statistics.median(above):.3f} s longer than simulated in the median of {len(above)} rehearsals on one "
        f"H200 without offloaded activations, at most {max(above):.3f} s; {len(less)} took up to "
        f"{max(less):.3f} s less."
    ) in prose
    assert f"took up to {max(above):.2f} s a step longer than simulated" in HOST
