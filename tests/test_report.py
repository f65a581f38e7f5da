from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbench import arms, seed
from offbench.compare import Group, Row, compare
from offbench.config import GIB, Mode, RunSpec, Workload
from offbench.errors import UsageError
from offbench.naming import arm_name, describe
from offbench.planner.ideal import NO_SCHEDULE
from offbench.record import RunRecord
from offbench.render import cells, figures, headers, to_csv, to_json, to_markdown, to_table
from offbench.report import report
from offbench.results_file import read_records
from offbench.verdict import verdicts

RESULTS = Path(__file__).parent.parent / "results"
ENV = {"gpu": "NVIDIA H200", "cpu_model": "Test CPU", "cpus": 16, "torch": "2.15.0", "offbench": "0.1.0"}


def spec(arm: str = "none", *, numa: bool = False, world: int = 8, nproc: int = 1, **workload: Any) -> RunSpec:
    return RunSpec(
        workload=Workload.model_validate({"ep": 8, **workload}),
        arm=arms.ARMS[arm].resolve(numa=numa),
        mode=Mode(kind="real" if world == nproc else "rehearsal", device="cuda", world=world, nproc=nproc),
    )


def record(of: RunSpec, step_s: float | None = 2.0, launch: int = 1, **fields: Any) -> RunRecord:
    base: dict[str, Any] = {
        "run_id": of.run_id,
        "launch": launch,
        "status": "ok" if step_s else "oom",
        "spec": of,
        "step_s": step_s,
        "tok_s": of.tokens_per_step / step_s if step_s else None,
        "env": ENV,
        "started_at": "2026-01-02T03:04:05+00:00",
    }
    return RunRecord.model_validate(base | fields)


def only(records: list[RunRecord]) -> Group:
    groups = compare(records)
    assert len(groups) == 1
    return groups[0]


def row(group: Group, arm: str) -> Row:
    return next(r for r in group.rows if r.arm == arm)


def test_published_rows_against_their_baseline() -> None:
    group = only(list(seed.published(seed.TABLE_A)))
    got = [(round(r.x_none or 0, 2), round(r.exposed_s or 0, 2)) for r in group.rows]
    assert got == [
        *((1.00, 0.00), (2.17, 2.64), (1.82, 1.85), (1.85, 1.93)),
        *((1.71, 1.61), (1.77, 1.74), (1.56, 1.26), (1.71, 1.61)),
    ]
    assert [round((r.run_peak_bytes or 0) / GIB, 1) for r in group.rows[:2]] == [81.3, 63.2]


def test_published_rows_without_a_baseline_have_no_ratio() -> None:
    rows = only([*seed.published(seed.TABLE_A), *seed.published(seed.TABLE_B)]).rows
    assert [r.x_none for r in rows if r.activation_offload] == [None] * 4


@pytest.mark.parametrize(
    "other",
    [
        record(spec("main"), env={**ENV, "gpu": "NVIDIA H100"}),
        record(spec("main"), env={**ENV, "torch": "2.11.0"}),
        record(spec("main"), env={**ENV, "offbench": "0.2.0"}),
        record(spec("main"), env={**ENV, "cpu_model": "Another"}),
        record(spec("main", seq_len=8192)),
        record(spec("main", layers=24)),
        record(spec("main", world=8, nproc=8)),
        record(spec("main", world=8, nproc=2)),
        record(spec("main"), source="published", reference="somewhere"),
    ],
)
def test_unlike_rows_never_share_a_table(other: RunRecord) -> None:
    groups = compare([record(spec()), other, record(spec("chunked"))])
    assert [[r.arm for r in group.rows] for group in groups] == [["none", "chunked"], ["main"]]
    assert groups[1].rows[0].x_none is None


def test_an_emulated_link_is_another_mode() -> None:
    slow = spec("main").model_copy(update={"mode": spec().mode.model_copy(update={"emulate_link": 38.8 * GIB})})
    groups = compare([record(spec()), record(slow)])
    assert len(groups) == 2
    assert "rehearsal of 8, rank 0; link native" in describe(groups[0].caption)[2]
    assert "link 38.8 GiB/s emulated" in describe(groups[1].caption)[2]


def test_launches_give_a_median_and_a_spread_and_failures_stay_out() -> None:
    launches = [record(spec("main"), s, i) for i, s in enumerate((4.0, 4.4, 4.1), start=1)]
    broken = record(spec("main"), None, 4, reason="rank 1: no memory", phase="warmup")
    group = only([record(spec()), *launches, broken])
    main = row(group, "main")
    assert main.step_s is not None
    assert (main.step_s.median, main.step_s.low, main.step_s.high, main.step_s.n) == (4.1, 4.0, 4.4, 3)
    assert (main.launches, main.status) == (3, "3 ok, 1 oom")
    assert group.failures == ["main, launch 4: oom in warmup: rank 1: no memory"]


