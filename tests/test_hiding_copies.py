"""The notes say what the records say: predicted, measured and unexplained of every arm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from offbench.compare import compare
from offbench.planner.ideal import policy_ideal
from offbench.planner.sources import compute_of_records, none_rows
from offbench.record import RunRecord
from offbench.results_file import read_records
from offbench.units import GIB

ROOT = Path(__file__).parent.parent
NOTES = (ROOT / "docs" / "hiding-copies.md").read_text()


def of(name: str) -> list[RunRecord]:
    return read_records([ROOT / "results" / f"h200-{name}.jsonl"]).records


RECORDS = of("stream-first")
NONE, *STREAM = RECORDS
SECOND, THIRD, OTHER, ALL = of("stream-second"), of("look-ahead-b"), of("look-ahead-a"), of("all-arms")
LAYERS, SIXTH, SEVENTH = of("stream-third"), of("stream-fourth"), of("stream-fifth")
ROWS = {
    "row | B GiB": (NONE, STREAM),
    "second version": (SECOND[0], SECOND[1:]),
    "third version": (THIRD[0], [r for r in THIRD if r.spec.arm.name == "stream"]),
}
ADAMW_BYTES = 8


def table(first_cell: str) -> list[list[str]]:
    """Cells of the notes' table whose header begins so, without the first column."""
    lines = NOTES[NOTES.index(f"| {first_cell} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]


def phases(record: RunRecord) -> list[float]:
    found = record.phases_s
    return [value for value in (found.forward, found.backward, found.clip, found.step) if value is not None]


def figures(record: RunRecord, base: RunRecord = NONE) -> list[float]:
    """B, r, needed, bound, step, x none, exposed, unexplained, peak, as the notes define them."""
    forward, _, clip, step = phases(base)
    held, rate, params = record.peak.state_at_backward_end_bytes, record.link.in_bytes_per_s, record.local_params
    peak, took, none = record.peak.steady_allocated_bytes, record.step_s, base.step_s
    assert held is not None
    assert rate
    assert params
    assert peak
    assert took
    assert none
    needed = (ADAMW_BYTES * params - held) / rate
    bound = max(0.0, needed - (forward + clip + step))
    exposed = took - none
    return [held / GIB, rate / GIB, needed, bound, took, took / none, exposed, exposed - bound, peak / GIB]


def same(written: str, found: float) -> bool:
    return abs(float(written) - found) <= 0.5001 * 10 ** -len(written.partition(".")[2])


@pytest.mark.parametrize(
    ("first_cell", "rows"),
    [
        (
            "fourth version",
            lambda: [(one(ALL, "none", link, **copies), one(ALL, "stream", link)) for link, copies in BOTH],
        ),
        ("fifth version", lambda: [(one(LAYERS, "none"), r) for r in LAYERS if r.spec.arm.name == "stream"]),
        ("sixth version", lambda: beside_none(SIXTH)),
        ("seventh version", lambda: beside_none(SEVENTH)),
    ],
)
def test_later_rows_of_stream(first_cell: str, rows: Callable[[], list[tuple[RunRecord, RunRecord]]]) -> None:
    for line, (base, record) in zip(table(first_cell), rows(), strict=True):
        for written, found in zip(line, figures(record, base), strict=True):
            assert same(written, found), (line, found)


def beside_none(records: list[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    """Every launch of stream with a budget in GiB, and the first `none` on its link."""
    chosen = [r for r in records if r.spec.arm.name == "stream" and r.spec.arm.state_budget != "auto"]
    return [(one(records, "none", bool(r.spec.mode.emulate_link)), r) for r in chosen]


def test_rows_of_stream_against_a_bound_and_ideals_that_know_the_loss() -> None:
    files = [RECORDS, SECOND, THIRD, ALL, LAYERS, SIXTH, SEVENTH]
    streams = [(r, file) for file in files for r in file if r.spec.arm.name == "stream" and none_rows(file, r)]
    left = []
    for line, (record, file) in zip(
        table("version, link"), ((r, f) for r, f in streams if r.spec.arm.state_budget != "auto"), strict=True
    ):
        nones = none_rows(file, record)
        copies = record.spec.arm.fsdp_copies
        base = next((r for r in nones if r.spec.arm.fsdp_copies == copies), nones[0])
        held, _, needed, bare, took, _, exposed, *_ = figures(record, base)
        forward, _, clip, step = phases(base)
        ideal = policy_ideal(record, nones)
        assert ideal
        assert base.step_s
        bound = max(0.0, needed - (forward + clip + step - compute_of_records(nones).loss))
        left.append(took - ideal.step_s)
        found = [held, took, exposed, bare, bound, ideal.step_s - base.step_s, left[-1]]
        assert all(map(same, line, found)), (line, found)
    assert sorted(left)[:2] == pytest.approx([-0.098, -0.007], abs=0.001)
    assert 0.004 < sorted(left)[2] < max(left) < 0.058


EIGHTH = [of("stream-sixth"), of("stream-seventh"), of("stream-eighth")]
NINTH = [of("stream-ninth"), of("stream-ninth-auto")]
TENTH = [of("stream-tenth")[:3]]
"""The last row there has no `none` of its machine."""
TWELFTH = [of("stream-twelfth")]


@pytest.mark.parametrize(
    ("name", "files"),
    [("eighth version", EIGHTH), ("ninth version", NINTH), ("tenth version", TENTH), ("twelfth version", TWELFTH)],
)
def test_rows_of_the_latest_versions(name: str, files: list[list[RunRecord]]) -> None:
    rows = [(r, file) for file in files for r in file if r.spec.arm.name == "stream" and r.status == "ok"]
    for line, (record, file) in zip(table(name), rows, strict=True):
        nones = [r for r in file if r.spec.arm.name == "none"]
        held, _, needed, _, took, *_, peak = figures(record, nones[0])
        forward, _, clip, step = phases(nones[0])
        compute, ideal = compute_of_records(nones), policy_ideal(record, nones)
        assert ideal
        bound = max(0.0, needed - (forward + clip + step - compute.loss))
        none, host = compute.total, record.phases_s.host_in_step
        assert host
        found = [held, took, took / none, took - none, bound, ideal.step_s - none, took - ideal.step_s]
        assert all(map(same, line, [*found, phases(record)[-1], host, peak])), (line, found)
    for record in (r for file in files for r in file if r.status == "invalid"):
        assert f"({record.step_s:.3f} s) is invalid" in " ".join(NOTES.split())


def test_what_is_said_of_the_ninth_version() -> None:
    prose, (linked, (none, auto)) = " ".join(NOTES.split()), NINTH
    above = [
        (r.step_s or 0.0) - ideal.step_s
        for r in linked
        if r.spec.arm.name == "overlap"
        and (ideal := policy_ideal(r, [n for n in linked if n.spec.arm.name == "none"]))
    ]
    assert "whose rows are {:.3f} and {:.3f} s from theirs".format(*above) in prose
    (forward, _, _, adamw), (longer, _, _, step) = phases(none), phases(auto)
    assert f"for {adamw - step:.3f} s less" in prose
    assert f"takes {longer - forward:.3f} s longer" in prose
    moving = 1 - (auto.state_budget_bytes or 0) / (ADAMW_BYTES * (auto.local_params or 1))
    assert f"{moving * adamw:.3f} s of which are the updates that moved there" in prose


def test_how_far_the_host_is_ahead_when_step_begins() -> None:
    rows = [r.phases_s for file in EIGHTH + NINTH for r in file if r.spec.arm.name == "stream" and r.status == "ok"]
    ahead = [(phases.host_in_step or 0.0) - (phases.step or 0.0) for phases in rows]
    assert f"in step() is {min(ahead):.3f} to {max(ahead):.3f} s more" in " ".join(NOTES.split())


def test_slots_of_overlap() -> None:
    none = one(SIXTH, "none").step_s
    assert none
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in NOTES.splitlines()]
    start = next(at for at, cells in enumerate(lines) if cells[0] == "slots")
    for cells, slots in zip(lines[start + 2 : start + 5], (2, 4, 8), strict=True):
        record = one(SIXTH, "overlap", slots=slots)
        took, peak = record.step_s, record.peak
        assert took
        assert peak.steady_allocated_bytes
        assert peak.steady_reserved_bytes
        found = [slots, took, took / none, peak.steady_allocated_bytes / GIB, peak.steady_reserved_bytes / GIB]
        assert all(map(same, cells, found)), (cells, found)


@pytest.mark.parametrize("first_cell", ROWS)
def test_rows_of_stream(first_cell: str) -> None:
    base, records = ROWS[first_cell]
    lines = table(first_cell)
    assert len(lines) == len(records)
    for line, record in zip(lines, records, strict=True):
        for written, found in zip(line, figures(record, base), strict=True):
            assert same(written, found), (line, found)


def one(records: list[RunRecord], arm: str, emulated: bool = False, **fields: object) -> RunRecord:
    """The first record of that arm and link whose arm and workload have these values."""
    for record in records:
        spec, said = record.spec, record.spec.arm.model_dump() | record.spec.workload.model_dump()
        if (spec.arm.name, bool(spec.mode.emulate_link)) == (arm, emulated) and fields.items() <= said.items():
            return record
    raise LookupError(arm)


STOCK: dict[str, object] = {"fsdp_copies": "stock", "readbacks": "copy"}
KERNEL: dict[str, object] = {"fsdp_copies": "kernel", "readbacks": "kernel"}
BOTH = ((False, KERNEL), (True, {}))
"""Which links, and which `none` of each."""
READ, UNREAD = ({"count_readback": read} for read in (True, False))


def test_rows_of_overlap_as_less_stands_in_its_way() -> None:
    pairs = [
        *((one(THIRD, "none", **read), one(THIRD, "overlap", **read)) for read in (READ, UNREAD)),
        (one(OTHER, "none", True), one(OTHER, "overlap", True)),
        *((one(ALL, "none", **KERNEL), one(ALL, "overlap", **copies)) for copies in (STOCK, KERNEL)),
        *((one(ALL, "none", True), one(ALL, "overlap", True, **copies)) for copies in (STOCK, KERNEL)),
    ]
    for line, (base, record) in zip(table("version | step s")[-len(pairs) :], pairs, strict=True):
        _, _, _, bound, took, x_none, exposed, *_ = figures(record, base)
        ideal = policy_ideal(record, [base])
        assert ideal
        assert base.step_s
        policy = ideal.step_s - base.step_s
        found = [took, base.step_s, x_none, bound, policy, exposed, exposed - policy]
        assert all(map(same, line, found)), (line, found)


INSIDE = [(arm, link) for link in (False, True) for arm in ("main", "chunked")]


def inside_step(arm: str, emulated: bool) -> list[float]:
    """Floor, copies, rate, step(), exposed, x none, least x none, forward and backward beyond those of none."""
    record, base = one(ALL, arm, emulated), one(ALL, "none", emulated, **(STOCK if emulated else KERNEL))
    (*passes, _, step), (*bare, _, adamw) = phases(record), phases(base)
    floor = record.floor.serial_seconds if arm == "main" else record.floor.seconds
    copies, took, none = record.moved.copy_busy_s, record.step_s, base.step_s
    assert floor
    assert copies
    assert took
    assert none
    nbytes = (record.moved.in_bytes_per_step or 0) + (record.moved.out_bytes_per_step or 0)
    least = (none + floor - (adamw if arm == "chunked" else 0)) / none
    return [floor, copies, nbytes / copies / GIB, step, took - none, took / none, least, sum(passes) - sum(bare)]


def test_main_and_chunked_are_as_slow_as_the_link() -> None:
    prose = " ".join(NOTES.split())
    for line, row in zip(table("arm, link"), INSIDE, strict=True):
        assert all(map(same, line, inside_step(*row))), (line, row)
    left: dict[str, list[float]] = {"main": [], "chunked": []}
    for arm, emulated in INSIDE:
        floor, copies, _, step, *_ = inside_step(arm, emulated)
        assert copies / floor == pytest.approx(1.025 if (arm, emulated) == ("chunked", True) else 1.004, abs=0.005)
        adamw = one(ALL, "none", emulated).phases_s.step if arm == "main" else 0.0
        left[arm].append(step - copies - (adamw or 0.0))
        assert arm == "main" or step <= 1.03 * copies
    words = "in chunked but for {:.3f} and {:.3f} s, in main but for AdamW and {:.3f} and {:.3f} s."
    assert words.format(*left["chunked"], *left["main"]) in prose
    both = [sum(phases(record)[:2]) for record in ALL if record.spec.arm.name == "none"]
    assert f"{len(both)} `none`".replace("4", "four") + f" of that file differ by as much: {min(both):.3f} to" in prose
    assert f"{max(both):.3f} s. (Of" in prose
    *_, late, worst = sorted(step.step_s or 0 for step in one(ALL, "chunked", True).steps)
    assert f"took {worst:.3f} s, the others 3.224 to {late:.3f}" in prose


def test_what_main_and_chunked_took_on_other_machines() -> None:
    prose, first = " ".join(NOTES.split()), compare(of("rehearsal-native"))[0].rows
    main, none = (next(row for row in first if row.arm == arm) for arm in ("main", "none"))
    chunked, base = one(THIRD, "chunked"), one(THIRD, "none")
    assert none.step_s
    copies = one(of("rehearsal-native"), "main").moved.copy_busy_s
    assert f"took {main.x_none:.2f} x a `none` of {none.step_s.median:.3f} s, with copies of {copies:.3f} s" in prose
    ratio = (chunked.step_s or 0) / (base.step_s or 1)
    assert f"{ratio:.2f} x one of {base.step_s:.3f} s, with copies of {chunked.moved.copy_busy_s:.3f} s" in prose
    probed = [(record.link.both_bytes_per_s or 0) / GIB for record in (chunked, one(ALL, "chunked"))]
    assert "probed at {:.1f} GiB/s both ways instead of {:.1f} (".format(*probed) in prose


def test_what_the_traces_say_of_overlap() -> None:
    prose = " ".join(NOTES.split())
    stock, emulated = (one(ALL, "overlap", link, **STOCK) for link in (False, True))
    kernel, none = (one(ALL, arm, **KERNEL) for arm in ("overlap", "none"))
    assert stock.split
    assert emulated.split
    assert kernel.split
    assert none.split
    at, late = stock.split.total, emulated.split.total
    window = [step.step_s for step in stock.steps if step.step_s]
    assert f"for {at.behind_bulk_s:.3f} s of a traced step of {at.step_s:.3f} s while" in prose
    assert f"steps of the window took {min(window):.3f} to {max(window):.3f} s" in prose
    assert (
        f"for {late.behind_bulk_s:.3f} s of {late.step_s:.3f} s, and for no more than {late.move_in_s:.3f} s" in prose
    )
    launch = (kernel.split.total.launch_s or 0) - (none.split.total.launch_s or 0)
    assert f"{launch:.3f} s more than in `none` compute has nothing queued" in prose
    for fixed in (kernel, one(ALL, "overlap", True, **KERNEL)):
        assert fixed.small_copies
        assert 0 < (fixed.small_copies.longest_wait_s or 0) < 0.8e-3


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
