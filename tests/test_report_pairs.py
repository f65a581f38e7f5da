"""What a report says of rows that were launched in pairs with `none`: intervals, conditions, losses, a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from offbench.baseline import NATIVE
from offbench.compare import compare
from offbench.condition_table import HOST_AHEAD, READ, READ_AHEAD
from offbench.config import GIB, RunSpec, Window
from offbench.errors import UsageError
from offbench.record import RunRecord
from offbench.render import figures, to_markdown
from offbench.report import report
from offbench.report_plot import figure
from offbench.results_file import ResultsFile, read_records
from tests.test_report import ENV, RESULTS, only, record, row, spec

STEPS = {"none": (2.0, 2.1, 1.9), "main": (3.0, 3.36, 2.66)}
"""Ratios 1.5, 1.6 and 1.4: their mean is 1.5, and half the interval 4.303 x 0.1 / sqrt(3) = 0.248."""


def launches(**fields: Any) -> list[RunRecord]:
    """Three rounds, all of `none` first: pairs are found by number, not by place."""
    return [record(spec(arm), s, i, **fields) for arm, steps in STEPS.items() for i, s in enumerate(steps, 1)]


def test_pairs_of_launches_have_an_interval_from_three_on() -> None:
    group = only(launches())
    main = row(group, "main")
    assert main.pairs == 3
    assert main.x_none_interval == (pytest.approx(1.2516, abs=1e-4), pytest.approx(1.7484, abs=1e-4))
    assert row(group, "none").x_none_interval is None
    assert (figures(main)["x_none_low"], figures(main)["pairs"]) == (pytest.approx(1.2516, abs=1e-4), 3)
    text = to_markdown([group])
    assert "| 1.500 (1.252-1.748) |" in text
    assert "95 % interval of the mean of 3 pairs with a launch of none each" in text
    fewer = only([r for r in launches() if (r.spec.arm.name, r.launch) != ("none", 2)])
    assert (row(fewer, "main").pairs, row(fewer, "main").x_none_interval) == (2, None)
    assert "interval" not in to_markdown([fewer])


def test_launches_on_different_gpus_are_no_pair() -> None:
    """Of a table begun on one machine and ended on another only rounds that ran whole on one of them count."""
    first, second = ENV | {"gpu_id": "a" * 16}, ENV | {"gpu_id": "b" * 16}
    none = [record(spec(), s, i, env=second if i == 4 else first) for i, s in enumerate((2.0, 2.0, 2.0, 2.5), 1)]
    main = [record(spec("main"), s, i, env=first) for i, s in enumerate((3.0, 3.36, 2.66, 2.0), 1)]
    found = row(only([*none, *main]), "main")
    assert found.pairs == 3
    assert found.x_none_interval == pytest.approx((1.504 - 0.435, 1.504 + 0.435), abs=0.003)


def test_equal_numbers_of_two_files_make_pairs_in_their_order() -> None:
    one = [record(spec(arm), s, 1) for arm, s in (("none", 2.0), ("main", 3.0))]
    other = [record(spec(arm), s, 1) for arm, s in (("none", 4.0), ("main", 6.0))]
    third = [record(spec(arm), s, 1) for arm, s in (("none", 1.0), ("main", 1.5))]
    found = row(only([*one, *other, *third]), "main")
    assert (found.pairs, found.x_none_interval) == (3, (pytest.approx(1.5), pytest.approx(1.5)))
    assert found.step_s
    assert (found.step_s.n, found.step_s.median) == (3, 3.0)


def test_a_number_that_one_row_has_more_often_makes_no_pair() -> None:
    """The first machine's `none` ran out of memory: its `main` must not be set against the second machine's."""
    first = [record(spec(), None, 1), record(spec("main"), 9.0, 1)]
    rest = [record(spec(arm), s, i) for i in (1, 2, 3, 4) for arm, s in (("none", 2.0), ("main", 3.0))]
    found = row(only([*first, *rest]), "main")
    assert (found.pairs, found.x_none_interval) == (3, (1.5, 1.5))
    found = row(only([*rest, record(spec(), 9.0, 2)]), "main")
    assert (found.pairs, found.x_none_interval) == (3, (1.5, 1.5))


def test_how_much_the_native_none_differs_counts_as_noise() -> None:
    native = [record(spec(), s, i) for i, s in enumerate((2.0, 3.0), 1)]
    slow = [record(emulated(spec("main")), 2.6, i) for i in (1, 2)]
    *_, group = compare([*native, *slow])
    assert group.noise == pytest.approx(0.4)
    assert row(group, "main").same


def emulated(of: RunSpec, steps: int = 15) -> RunSpec:
    mode = of.mode.model_copy(update={"emulate_link": 38.8 * GIB})
    return of.model_copy(update={"mode": mode, "window": Window(steps=steps)})


def test_without_a_none_of_its_own_an_emulated_link_has_the_native_one() -> None:
    def steps(loss: float) -> list[dict[str, float]]:
        return [{"step_s": 2.0, "loss": loss}]

    native = [record(spec(), s, i, steps=steps(12.5)) for i, s in enumerate((2.0, 2.1, 1.9), 1)]
    slow = [record(emulated(spec("main")), s, i, steps=steps(12.5)) for i, s in enumerate((3.0, 3.36, 2.66), 1)]
    _, group = compare([*native, *slow])
    main = row(group, "main")
    assert (main.x_none, main.exposed_s, main.pairs) == (1.5, 1.0, 3)
    assert main.x_none_interval == (pytest.approx(1.2516, abs=1e-4), pytest.approx(1.7484, abs=1e-4))
    assert main.loss_apart == 0
    assert group.notes == [NATIVE]
    assert [r.arm for r in group.rows] == ["main"], "what it is set against stays in its own table"
    assert f"- note: {NATIVE}\n" in to_markdown([group])
    *_, worse = compare([*native, record(emulated(spec("main")), 3.0, steps=steps(12.6))])
    assert any("does not train the same" in note for note in worse.notes)


def test_the_native_none_stands_in_only_where_a_row_has_none_of_its_own() -> None:
    """With each activation setting for itself; one that failed is none."""
    native = [record(spec(), 2.0), record(spec(activation_offload=True), 2.5)]
    slow = [record(emulated(spec("main", activation_offload=offload)), 4.0) for offload in (False, True)]
    own = record(emulated(spec()), 3.2)
    *_, group = compare([*native, *slow, own])
    ratios = {r.activation_offload: r.x_none for r in group.rows if r.arm == "main"}
    assert ratios == {False: 1.25, True: 1.6}
    assert group.notes == [NATIVE]
    *_, group = compare([*native, slow[0], own])
    assert (row(group, "main").x_none, group.notes) == (1.25, [])
    *_, group = compare([*native, *slow, record(emulated(spec()), None)])
    assert [r.x_none for r in group.rows if r.arm == "main"] == [2.0, 1.6]


def test_the_native_none_stands_in_for_no_other_than_its_own_kind() -> None:
    slow = record(emulated(spec("main")), 3.0)
    own = record(emulated(spec()), 2.5)
    assert row(compare([record(spec(), 2.0), slow, own])[1], "main").x_none == 3.0 / 2.5
    strangers = [
        record(spec(), 2.0, env=ENV | {"torch": "2.11.0"}),
        record(spec(seq_len=64), 2.0),
        record(spec(), None),
        record(spec().model_copy(update={"window": Window(steps=3)}), 2.0),
        record(spec(activation_offload=True), 2.0),
    ]
    for other in strangers:
        found = next(group for group in compare([other, slow]) if group.rows[-1].arm == "main")
        assert (row(found, "main").x_none, found.notes) == (None, []), other.spec
    faster = record(spec().model_copy(update={"mode": slow.spec.mode.model_copy(update={"emulate_link": 5e10})}), 2.0)
    assert row(compare([faster, slow])[1], "main").x_none is None
    wanted = record(emulated(spec("main")), None)
    group = compare([record(spec(), 2.0), wanted])[1]
    assert (row(group, "main").x_none, group.notes) == (None, [])


def test_the_condition_of_the_gpu_and_losses_stand_below() -> None:
    def steps(by: float) -> list[dict[str, float]]:
        return [{"step_s": 2.0, "loss": loss + by} for loss in (12.5, 12.25)]

    warm = ENV | {"gpu_sm_mhz": 1650, "gpu_sm_max_mhz": 1980, "gpu_power_w": 695.7, "gpu_power_limit_w": 700.0}
    hot = warm | {"gpu_sm_mhz": 1710, "gpu_temperature_c": 61, "gpu_throttle_reasons": ["power cap"]}
    peak = {"steady_reserved_bytes": 41 * GIB, "device_used_bytes": 42 * GIB}
    group = only([
        record(spec(), 2.0, 1, env=warm, steps=steps(0.0), peak=peak),
        record(spec(), 2.0, 2, env=hot, steps=steps(0.001)),
        record(spec("main"), 3.0, 1, env=warm, steps=steps(0.003)),
    ])  # fmt: skip
    text = to_markdown([group])
    assert "| none | - | 41.0 | 42.0 | 1650-1710 | 1980 | 696 | 700 | 61 | power cap | 12.25000-12.25100 | - |" in text
    assert "| main | - | - | - | 1650 | 1980 | 696 | 700 | - | - | 12.25300 | 3.0e-03 |" in text
    assert READ in text
    found = figures(row(group, "none"))
    assert (found["gpu_sm_mhz_min"], found["gpu_sm_mhz_max"], found["gpu_throttled_by"]) == (1650, 1710, "power cap")
    assert figures(row(group, "main"))["loss_apart_rms"] == pytest.approx(0.003)
    assert READ not in to_markdown([only(launches())]), "nobody read a GPU"


def test_how_far_the_host_is_ahead_has_a_column_where_a_row_knows() -> None:
    """Of each launch the block with the least, the first one aside; from the least launch to the most."""
    warm = ENV | {"gpu_sm_mhz": 1650}
    leads = ([0.0, 0.02, 0.0104], [0.0, 0.0123, 0.5])
    known = [record(spec("main"), 3.0, i, env=warm, host_lead={"lead_s": one}) for i, one in enumerate(leads, 1)]
    group = only([record(spec(), 2.0, env=warm), *known])
    text = to_markdown([group])
    assert f"| {HOST_AHEAD} |" in text
    assert f"- {READ_AHEAD}\n" in text
    lines = [line for line in text.splitlines() if "| 1650 |" in line]
    assert [line.split(" | ")[-1] for line in lines] == ["- |", "10.4-12.3 |"]
    found = figures(row(group, "main"))
    assert (found["host_ahead_least_s_min"], found["host_ahead_least_s_max"]) == (0.0104, 0.0123)
    assert figures(row(group, "none"))["host_ahead_least_s_min"] is None
    without = to_markdown([only([record(spec(), 2.0, env=warm)])])
    assert (READ in without, "host ahead" in without) == (True, False)


def test_a_figure_has_a_dot_a_row_and_a_line_from_its_fastest_to_its_slowest_launch() -> None:
    group = only(launches(peak={"steady_allocated_bytes": 36 * GIB}))
    text = figure(group)
    assert text is not None
    words = ["".join(found.itertext()) for found in ElementTree.fromstring(text).iter() if found.tag.endswith("text")]
    assert {"none", "main", "s a step"} <= set(words)
    assert text.count("<circle") == 2 * 3
    assert figure(only(launches())) is None, "no memory was counted"


def test_figures_are_written_where_there_is_something_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "plots"
    for one in launches(peak={"steady_allocated_bytes": 36 * GIB}):
        ResultsFile(path).append(one)
    report([path], "md", str(out))
    assert capsys.readouterr().err == f"plot: {out / 'step-memory-1.svg'}\n"
    assert (out / "step-memory-1.svg").read_text() == figure(compare(read_records([path]).records)[0])
    for wrong, says in (("", "--plot is empty"), (str(path), "cannot write figures to")):
        with pytest.raises(UsageError, match=says):
            report([path], "md", wrong)
    bare = tmp_path / "bare.jsonl"
    ResultsFile(bare).append(record(spec()))
    with pytest.raises(UsageError, match="no table has two rows with a step time and a peak"):
        report([bare], "md", str(out))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.svg")), ids=lambda path: path.stem)
def test_the_figures_we_ship_are_those_of_their_records(path: Path) -> None:
    assert path.read_text() == figure(compare(read_records([path.with_suffix(".jsonl")]).records)[0])