def test_invalid_figures_do_not_count() -> None:
    group = only([record(spec(), 2.0, status="invalid", reason="bytes in: 5 of 6")])
    assert group.rows[0].step_s is None
    assert group.failures == ["none, launch 1: invalid: bytes in: 5 of 6"]


def test_differences_below_the_noise_floor_are_the_same() -> None:
    base = [record(spec(), s, i) for i, s in enumerate((2.00, 2.06), start=1)]
    near, far = record(spec("overlap"), 2.05), record(spec("main"), 2.2)
    group = only([*base, near, far])
    assert group.noise == pytest.approx(0.06 / 2.03)
    assert (row(group, "overlap").same, row(group, "main").same, row(group, "none").same) == (True, False, False)
    assert not row(only([base[0], near]), "overlap").same  # one launch each: no floor is known


def test_each_activation_axis_has_its_own_baseline() -> None:
    group = only(
        [
            record(spec(), 2.0),
            record(spec(activation_offload=True), 3.0),
            record(spec("main"), 4.0),
            record(spec("main", activation_offload=True), 6.0),
        ]
    )
    assert [r.x_none for r in group.rows] == [1.0, 1.0, 2.0, 2.0]


def test_the_fastest_baseline_serves_all_arms() -> None:
    group = only([record(spec(numa=True), 1.9), record(spec(), 2.0), record(spec("main", numa=True), 4.0)])
    assert row(group, "main").x_none == pytest.approx(4.0 / 1.9)


def test_none_with_and_without_the_small_copies_as_kernels_is_one_baseline() -> None:
    """The faster of the two, whichever that is: an arm must not gain from a baseline slowed by its own remedy."""
    kernels = {"fsdp_copies": "kernel", "readbacks": "kernel"}
    for stock_s, kernel_s in ((2.0, 1.9), (1.9, 2.0)):
        stock, kernel = record(chosen("none"), stock_s), record(chosen("none", **kernels), kernel_s)
        others = [record(chosen("overlap"), 3.8), record(chosen("overlap", **kernels), 2.85)]
        for records in ([stock, kernel, *others], [*others, kernel, stock]):
            group = only(records)
            of = {found.spec.arm: found for found in group.rows}
            ratios = [of[one.spec.arm].x_none for one in (stock, kernel, *others)]
            assert ratios == pytest.approx([stock_s / 1.9, kernel_s / 1.9, 2.0, 1.5])
            assert [of[one.spec.arm].exposed_s for one in others] == pytest.approx([1.9, 0.95])


def small(wait_s: float | None, engine: int = 10, kernels: int = 0) -> dict[str, Any]:
    counts = {"uploads_per_step": engine, "readbacks_per_step": engine, "by_kernel_per_step": kernels}
    return counts | {"longest_upload_s": wait_s, "longest_wait_s": wait_s}


def test_a_small_copy_that_waits_long_is_pointed_out() -> None:
    base = record(spec(), small_copies=small(1e-3))
    slow = [record(spec("overlap"), 2.5, i, small_copies=small(s)) for i, s in enumerate((0.25, 1.135, None), 1)]
    quick = record(chosen("overlap", fsdp_copies="kernel"), 2.1, small_copies=small(2e-4, 0, 20))
    group = only([base, *slow, quick])
    line = "overlap: a small copy waited 1.135 s; a step makes 10 uploads, 10 read-backs and 0 of both by kernels"
    assert group.notes == [line]
    assert f"- note: {line}" in to_markdown([group])
    found = [figures(one) for one in group.rows]
    assert [one["small_longest_wait_s"] for one in found] == [1e-3, 1.135, 2e-4]
    assert [one["small_by_kernel_per_step"] for one in found] == [0, 0, 20]
    shown = list(csv.DictReader(io.StringIO(to_csv([group]))))
    assert [one["small_uploads_per_step"] for one in shown] == ["10", "10", "0"]
    unknown = figures(only([record(spec())]).rows[0])
    assert unknown["small_uploads_per_step"] is unknown["small_longest_wait_s"] is None


def test_rates_that_disagree_are_pointed_out() -> None:
    assert only([record(spec(), 2.0, tok_s=131072 / 2.0 * 1.009)]).notes == []
    wrong = only([record(spec(), 7.2, tok_s=131072 / 44.1)])
    assert wrong.notes == [
        "none, launch 1: 2972 tok/s is written, 131072 tokens in 7.2 s make 18204: one of them is wrong"
    ]


