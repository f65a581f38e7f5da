"""Arm zerocopy, simulated: updates that are their own copies, beside a forward that has fewer multiprocessors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbench import arms
from offbench.offload.schedule import Schedule
from offbench.offload.zerocopy import PROGRAMS
from offbench.planner.inputs import MULTIPROCESSORS, Compute, Layout, Links, equal_chunks
from offbench.planner.result import Span
from offbench.planner.simulate import simulate
from tests.planner.test_simulate import GIB, QWEN, ROUNDING, SEED, SEED_LINKS, layouts, rates, times

SLOWED = PROGRAMS / MULTIPROCESSORS


def zerocopy(kept: int = 0, **options: object) -> Schedule:
    arm = arms.ARMS["zerocopy"]
    return arm.schedule(arm.resolve(state_budget=kept, **options))


def test_the_rate_is_the_one_measured_and_few_programs_ask_for_no_more() -> None:
    assert Links(51.7 * GIB, 51.5 * GIB, 94.2 * GIB).in_place == pytest.approx(77.3 * GIB)
    assert SEED_LINKS.in_place == pytest.approx(38.8 * GIB * 77.3 / 94.2)
    assert Links(400 * GIB, 400 * GIB, 800 * GIB).in_place == pytest.approx(2 * 56.9 * GIB)


def test_what_is_read_is_written_so_the_slower_way_sets_the_rate() -> None:
    layout, lopsided = equal_chunks(8 * GIB, 8), Links(50 * GIB, 10 * GIB, 60 * GIB)
    assert lopsided.in_place == 20 * GIB
    found = simulate(zerocopy(), layout, Compute(0.1, 0.1, 0), lopsided)
    assert found.step_s * ROUNDING >= 0.1 + lopsided.floor_s(layout.nbytes)


def test_updates_run_in_order_beside_the_forward_which_they_slow() -> None:
    layout, links = equal_chunks(8 * GIB, 8), Links(100 * GIB, 100 * GIB, 200 * GIB)
    each = 2 * GIB / links.in_place
    # Forward waits for the first update only; the others, before its layers, take their multiprocessors from it.
    found = simulate(zerocopy(), layout, Compute(10, 1, 0), links)
    assert found.waits.move_in == pytest.approx(each)
    assert found.waits.slowed == pytest.approx(7 * each * SLOWED)
    assert found.step_s == pytest.approx(11 + each + 7 * each * SLOWED)
    # A forward of no length waits for all of them.
    assert simulate(zerocopy(), layout, Compute(0, 1, 0), links).step_s == pytest.approx(1 + 8 * each)


@settings(deadline=None, max_examples=100)
@given(kept=st.integers(0, 800), layout=layouts(), compute=times, links=rates)
def test_a_step_is_never_below_its_bounds_and_its_parts_add_up(
    kept: int, layout: Layout, compute: Compute, links: Links
) -> None:
    found = simulate(zerocopy(kept << 20, lead=1, ahead=2), layout, compute, links)
    held = found.state_at_backward_end_bytes
    beside = compute.update * (1 - held / layout.nbytes)
    moving_s = 2 * (layout.nbytes - held) / links.in_place
    assert found.step_s * ROUNDING >= max(compute.total - beside, compute.backward + compute.clip + moving_s)
    assert found.step_s == pytest.approx(compute.total - beside + found.waits.total, rel=1e-6)
    assert found.waits.slowed <= SLOWED * max(moving_s, beside) * ROUNDING
    assert (found.peak_state_bytes, found.staging_bytes, found.waits.slot) == (held, 0, 0)


def test_an_update_is_never_faster_than_on_the_device() -> None:
    slow = Compute(0, 1, 8.0)
    found = simulate(zerocopy(), equal_chunks(8 * GIB, 8), slow, Links(100 * GIB, 100 * GIB, 200 * GIB))
    assert found.step_s == pytest.approx(9)


def test_no_bulk_copy_holds_up_a_small_one_and_lanes_show_the_forward() -> None:
    spans: list[Span] = []
    found = simulate(zerocopy(), QWEN, SEED, SEED_LINKS, small_copies_wait=True, spans=spans)
    assert found.waits.small == 0
    assert found.step_s == pytest.approx(simulate(zerocopy(), QWEN, SEED, SEED_LINKS).step_s)
    assert not any(span.moving_in or span.moving_out for span in spans if span.end > span.start)
    assert {span.compute for span in spans if span.end > span.start} == {"forward", "backward", "move_in"}


def test_resident_state_is_updated_by_the_device() -> None:
    whole = simulate(zerocopy(QWEN.nbytes), QWEN, SEED, SEED_LINKS)
    assert (whole.step_s, whole.waits.total) == (pytest.approx(SEED.total), 0)
    half = simulate(zerocopy(QWEN.nbytes // 2), QWEN, SEED, SEED_LINKS)
    assert SEED.total < half.step_s < simulate(zerocopy(), QWEN, SEED, SEED_LINKS).step_s
    assert simulate(replace(zerocopy(), deferred=False), QWEN, SEED, SEED_LINKS).step_s == pytest.approx(
        SEED.forward + SEED.backward + 2 * QWEN.nbytes / SEED_LINKS.in_place
    )
