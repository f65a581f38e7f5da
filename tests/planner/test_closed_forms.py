"""Steps whose length a formula gives: deferred arms with all room they want, and updates in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbench.offload.zerocopy import PROGRAMS
from offbench.planner.inputs import MULTIPROCESSORS, Compute, Links, equal_chunks
from offbench.planner.simulate import simulate
from tests.planner.test_simulate import GIB, rates, schedule, times


@settings(deadline=None)
@given(
    arm=st.sampled_from(["overlap", "stream"]),
    count=st.integers(1, 30),
    compute=times,
    rate=st.floats(2, 100),
)
def test_deferred_arms_with_all_room_on_a_full_duplex_link_are_their_closed_form(
    arm: str, count: int, compute: Compute, rate: float
) -> None:
    room: dict[str, object] = {"slots": count} if arm == "overlap" else {"staging_bytes": count * GIB}
    idle = replace(compute, backward=1e3)  # long enough to write everything back
    links = Links(rate * GIB, rate * GIB, 2 * rate * GIB)
    found = simulate(schedule(arm, lead=count, **room), equal_chunks(count * GIB, count), idle, links)
    layer = (compute.update + compute.forward - compute.loss) / count
    # Chunk k is there after k + 1 of them; it, the layers after it and the loss are left then.
    left = max((k + 1) / rate + (count - k) * layer for k in (0, count - 1))
    assert found.step_s == pytest.approx(1e3 + compute.clip + left + compute.loss, rel=1e-9)


@settings(deadline=None)
@given(count=st.integers(1, 30), kept=st.integers(0, 29), compute=times, links=rates, long=st.booleans())
def test_zerocopy_is_its_closed_form(count: int, kept: int, compute: Compute, links: Links, long: bool) -> None:
    kept = min(kept, count - 1)
    layout = equal_chunks(count * GIB, count)
    each = max(compute.update / count, 2 * GIB / links.in_place)
    # What stays is updated first, with the GPU to itself; of the others the first one, if its layer is the first.
    alone = kept * compute.update / count
    slowed = (count - max(1, kept)) * each * PROGRAMS / MULTIPROCESSORS
    if long:  # an update ends before the layer does beside which it runs
        busy = replace(compute, forward=4 * count * each, loss=count * each)
        expected = (alone if kept else each) + busy.forward + slowed
    else:  # layers of no length wait for every update
        busy = replace(compute, forward=compute.loss)
        expected = alone + (count - kept) * each + busy.forward
    found = simulate(schedule("zerocopy", lead=count, state_budget=kept * GIB), layout, busy, links)
    assert found.step_s == pytest.approx(busy.backward + busy.clip + expected)


def test_state_must_be_there_a_loss_and_a_layer_before_the_forward_ends() -> None:
    links = Links(GIB, GIB, 2 * GIB)
    late = Compute(forward=8, backward=99, update=0, loss=4)
    plan = schedule("overlap", slots=8, lead=8)
    # 8 s of copies beside a forward of 8 s: but the last layer and the loss come after the last chunk.
    found = simulate(plan, equal_chunks(8 * GIB, 8), late, links)
    assert found.step_s == pytest.approx(99 + 8 + 0.5 + 4)
    whole = simulate(plan, equal_chunks(8 * GIB, 8), replace(late, loss=0), links)
    assert whole.step_s == pytest.approx(99 + 8 + 1)