def test_other_mathematics_is_pointed_out() -> None:
    def losses(*values: float) -> list[dict[str, float]]:
        return [{"loss": value} for value in values]

    base = record(spec(), steps=losses(10.0, 9.0), adamw="fused")
    close = record(spec("main"), steps=losses(10.0, 9.005), adamw="fused")
    off = record(spec("overlap"), steps=losses(10.0, 9.2), adamw="foreach")
    assert only([base, close]).notes == []
    assert only([base, off]).notes == [
        "AdamW implementations differ between arms (foreach, fused): not only copies differ",
        "overlap, launch 1: losses leave those of none by up to 2.2%: it does not train the same",
    ]


def test_losses_are_held_to_the_spread_of_equal_launches() -> None:
    """An arm that leaves out updates moves the loss by less than any fixed share worth having."""

    def launch(arm: str, loss: float, number: int = 1) -> RunRecord:
        return record(spec(arm), launch=number, steps=[{"loss": 12.0}, {"loss": loss}])

    base = [launch("none", 12.0), launch("none", 12.0 + 1e-4, 2)]
    assert only([*base, launch("main", 12.0 - 2e-4)]).notes == []
    assert only([*base, launch("main", 12.0 - 1e-3)]).notes == [
        "main, launch 1: losses leave those of none by up to 0.0083%, launches of none differ by 0.00083%: "
        "it does not train the same"
    ]
    later = [launch("main", 12.0), launch("main", 12.5, 2)]
    assert [note.partition(":")[0] for note in only([*base, *later]).notes] == ["main, launch 2"]
    exact = [launch("none", 12.0), launch("none", 12.0, 2)]
    assert len(only([*exact, launch("main", 12.0 + 1e-4)]).notes) == 1


def test_commits_are_versions_that_share_no_table() -> None:
    one, two = (record(spec(a), env={**ENV, "commit": c, "dirty": False}) for a, c in (("none", "aa"), ("main", "bb")))
    assert [group.rows[0].arm for group in compare([one, two])] == ["none", "main"]
    assert compare([one, two])[1].rows[0].x_none is None
    assert only([one, two.model_copy(update={"env": one.env})]).rows[1].x_none is not None


def test_an_uncommitted_tree_is_pointed_out() -> None:
    clean, dirty = (record(spec("none"), env={**ENV, "commit": "aa", "dirty": dirty}) for dirty in (False, True))
    assert only([clean]).notes == []
    assert only([dirty]).notes == ["rows come from an uncommitted tree: compare with care"]


def test_names_say_what_differs_from_the_default() -> None:
    arm = arms.ARMS["overlap"].resolve(numa=True, slots=8, chunk_bytes=512 << 20, first_step="whole")
    of = spec(activation_offload=True).model_copy(update={"arm": arm})
    assert arm_name(of) == "overlap (numa, activation offload, whole first step, chunk 512MiB, slots 8)"
    assert arm_name(spec("overlap")) == "overlap"
    group = only([record(spec("main", numa=True), host={"numa": "not applicable: one node"})])
    assert group.rows[0].axes == "numa not applicable"


def test_markdown_marks_what_is_modelled_and_missing() -> None:
    peak = {"first_step_allocated_bytes": 60 * GIB, "steady_allocated_bytes": 50 * GIB}
    text = to_markdown(compare([record(spec(), peak=peak), record(spec("main"), None)]))
    lines = text.splitlines()
    assert lines[0] == "1 x NVIDIA H200; Test CPU, 16 CPUs  "
    assert "| tok/s, modelled |" in text
    assert "| none | - | 65536 | 2.000 | 1.00 | 0.000 | - | - | - | - | 60.0 | 50.0 | - | - | - | 1 | ok |" in lines
    assert "| main | - | - | - | - | - | - | - | - | - | - | - | - | - | - | 0 | oom |" in lines
    assert "tok/s, modelled" not in headers(only([record(spec(world=8, nproc=8))]))


POOLS = [
    {"stream": "compute", "reserved_bytes": 30 * GIB, "most_bytes": 28 * GIB, "at_peak_bytes": 24 * GIB},
    {"stream": "FSDP2 reduce-scatter", "reserved_bytes": 10 * GIB, "most_bytes": 9 * GIB, "at_peak_bytes": 9 * GIB},
    {"stream": "optimizer in", "reserved_bytes": 2 << 20, "most_bytes": 1 << 20, "at_peak_bytes": 1 << 20},
]


