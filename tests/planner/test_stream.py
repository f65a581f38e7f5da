"""Prefetch in backward: published policy rows, closed-form bounds, and what memory and budgets may do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbench import arms
from offbench.offload.schedule import Schedule
from offbench.planner.bounds import (
    chunked_s,
    deferred_exposed_s,
    deferred_s,
    hidden_at,
    main_s,
    out_in_forward,
    resident_s,
    stream_s,
    window_s,
)
from offbench.planner.inputs import Compute, Footprint, Layout, Links, equal_chunks
from offbench.planner.policy import Policy, stream, written_in_forward
from offbench.planner.result import Simulated
from offbench.planner.simulate import simulate
from tests.planner.test_simulate import GIB, QWEN, ROUNDING, SEED, SEED_LINKS, layouts, rates, schedule, times

FIXED = replace(equal_chunks(28.4 * GIB, 33), gradients=0.0)
"""The layout of the published policy rows: staging does not grow into gradients."""


def within(cap_gib: float, kept_gib: int = 0) -> Simulated:
    """The published policy: prefetch in backward, write-back at once and on into backward, so much staging."""
    policy = stream(round(cap_gib * GIB) + 99, kept_gib * GIB, write_back="forward")
    return simulate(policy, FIXED, SEED, SEED_LINKS, ideal=True)


@pytest.mark.parametrize(
    ("cap_gib", "peak", "at_loss", "step_s"),
    [
        (3.5, 3.4, 2.6, 2.89),
        (5, 4.3, 3.4, 2.84),
        (7, 6.9, 6.0, 2.71),
        (10, 9.5, 8.6, 2.58),
        (12, 11.2, 10.3, 2.49),
        (14, 13.8, 12.9, 2.35),
        (16, 15.5, 14.6, 2.26),
        (20, 19.8, 15.5, 2.19),
        (28.4, 28.4, 12.0, 2.19),
    ],
)
def test_prefetch_in_backward_takes_the_published_times_and_memory(
    cap_gib: float, peak: float, at_loss: float, step_s: float
) -> None:
    found = within(cap_gib)
    assert found.step_s == pytest.approx(step_s, rel=0.006)
    assert found.peak_state_bytes / GIB == pytest.approx(peak, abs=0.06)
    assert found.state_at_loss_bytes / GIB == pytest.approx(at_loss, abs=0.06)


@pytest.mark.parametrize(("kept_gib", "step_s"), [(4, 2.50), (8, 2.33), (12, 2.19)])
def test_resident_state_beside_prefetch_takes_the_published_times(kept_gib: int, step_s: float) -> None:
    assert within(7, kept_gib).step_s == pytest.approx(step_s, rel=0.015)


@pytest.mark.parametrize(
    ("rate", "phases", "hidden_gib", "x_none"),
    [
        (50.2, Compute(0.51, 1.32, 0.0, 0.04), 0.6, (1.00, 1.00, 1.00)),
        (21.5, Compute(0.51, 1.32, 0.0, 0.04), 16.6, (1.35, 1.24, 1.06)),
        (26.0, Compute(0.66, 1.595, 0.0), 11.2, (1.15, 1.07, 1.00)),
    ],
)
def test_the_bound_is_that_of_the_links_it_was_derived_for(
    rate: float, phases: Compute, hidden_gib: float, x_none: tuple[float, ...]
) -> None:
    nbytes, links = 28.44 * GIB, Links(rate * GIB, rate * GIB, 2 * rate * GIB)
    assert hidden_at(nbytes, phases, links) / GIB == pytest.approx(hidden_gib, abs=0.3)
    for held, times_none in zip((2.4, 7.1, 14.2), x_none, strict=True):
        exposed = deferred_exposed_s(nbytes, held * GIB, phases, links)
        assert 1 + exposed / phases.total == pytest.approx(times_none, abs=0.02)


@settings(deadline=None, max_examples=80)
@given(
    staged=st.integers(0, 1100),
    kept=st.integers(0, 800),
    late=st.booleans(),
    at_loss=st.one_of(st.none(), st.integers(0, 1100)),
    layout=layouts(),
    compute=times,
    links=rates,
)
def test_stream_is_never_below_any_bound_and_waits_explain_the_rest(
    staged: int, kept: int, late: bool, at_loss: int | None, layout: Layout, compute: Compute, links: Links
) -> None:
    mib = 2**20
    policy = stream(
        staged * mib,
        kept * mib,
        write_back="backward" if late else "forward",
        loss_bytes=None if at_loss is None else at_loss * mib,
    )
    found = simulate(policy, layout, compute, links)
    moved = layout.nbytes - sum(c.nbytes for c in layout.chunks[: kept_chunks(layout, policy)])
    assert found.step_s * ROUNDING >= max(compute.total, links.floor_s(moved))
    assert found.step_s == pytest.approx(compute.total + found.waits.total, rel=1e-6)
    assert found.step_s * ROUNDING >= compute.total + deferred_exposed_s(
        layout.nbytes, found.state_at_backward_end_bytes, compute, links
    )
    staging = max(staged * mib, *(chunk.nbytes for chunk in layout.chunks))
    assert found.peak_state_bytes <= staging + layout.gradients * layout.nbytes + policy.resident_bytes
    if at_loss is not None:
        assert found.state_at_loss_bytes <= at_loss * mib + policy.resident_bytes


def kept_chunks(layout: Layout, policy: Policy) -> int:
    ends = [sum(c.nbytes for c in layout.chunks[: i + 1]) for i in range(len(layout.chunks))]
    return sum(end <= policy.resident_bytes for end in ends)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 40),
    chunks=st.integers(2, 40),
    compute=times,
    rate=st.floats(2, 100),
    late=st.booleans(),
)
def test_more_staging_is_never_slower(count: int, chunks: int, compute: Compute, rate: float, late: bool) -> None:
    layout, links = equal_chunks(count * GIB, count), Links(rate * GIB, rate * GIB, 2 * rate * GIB)
    few, many = (
        simulate(stream(n * GIB, write_back="backward" if late else "forward"), layout, compute, links)
        for n in (chunks, chunks + 1)
    )
    assert many.step_s <= few.step_s * ROUNDING


@settings(deadline=None, max_examples=60)
@given(kept=st.integers(0, 12), layout=layouts(), compute=times, links=rates)
def test_more_resident_state_is_never_slower_where_staging_is_ample(
    kept: int, layout: Layout, compute: Compute, links: Links
) -> None:
    def keeping(chunks: int) -> float:
        resident = sum(chunk.nbytes for chunk in layout.chunks[:chunks])
        return simulate(stream(layout.nbytes, resident), layout, compute, links).step_s

    assert keeping(kept + 1) <= keeping(kept) * ROUNDING


@settings(deadline=None, max_examples=50)
@given(
    count=st.integers(4, 40),
    share=st.floats(0.1, 1),
    compute=st.builds(Compute, st.floats(0.1, 2), st.just(1e3), st.just(0.0), st.floats(0, 0.05)),
    rate=st.floats(2, 100),
)
def test_with_one_way_traffic_only_the_step_is_the_bound_to_one_chunk(
    count: int, share: float, compute: Compute, rate: float
) -> None:
    """A backward long enough to write everything back, and room for all in forward: nothing but move-in is left."""
    layout, links = equal_chunks(count * GIB, count), Links(rate * GIB, rate * GIB, 2 * rate * GIB)
    roomy = replace(layout, gradients=1.0)
    found = simulate(stream(max(2, round(share * count)) * GIB), roomy, compute, links)
    bound = deferred_s(layout.nbytes, found.state_at_backward_end_bytes, compute, links)
    # While clip runs, staging is full; the last chunk's own unit runs after it.
    assert bound <= found.step_s * ROUNDING
    assert found.step_s <= (bound + compute.clip + compute.forward / count) * ROUNDING


@settings(deadline=None, max_examples=80)
@given(count=st.integers(4, 40), share=st.floats(0.05, 1), compute=times, links=rates)
def test_no_step_beats_what_its_memory_allows(count: int, share: float, compute: Compute, links: Links) -> None:
    layout, staged = equal_chunks(count * GIB, count), max(1, round(share * count)) * GIB
    for late in ("backward", "forward"):
        found = simulate(stream(staged, write_back=late), layout, compute, links)
        bound = stream_s(layout.nbytes, staged, layout.gradients, compute, links)
        assert (
            found.step_s * ROUNDING >= bound - GIB / links.into
        )  # the last chunk moves in as the last but one is out


def test_small_budgets_must_write_back_in_forward() -> None:
    assert out_in_forward(28, 4, 0.5) == 10
    assert out_in_forward(28, 14, 0.5) == out_in_forward(28, 4, 1.0) == 0
    for budget in (4, 7, 10):
        found = simulate(stream(budget * GIB), QWEN, SEED, SEED_LINKS)
        held = found.state_at_backward_end_bytes
        bound = stream_s(QWEN.nbytes, held, QWEN.gradients, SEED, SEED_LINKS)
        assert deferred_s(QWEN.nbytes, held, SEED, SEED_LINKS) < bound <= found.step_s < 1.04 * bound


def test_two_windows_share_out_what_moves() -> None:
    links = Links(2, 2, 3)
    assert window_s(6, 0, links) == 3
    assert window_s(6, 3, links) == pytest.approx(3 / 1.5 + 3 / 2)
    long = Compute(1, 1e3, 0)
    # 10 bytes, 2 fetched, 5 freed: 3 must go out while 8 come in.
    assert stream_s(10, 2, 0.5, long, links) == pytest.approx(1e3 + 3 / 1.5 + 5 / 2)
    assert stream_s(10, 2, 1.0, long, links) == pytest.approx(1e3 + 8 / 2) == deferred_s(10, 2, long, links)
    # A short backward: what it has no time for costs the same in either window, so the floor is left.
    assert stream_s(10, 9, 0.5, Compute(1, 1, 0), links) == pytest.approx(links.floor_s(10))


def test_what_moves_in_must_be_there_before_the_loss() -> None:
    links, late = Links(2, 2, 3), Compute(1, 1e3, 0, loss=0.5)
    assert deferred_exposed_s(10, 2, late, links) == pytest.approx(8 / 2 - 0.5)
    assert hidden_at(10, late, links) == pytest.approx(10 - 2 * 0.5)
    # The same windows as without a loss, and the loss after them.
    assert stream_s(10, 2, 0.5, late, links) == pytest.approx(1e3 + 3 / 1.5 + 5 / 2 + 0.5)
    assert resident_s(10, 2, 1, 0.5, late, links) == pytest.approx(1e3 + 2 / 1.5 + 6 / 2 + 0.5)


def test_all_in_and_all_out_in_turn_is_main_and_both_at_once_is_chunked() -> None:
    layout = equal_chunks(28.4 * GIB, 33)
    turn = simulate(schedule("main"), layout, SEED, SEED_LINKS)
    assert turn.step_s == pytest.approx(main_s(layout.nbytes, SEED, SEED_LINKS))
    both = simulate(schedule("chunked"), layout, SEED, SEED_LINKS, ideal=True)
    assert both.step_s == pytest.approx(chunked_s(layout.nbytes, 33, SEED, SEED_LINKS))


def test_write_back_runs_in_forward_only_as_far_as_memory_demands() -> None:
    sizes = [1] * 10
    late = stream(10)
    assert written_in_forward(late, sizes, 0.5) == (0, 0)
    assert written_in_forward(replace(late, loss_bytes=4), sizes, 0.5) == (6, 6)
    # 3 staged and half of the 8 bytes updated by then hold 7 of 10: 3 must have gone.
    assert written_in_forward(replace(late, staging_bytes=3), sizes, 0.5) == (0, 3)
    assert written_in_forward(replace(late, staging_bytes=3), sizes, 1.0) == (0, 0)
    assert written_in_forward(replace(late, write_back="forward"), sizes, 0.5) == (0, 10)
    small, ample = (simulate(stream(n * GIB), QWEN, SEED, SEED_LINKS) for n in (6, 20))
    assert ample.state_at_loss_bytes == QWEN.nbytes
    assert small.state_at_loss_bytes < QWEN.nbytes - 6 * GIB


def test_memory_that_the_loss_needs_holds_backward_up() -> None:
    slow = Links(26 * GIB, 5 * GIB, 31 * GIB)
    free = simulate(stream(14 * GIB), QWEN, SEED, slow)
    tight = simulate(stream(14 * GIB, loss_bytes=2 * GIB), QWEN, SEED, slow)
    assert tight.waits.write_back > 1
    assert free.waits.write_back == 0


def test_prefetch_grows_into_the_memory_of_gradients() -> None:
    grows, fixed = (
        simulate(stream(8 * GIB), replace(QWEN, gradients=share), SEED, SEED_LINKS) for share in (0.5, 0.0)
    )
    assert grows.step_s < fixed.step_s - 0.1
    assert fixed.peak_state_bytes <= 8 * GIB < grows.peak_state_bytes <= 8 * GIB + QWEN.nbytes / 2
    used = Footprint(parameters=QWEN.nbytes / 2, gradients=QWEN.nbytes / 2)
    whole = simulate(stream(8 * GIB), QWEN, SEED, SEED_LINKS, footprint=used)
    # Parameters, gradients and staging together stay what they are when backward ends.
    assert whole.peak_bytes <= QWEN.nbytes + 8 * GIB + max(chunk.nbytes for chunk in QWEN.chunks)


def test_a_chunk_larger_than_all_staging_moves_alone() -> None:
    found = simulate(stream(1), replace(QWEN, gradients=0.0), SEED, SEED_LINKS)
    assert found.peak_state_bytes == max(chunk.nbytes for chunk in QWEN.chunks)
    assert found.step_s > SEED.total + QWEN.nbytes / SEED_LINKS.into - SEED.forward


@dataclass(frozen=True)
class Wired(Schedule):
    """A schedule of an engine that has the fields itself."""

    prefetch: bool = False
    staging_bytes: int | None = None
    write_back: Literal["forward", "backward"] = "forward"
    loss_bytes: int | None = None


def test_a_schedule_that_has_the_fields_keeps_them() -> None:
    found = Policy.of(
        Wired("stream", True, deferred=True, prefetch=True, staging_bytes=5, write_back="backward", loss_bytes=3)
    )
    assert found == stream(5, loss_bytes=3)


def test_a_policy_without_its_fields_is_its_schedule() -> None:
    for name in ("main", "chunked", "overlap"):
        plain = schedule(name)
        assert simulate(Policy.of(plain), QWEN, SEED, SEED_LINKS) == simulate(plain, QWEN, SEED, SEED_LINKS)
    assert set(arms.ARMS) >= {"none", "main", "chunked", "overlap"}
