"""The notes on reserved memory, long batches, offloaded activations and gradient accumulation say what records say."""

from __future__ import annotations

from offbench.config import ArmSpec
from offbench.record import Reserved, RunRecord
from offbench.units import GIB
from tests.test_hiding_copies import NOTES, ROOT, of, same, table

PROSE = " ".join(NOTES.split())
GUIDE = " ".join((ROOT / "docs" / "using-the-optimizer.md").read_text().split())
RESERVED, TRIMMED = of("reserved"), of("reserved-trimmed")
LONG, ACCUMULATED = of("long"), of("grad-accum")
ENGINE, KERNEL = of("activation-copies-engine"), of("activation-copies-kernel")


def pools(record: RunRecord) -> Reserved:
    assert record.reserved is not None
    return record.reserved


def gib(nbytes: int | None) -> float:
    assert nbytes is not None
    return nbytes / GIB


def step(record: RunRecord) -> float:
    assert record.step_s is not None
    return record.step_s


def told_apart(record: RunRecord) -> list[float]:
    found = pools(record)
    return [found.apart_bytes / GIB, found.spare_bytes / GIB]


def kept(record: RunRecord) -> str:
    return f"{gib(record.state.device_bytes):.1f} GiB kept"


def line_of(first: str, heading: str) -> list[str]:
    """Cells of the line of that table which begins with that cell."""
    rows = NOTES[NOTES.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    (found,) = [row for row in rows if row.startswith(f"| {first} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_where_reserved_memory_lies() -> None:
    names = [
        line.split("|")[1].strip() for line in NOTES[NOTES.index("| native, reserved memory |") :].splitlines()[2:9]
    ]
    records = [RESERVED[0], RESERVED[3], RESERVED[1], RESERVED[2], *TRIMMED]
    for name, cells, record in zip(names, table("native, reserved memory"), records, strict=True):
        arm: ArmSpec = record.spec.arm
        assert name.startswith(arm.name)
        assert ("gradient pool" in name) == (arm.gradient_pool == "compute")
        assert (f"memory limit {gib(arm.memory_limit):.1f} GiB" if arm.memory_limit else "") in name
        assert arm.name == "none" or kept(record) in name
        found = pools(record)
        figures = [step(record), gib(found.reserved_bytes), gib(found.allocated_bytes), *told_apart(record)]
        assert all(map(same, cells, figures)), (name, cells, figures)
        assert record.peak.alloc_retries == found.held_bytes == 0
    compute = next(pool for pool in pools(RESERVED[1]).pools if pool.stream == "compute")
    assert f"{gib(compute.most_bytes - compute.at_peak_bytes):.1f} GiB more than when all pools together have" in PROSE
    grown = [told_apart(RESERVED[at])[1] - told_apart(RESERVED[by])[1] for at, by in ((3, 0), (2, 1))]
    assert "grew by {:.1f} and {:.1f}:".format(*grown) in PROSE
    none, stream, limited = TRIMMED
    saved = gib(pools(RESERVED[1]).reserved_bytes - pools(stream).reserved_bytes)
    assert f"reserved {saved:.1f} GiB less, on another machine" in PROSE
    assert f"the step took {step(limited) - step(stream):.3f} s longer" in PROSE
    less = [gib(none.peak.steady_allocated_bytes) - gib(stream.peak.steady_allocated_bytes)]
    less += [gib(pools(none).reserved_bytes - pools(stream).reserved_bytes)]
    assert "with {:.1f} GiB less allocated than `none`, {:.1f} less are reserved".format(*less) in PROSE


def test_what_the_thirteenth_version_took() -> None:
    for records, none, stream in ((TRIMMED, *TRIMMED[:2]), (RESERVED, *RESERVED[:2])):
        assert none is not stream
        gap = step(stream) - (stream.policy_ideal_s or 0)
        assert f"{step(stream):.3f} s, {step(stream) / step(none):.3f} of its `none` and {gap:.3f} s" in PROSE, records
    rates = sorted(gib(int(record.link.both_bytes_per_s or 0)) for record in RESERVED)
    assert f"made {rates[0]:.0f} to {rates[-1]:.0f} GiB/s both ways" in PROSE
    assert RESERVED[1].host_lead
    assert max(RESERVED[1].host_lead.lead_s[1:]) < 1e-4, "late for every layer"


def test_activations_above_parameters_and_gradients() -> None:
    none, stream, chunked, pooled = LONG
    for cells, record in zip(
        table("native, 5 samples a step"), LONG_IN_ORDER := [none, stream, chunked, pooled], strict=True
    ):
        memory = [gib(record.peak.steady_allocated_bytes), gib(pools(record).reserved_bytes), *told_apart(record)]
        assert same(cells[0], step(record))
        assert all(map(same, cells[2:], memory)), (cells, memory)
    assert len(LONG_IN_ORDER) == 4
    for name, record in (("stream, {}", stream), ("stream, {}, gradient pool", pooled)):
        assert line_of(name.format(kept(record)), "native, 5 samples a step")
    for record in (stream, chunked):
        assert f"| {step(record):.3f} | {step(record) / step(none):.3f} |" in NOTES
    peaks = [gib(record.peak.steady_allocated_bytes) for record in (none, stream, chunked)]
    words = (
        f"{step(stream) - step(none):.3f} s, less than steps differ, with {peaks[0] - peaks[1]:.1f} GiB less allocated"
    )
    assert words in PROSE
    assert f"than `none` and {peaks[1] - peaks[2]:.1f} more than `chunked`" in PROSE
    held, own = gib(stream.peak.state_at_backward_end_bytes), gib(stream.state.device_bytes)
    assert f"{held:.1f} GiB of state is there when the backward ends: {held - own:.1f} moves in" in PROSE
    ends = [gib(pools(record).reserved_bytes) for record in (pooled, stream)]
    assert "{:.1f} GiB reserved instead of {:.1f}".format(*ends) in PROSE
    assert "it reserved {:.1f} GiB instead of {:.1f}".format(*ends) in GUIDE
    less = gib(stream.state.device_bytes) - gib(pooled.state.device_bytes)
    assert f"{less:.1f} of that less state kept" in PROSE
    in_window = gib(pooled.peak.steady_reserved_bytes)
    assert f"{in_window:.1f} in the window and {ends[0]:.1f} three steps later" in PROSE
    apart = [told_apart(record)[0] for record in (RESERVED[0], stream)]
    assert "{:.1f} GiB in one measured step, {:.1f} in one whose activations make the peak".format(*apart) in GUIDE
    first = [gib(pools(record).reserved_bytes) for record in (RESERVED[0], RESERVED[3])]
    assert f"{first[1]:.1f} instead of {first[0]:.1f} for `none`" in GUIDE


def test_activations_that_are_offloaded_too() -> None:
    for cells, record in zip(table("native, activation offload"), [*ENGINE, *KERNEL], strict=True):
        base = ENGINE[0] if record in ENGINE else KERNEL[0]
        memory = [gib(record.peak.steady_allocated_bytes), gib(record.peak.steady_reserved_bytes)]
        assert all(map(same, cells, [step(record), step(record) / step(base), *memory])), (cells, memory)
    slow, fast = step(ENGINE[1]) / step(ENGINE[0]), step(KERNEL[1]) / step(KERNEL[0])
    assert f"took {slow:.2f} times as long as `none` with the same copies, and {fast:.2f} with kernels" in GUIDE
    stay = [step(records[1]) / step(records[0]) for records in (RESERVED, TRIMMED)]
    assert (
        "on the first stream took {:.3f} of `none` with activations that stay, on the second {:.3f}.".format(*stay)
        in PROSE
    )
    assert "({:.2f} and {:.2f} on those two machines".format(*stay) in GUIDE
    costs = [step(a[at]) - step(b[at]) for a, b in ((ENGINE, RESERVED), (KERNEL, TRIMMED)) for at in (1, 0)]
    words = "cost stream {:.3f} s and `none` {:.3f} s, by kernels {:.3f} and {:.3f} s".format(*costs)
    assert words in PROSE
    assert f"it is {step(KERNEL[1]) - step(KERNEL[0]):.3f}." in PROSE
    assert f"{gib(KERNEL[0].host.pinned_requested_bytes):.1f} GiB of block inputs go out" in PROSE


def test_gradient_accumulation() -> None:
    none, stream = ACCUMULATED
    assert line_of(f"stream, {kept(stream)}", "native, four passes")
    for cells, record in zip(table("native, four passes"), ACCUMULATED, strict=True):
        memory = [gib(record.peak.steady_allocated_bytes), gib(record.peak.steady_reserved_bytes)]
        assert all(map(same, cells, [step(record), step(record) / step(none), *memory])), (cells, memory)
    steps = [one.step_s for one in none.steps if one.step_s]
    assert f"Steps of `none` took {min(steps):.3f} to {max(steps):.3f} s" in PROSE
    assert step(stream) - step(none) < max(steps) - min(steps)
    assert f"{gib(stream.peak.state_at_backward_end_bytes):.1f} GiB of state is there when the last backward" in PROSE
    assert f"{step(LONG[1]) / step(LONG[0]):.3f} of `none` with five samples a step" in GUIDE
    assert f"{step(stream) / step(none):.3f} with four passes" in GUIDE