def test_reserved_memory_is_told_apart_where_it_was_watched() -> None:
    reserved = {"allocated_bytes": 32 * GIB, "in_use_bytes": 33 * GIB, "pools": POOLS}
    watched = record(spec("chunked"), reserved=reserved, peak={"alloc_retries": 0})
    group = only([record(spec()), watched])
    lines = to_markdown([group]).splitlines()
    assert "| chunked | - | 40.0 | 32.0 | 1.0 | 4.0 | 3.0 | 0 |" in lines
    assert not [line for line in lines if line.startswith("| none | - | -")], "nobody looked there"
    named = "compute 30.0 / 28.0 / 24.0, FSDP2 reduce-scatter 10.0 / 9.0 / 9.0"
    (said,) = [line for line in lines if line.startswith("- chunked: GiB by pool")]
    assert said.endswith(f": {named}"), "what a small pool has is in the machine formats"
    found = json.loads(to_json([group], []))["groups"][0]["rows"]
    assert [one["pools_spare_bytes"] for one in found] == [None, 3 * GIB + (1 << 20)]
    assert [one["alloc_retries"] for one in found] == [None, 0]


def test_a_row_whose_allocator_ran_out_says_so() -> None:
    group = only([record(spec()), record(spec("chunked"), peak={"alloc_retries": 3})])
    assert [note for note in group.notes if "out of memory" in note and note.startswith("chunked: 3 times")]
    assert not [note for note in only([record(spec(), peak={"alloc_retries": 0})]).notes if "out of memory" in note]


PHASES = {"forward": 0.5, "backward": 1.4, "clip": 0.02, "step": 0.03}
LINK = {"in_bytes_per_s": 50.0 * GIB, "out_bytes_per_s": 50.0 * GIB, "both_bytes_per_s": 80.0 * GIB}
STATE_S = 30_532_208_640 / (50 * GIB)
"""A rank's state of the big model, one way."""


def test_a_row_is_set_against_its_own_schedules_ideal() -> None:
    none = record(spec(), 2.0, phases_s=PHASES)
    main, chunked = (record(spec(arm), 3.4, link=LINK) for arm in ("main", "chunked"))
    group = only([none, main, chunked])
    assert row(group, "none").ideal_s == pytest.approx(1.95)
    assert row(group, "none").gap_s == pytest.approx(0.05)
    assert row(group, "main").ideal_s == pytest.approx(1.95 + 2 * STATE_S)
    assert row(group, "main").gap_s == pytest.approx(1.45 - 2 * STATE_S)
    assert 1.92 + 2 * STATE_S * 50 / 80 < (row(group, "chunked").ideal_s or 0) < 1.95 + 2 * STATE_S
    line = dict(zip(headers(group), cells(group)[1], strict=True))
    assert (line["ideal s"], line["gap s"]) == ("3.087", "0.313")
    found = figures(row(group, "main"))
    assert (found["ideal_s"], found["gap_s"]) == pytest.approx((1.95 + 2 * STATE_S, 1.45 - 2 * STATE_S))
    assert "| ideal s | gap s |" in to_markdown([group])
    shown = next(line for line in csv.DictReader(io.StringIO(to_csv([group]))) if line["arm"] == "main")
    assert float(shown["gap_s"]) == pytest.approx(found["gap_s"])


def test_an_ideal_that_cannot_be_computed_is_missing() -> None:
    none, main = record(spec(), 2.0, phases_s=PHASES), record(spec("main"), 3.4, link=LINK)
    assert row(only([main]), "main").ideal_s is None, "nobody says how long it computes"
    unknown = only([none, main, record(spec("main"), 3.5, 2)])
    assert (row(unknown, "main").ideal_s, row(unknown, "main").gap_s) == (None, None), "a launch without rates"
    idle = record(spec(), 2.0, phases_s=dict.fromkeys(PHASES, 0.0))
    assert [found.ideal_s for found in only([idle, main]).rows] == [None, None]
    published = only(list(seed.published(seed.TABLE_A)))
    assert {found.gap_s for found in published.rows} == {None}
    for groups, is_shown in (([published], False), ([only([none, main])], True)):
        for width in (80, 200):
            out = io.StringIO()
            to_table(groups, Console(file=out, width=width))
            assert ("ideal" in out.getvalue()) == ("gap" in out.getvalue()) == is_shown


def test_a_row_without_an_ideal_says_why() -> None:
    none, main = record(spec(), 2.0, phases_s=PHASES), record(spec("main"), 3.4)
    assert "- no ideal for main: its launch has no probed link rates\n" in to_markdown([only([none, main])])
    own = [one.model_copy(update={"job": {"model": "mine"}}) for one in (none, main)]
    shown = to_markdown([only(own)])
    assert f"- no ideal for main: {NO_SCHEDULE}\n" in shown
    assert "no ideal for none" not in shown
    assert "no ideal" not in to_markdown([only(list(seed.published(seed.TABLE_A)))])


def test_none_of_another_window_or_the_native_link_says_how_long_a_row_computes() -> None:
    none, main = record(spec(), 2.0, phases_s=PHASES), record(spec("main"), 3.4, link=LINK)
    for update, x_none in (
        ({"window": main.spec.window.model_copy(update={"warmup": 9})}, None),
        ({"mode": main.spec.mode.model_copy(update={"emulate_link": 30e9})}, 1.7),
    ):
        other = main.model_copy(update={"spec": main.spec.model_copy(update=update)})
        found = [group.rows for group in compare([none, other])]
        assert [len(rows) for rows in found] == [1, 1], "another table"
        assert (found[1][0].ideal_s, found[1][0].x_none) == (pytest.approx(1.95 + 2 * STATE_S), x_none)


def test_several_launches_have_the_median_of_their_ideals() -> None:
    none = record(spec(), 2.0, phases_s=PHASES)
    launches = [
        record(spec("main"), 3.4, i, link={name: share * rate for name, rate in LINK.items()})
        for i, share in enumerate((1.0, 0.5, 0.8), start=1)
    ]
    found = row(only([none, *launches]), "main")
    assert found.ideal_s == pytest.approx(1.95 + 2 * STATE_S / 0.8)
    assert found.gap_s == pytest.approx(1.45 - 2 * STATE_S / 0.8)


def test_exposed_time_over_the_floor() -> None:
    launches = [record(spec("main"), 2.75, i, floor={"seconds": seconds}) for i, seconds in enumerate((0.4, 0.5), 1)]
    group = only([record(spec()), *launches, record(spec("overlap"), 2.5)])
    main, overlap, none = (
        dict(zip(headers(group), line, strict=True)) for line in (cells(group)[i] for i in (1, 2, 0))
    )
    assert [main[name] for name in ("exposed s", "floor s", "x floor")] == ["0.750", "0.500", "1.50"], (
        "the worst launch"
    )
    assert (overlap["floor s"], overlap["x floor"]) == ("-", "-"), "a floor that is not known is no zero"
    assert (none["floor s"], none["x floor"]) == ("-", "-")
    assert (figures(row(group, "main"))["floor_s"], figures(row(group, "main"))["x_floor"]) == (0.5, 1.5)


def traced(step_s: float, launch_s: float, unexplained_s: float = 0.0, kernels: str = "aa") -> dict[str, Any]:
    moved = 0.4 if step_s > 4.4 else 0.0
    parts = {"step_s": step_s, "launch_s": launch_s, "unexplained_s": unexplained_s, "move_in_s": moved}
    return {"total": {**parts, "compute_s": step_s - launch_s - unexplained_s}, "kernels_digest": kernels}


def test_traced_steps_are_set_against_those_of_none_by_cause() -> None:
    base = record(spec(), 2.0, split=traced(2.2, 0.3), phases_s=PHASES)
    launches = [
        record(spec("main"), 4.0, i, split=traced(s, 0.5), link=LINK) for i, s in enumerate((4.6, 4.4, 4.5), start=1)
    ]
    group = only([base, *launches])
    assert row(group, "none").gap is None
    found = figures(row(group, "main"))
    assert (found["traced_step_s"], found["traced_exposed_s"]) == pytest.approx((4.5, 2.3)), "the middle launch"
    # The ideal of main waits for all state one way and back; what is beyond that is the gap.
    assert (found["ideal_exposed_s"], found["traced_gap_s"]) == pytest.approx((2 * STATE_S, 2.3 - 2 * STATE_S))
    assert (found["gap_launch_s"], found["gap_compute_s"]) == pytest.approx((0.2, 2.1))
    assert found["gap_move_in_s"] == pytest.approx(0.4 - STATE_S), "less than in the ideal"
    assert found["gap_slot_s"] is None, "nobody measured it"
    shown = to_markdown([group])
    causes = "-0.169 | - | - | - | - | - | 0.200 | 2.100 | - | - | - | 0.000 | 0.00"
    assert f"| main | - | 4.500 | 2.300 | 1.137 | 1.163 | {causes} |" in shown
    assert "- last table: steps under the profiler" in shown
    assert "other kernels" not in shown
    told = json.loads(to_json([group], []))["groups"][0]["rows"][1]
    assert told["gap"]["launch_s"] == told["above_none"]["total"]["launch_s"] == pytest.approx(0.2)
    with io.StringIO() as out:
        to_table([group], Console(file=out, width=40))
        assert re.search(r"launch s +0\.200 *\n", out.getvalue())


def test_what_a_trace_does_not_explain_is_pointed_out() -> None:
    group = only(
        [
            record(spec(), 2.0, split=traced(2.0, 0.3), phases_s=PHASES),
            record(spec("main"), 4.0, split=traced(4.0, 0.5, 0.1, "bb"), link=LINK),
        ]
    )
    assert "- main: 2.5% of the traced step has no known cause" in to_markdown([group])
    assert "- main: other kernels than those of none ran on the compute stream; slowed holds them too" in to_markdown(
        [group]
    )


@pytest.mark.parametrize("base", [None, record(spec(), 2.0)])
def test_without_a_trace_of_both_no_cause_is_told(base: RunRecord | None) -> None:
    group = only([*([base] if base else []), record(spec("main"), 4.0, split=traced(4.4, 0.5))])
    assert "last table" not in to_markdown([group])
    assert figures(row(group, "main"))["gap_launch_s"] is None


def placed(*ranks: tuple[int | None, ...]) -> list[dict[str, Any]]:
    names = ("local_bytes", "same_socket_bytes", "remote_bytes", "unknown_bytes")
    return [{"rank": i, **dict(zip(names, rank, strict=True))} for i, rank in enumerate(ranks)]


NEAR, SAME, FAR, LOST = (100, 0, 0, 0), (0, 100, 0, 0), (50, 0, 50, 0), (0, 0, 0, 100)


@pytest.mark.parametrize(
    ("launches", "shown"),
    [
        ([placed(NEAR, NEAR)], "0/2"),
        ([placed(NEAR, FAR)], "1/2"),
        ([placed(NEAR, SAME)], "0/2"),
        ([placed(NEAR, NEAR), placed(FAR, FAR)], "2/2"),
        ([placed(NEAR, (1000, 0, 9, 0))], "0/2"),
        ([placed(NEAR, LOST)], "-"),
        ([placed((0, 0, 50, 50), NEAR)], "1/2"),
        ([placed(NEAR, (None,) * 4)], "-"),
        ([placed(NEAR, NEAR), []], "-"),
        ([[]], "-"),
    ],
    ids=[
        *("none", "one", "another node of its socket is not remote", "the worst launch", "below 1 %", "unknown"),
        *("half known to be remote", "nothing pinned", "a launch that did not look", "an older record"),
    ],
)
def test_ranks_with_memory_on_another_socket_are_counted(launches: list[list[dict[str, Any]]], shown: str) -> None:
    group = only([record(spec("main"), launch=i, ranks=ranks) for i, ranks in enumerate(launches, 1)])
    line = dict(zip(headers(group), cells(group)[0], strict=True))
    assert line["ranks remote"] == shown
    found = figures(group.rows[0])
    assert (found["ranks_remote"] is None) == (shown == "-")
    out = io.StringIO()
    to_table([group], Console(file=out, width=200))
    assert ("remote" in out.getvalue()) == (shown != "-"), "a terminal has no room for a column without a figure"


def test_a_whole_run_peak_is_marked() -> None:
    text = to_markdown(compare(seed.published(seed.TABLE_A)))
    assert "| none | - | 57800 | 2.260 | 1.00 | 0.000 | - | - | - | - | 81.3* | - | - | - | 41.0 | 1 | ok |" in text
    assert "- * over the whole run, first step included" in text


def test_a_terminal_table_fits_a_usual_width() -> None:
    out = io.StringIO()
    to_table(compare(seed.published(seed.TABLE_A)), Console(file=out, width=100))
    assert max(map(len, out.getvalue().splitlines())) <= 110
    assert "57800" in out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_terminal_table_never_cuts_a_number(width: int) -> None:
    out = io.StringIO()
    launches = [record(spec(), s, i, host={"rss_bytes": 30 * GIB}) for i, s in enumerate((1.951, 1.956), start=1)]
    measured = compare([*launches, record(spec("overlap", activation_offload=True), None)])
    to_table([*measured, *compare(seed.published(seed.TABLE_A))], Console(file=out, width=width))
    text = out.getvalue()
    assert width < 80 or max(map(len, text.splitlines())) <= width
    words = set(text.split())
    assert {"67096", "(67010-67182)", "(1.951-1.956)", "57800", "2.260", "81.3*", "30.0"} <= words
    assert {"overlap", "activation", "offload", "oom"} <= words
    assert {"tok/s", "none", "exposed", "steady", "pinned", "RSS", "status"} <= words


def test_csv_lines_of_unlike_groups_differ_in_more_than_their_number() -> None:
    groups = compare([record(spec()), record(spec(routing="natural")), record(spec(adamw="foreach", max_norm=None))])
    first, second, third = csv.DictReader(io.StringIO(to_csv(groups)))
    assert (first["routing"], second["routing"]) == ("balanced", "natural")
    assert (third["adamw"], third["max_norm"], third["warmup"], third["steps"]) == ("foreach", "", "5", "15")


def test_machine_formats_name_units_and_keep_nulls() -> None:
    groups = compare([record(spec()), record(spec("main"), None)])
    body = json.loads(to_json(groups, ["x:1: torn"]))
    assert body["problems"] == ["x:1: torn"]
    none, main = body["groups"][0]["rows"]
    assert (none["step_s"], none["tok_per_s"], none["x_none"]) == (2.0, 65536.0, 1.0)
    assert main["step_s"] is None
    lines = list(csv.DictReader(io.StringIO(to_csv(groups))))
    assert [line["step_s"] for line in lines] == ["2.0", ""]
    assert lines[0]["gpu"] == "NVIDIA H200"
    assert {"steady_peak_allocated_bytes", "exposed_s", "tok_per_s_min"} <= set(lines[0])


def test_machine_formats_hold_every_option_of_an_arm() -> None:
    of = chosen("overlap", fsdp_copies="kernel", readbacks="kernel", lead=3, ahead=0)
    groups = compare([record(spec("main")), record(of)])
    for rows in (json.loads(to_json(groups, []))["groups"][0]["rows"], csv.DictReader(io.StringIO(to_csv(groups)))):
        main, overlap = ([str(found[key]) for key in ("fsdp_copies", "readbacks", "lead", "ahead")] for found in rows)
        assert overlap == ["kernel", "kernel", "3", "0"]
        assert main in (["stock", "copy", "None", "None"], ["stock", "copy", "", ""])
    named = {"name": "arm", "state_budget": "state_budget_bytes"}
    assert {named.get(field, field) for field in type(of.arm).model_fields} <= set(figures(groups[0].rows[0]))


def test_a_row_says_what_an_automatic_budget_came_to() -> None:
    of = chosen("stream", state_budget="auto")
    launches = [record(of, launch=n, state_budget_bytes=nbytes) for n, nbytes in ((1, 3 * GIB), (2, 4 * GIB))]
    (row,) = compare(launches)[0].rows
    assert "state budget auto = 3.0 to 4.0 GiB" in row.axes
    found = figures(row)
    assert (found["state_budget_bytes_min"], found["state_budget_bytes"]) == (3 * GIB, 4 * GIB)
    (failed,) = compare([record(of, status="oom")])[0].rows
    assert figures(failed)["state_budget_bytes"] is None


def test_report_reads_files_and_warns_about_torn_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(record(spec()).model_dump_json() + '\n{"torn')
    report([path, *sorted(RESULTS.glob("seed-*.jsonl"))])
    captured = capsys.readouterr()
    assert captured.out.count("| arm | axes |") == 2  # not a terminal: Markdown
    assert captured.err.startswith(f"warning: skipped {path}:2: ")
    report([path], "json")
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1


@pytest.mark.parametrize("path", sorted(RESULTS.glob("h200-*.jsonl")), ids=lambda path: path.stem)
def test_the_tables_we_ship_are_those_of_their_records(path: Path) -> None:
    shown = to_markdown(compare(read_records([path]).records))
    assert path.with_suffix(".md").read_text() == shown, f"offbench report {path.name} --format md, again"


def test_report_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    empty = tmp_path / "r.jsonl"
    empty.touch()
    with pytest.raises(UsageError, match="no records in"):
        report([empty])
    with pytest.raises(UsageError, match="--format yaml: choose table, md, csv or json"):
        report([empty], "yaml")


def test_a_verdict_says_the_cost_and_what_to_try() -> None:
    peak = {"steady_allocated_bytes": 36 * GIB}
    floor = {"seconds": 0.63, "bound_by": "gpu_link duplex"}
    lines = verdicts(
        [
            record(spec(), 2.0, peak=peak),
            record(spec("main"), None, reason="rank 0: OutOfMemoryError: full."),
            record(spec("chunked"), 3.0, peak=peak, floor=floor),
            record(spec("overlap"), 2.5, peak=peak),
        ]
    )
    assert lines == [
        "none: ok, 2 s a step, peak 36.0 GiB. The baseline.",
        "main: oom: rank 0: OutOfMemoryError: full. Try fewer --layers or a shorter --seq-len, or --arm chunked, "
        "which holds less state.",
        "chunked: ok, 3 s a step, x none 1.50, exposed 1.000 s, floor 0.63 s (gpu_link duplex), peak 36.0 GiB. "
        "Try --arm overlap: it hides copies behind the next forward.",
        "overlap: ok, 2.5 s a step, x none 1.25, exposed 0.500 s, peak 36.0 GiB. "
        "Try --fsdp-copies kernel --readbacks kernel.",
    ]


def test_the_reason_of_a_failed_arm_is_said_whatever_numa_did() -> None:
    reason = "finite: loss is nan in step 2 (warm-up counted) on rank 0"
    failed = record(spec("overlap", numa=True), None, status="invalid", reason=reason)
    done = failed.model_copy(update={"host": failed.host.model_copy(update={"numa": "not applicable: one node"})})
    for one, name in ((failed, "overlap (numa)"), (done, "overlap (numa not applicable)")):
        assert verdicts([one]) == [f"{name}: invalid: {reason}. Its figures do not count; see the record's checks."]


def chosen(arm: str, device: str = "cuda", **options: Any) -> RunSpec:
    of = spec(arm).model_copy(update={"arm": arms.ARMS[arm].resolve(**options)})
    return of.model_copy(update={"mode": of.mode.model_copy(update={"device": device})})


@pytest.mark.parametrize(
    ("of", "advice"),
    [
        (chosen("overlap"), "Try --fsdp-copies kernel --readbacks kernel."),
        (chosen("overlap", fsdp_copies="kernel"), "Try --readbacks kernel."),
        (chosen("overlap", fsdp_copies="kernel", readbacks="kernel"), "Try --slots 8."),
        (chosen("overlap", device="cpu"), "Try --slots 8."),
        (chosen("stream"), "Try --fsdp-copies kernel --readbacks kernel."),
        (chosen("stream", fsdp_copies="kernel", readbacks="kernel"), "Try a larger --state-budget."),
        (chosen("stream", device="cpu"), "Try a larger --state-budget."),
    ],
)
def test_small_copies_get_out_of_the_way_before_more_memory_is_spent(of: RunSpec, advice: str) -> None:
    base = chosen("none", of.mode.device)
    assert verdicts([record(base), record(of, 2.5)])[1].endswith(" " + advice)


@pytest.mark.parametrize(
    ("device", "copies", "advice"),
    [
        ("cuda", "copy", "Try --activation-copies kernel: block inputs wait for state on the copy engines."),
        ("cuda", "kernel", "Try a larger --state-budget."),
        ("cpu", "copy", "Try a larger --state-budget."),
    ],
)
def test_activations_get_out_of_the_way_before_more_memory_is_spent(device: str, copies: str, advice: str) -> None:
    ways = {"fsdp_copies": "kernel", "readbacks": "kernel", "activation_copies": copies}
    both = [chosen(arm, device, **ways) for arm in ("none", "stream")]
    none, stream = (
        of.model_copy(update={"workload": of.workload.model_copy(update={"activation_offload": True})}) for of in both
    )
    assert verdicts([record(none), record(stream, 2.5)])[1].endswith(". " + advice)


@pytest.mark.parametrize(
    ("records", "nodes", "advice"),
    [
        ([record(spec("overlap"), 2.0)], 1, "Add --arm none to see what it costs."),
        (
            [record(spec("overlap"), 2.02), record(spec())],
            1,
            "1.0% of a step is left to gain; fewer --slots would hold less memory.",
        ),
        (
            [record(spec("overlap"), 2.8), record(spec(), 2.0), record(spec(), 3.0, launch=2)],
            1,
            "That is less than launches of one arm differ by; repeat both with more --launches.",
        ),
        ([record(spec("main"), 2.0), record(spec())], 1, "Nothing is exposed; --arm chunked would hold less memory."),
        (
            [record(spec("overlap"), 1.5), record(spec())],
            1,
            "Faster than none: noise, or none is short of memory; repeat both with --launches 3.",
        ),
        ([record(spec("overlap"), 2.5), record(spec())], 2, "Try --numa."),
        (
            [record(spec("overlap"), 2.008), record(spec())],
            1,
            "Nothing is exposed; fewer --slots would hold less memory.",
        ),
        (
            [record(spec("zerocopy"), 2.02), record(spec())],
            1,
            "1.0% of a step is left to gain, and nothing is staged.",
        ),
        ([record(spec("zerocopy"), 2.0), record(spec())], 1, "Nothing is exposed, and nothing is staged."),
        (
            [record(spec("zerocopy"), 2.5), record(spec())],
            1,
            "Try a larger --state-budget, or --arm stream.",
        ),
        (
            [record(spec("main"), 2.5), record(spec())],
            2,
            "Try --arm chunked: both directions at once, and less memory.",
        ),
        ([record(spec("chunked"), None, status="skipped")], 1, "Try fewer --layers or a shorter --seq-len."),
        ([record(spec(), None, status="timeout")], 1, "Read the stacks in the record, or allow more with --timeout."),
        ([record(spec(), None, status="crash")], 1, "Read the logs in the run's folder."),
        ([record(spec(), None, status="interrupted")], 1, "Run it again with --resume."),
        ([record(spec(), 2.0, status="invalid")], 1, "Its figures do not count; see the record's checks."),
    ],
)
def test_what_to_try_next(records: list[RunRecord], nodes: int, advice: str) -> None:
    assert verdicts(records, nodes)[0].endswith(advice)
