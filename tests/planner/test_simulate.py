from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbench import arms
from offbench.errors import UsageError
from offbench.offload.chunks import plan_staging
from offbench.offload.schedule import Schedule
from offbench.planner.inputs import Compute, Layout, Links, equal_chunks, of_model, uniform
from offbench.planner.policy import stream
from offbench.planner.result import Simulated
from offbench.planner.room import resident
from offbench.planner.simulate import simulate
from offbench.planner.tasks import SmallCopies
from offbench.workload import presets

GIB = 1 << 30
QWEN = of_model(presets.find("qwen3-30b-a3b"), world=8, ep=8, layers=48, cap=GIB)
SEED = Compute(forward=0.64, backward=1.54, update=0.075)
SEED_LINKS = Links(26 * GIB, 26 * GIB, 38.8 * GIB)
ROUNDING = 1 + 1e-9
RINGS = ("main", "chunked", "overlap")


def schedule(arm: str, **options: object) -> Schedule:
    found = arms.ARMS[arm]
    return found.schedule(found.resolve(**({"pieces": 1} | options)))


rates = st.builds(
    lambda into, out, share: Links(into * GIB, out * GIB, (max(into, out) + share * min(into, out)) * GIB),
    st.floats(2, 100),
    st.floats(2, 100),
    st.floats(0, 1),
)
even_rates = st.builds(
    lambda one, share: Links(one * GIB, one * GIB, (1 + share) * one * GIB), st.floats(2, 100), st.floats(0, 1)
)
times = st.builds(
    lambda loss, *seconds: Compute(*seconds).with_loss(loss),
    st.sampled_from([0.0, 0.136, 1.0]),
    st.floats(0.01, 3),
    st.floats(0.01, 3),
    st.floats(0, 0.3),
    st.floats(0, 0.1),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Uneven chunks, read by units of uneven length."""
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=20))
    chunks = [replace(equal_chunks(2048, 1).chunks[0], index=i, nbytes=n * 2**24) for i, n in enumerate(sizes)]
    readers = sorted(draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=8)))
    weights = [draw(st.integers(1, 9)) for _ in readers]
    shares = tuple(weight / sum(weights) for weight in weights)
    return Layout(tuple(chunks), (*readers[:-1], len(sizes) - 1), shares)


offloaded = st.one_of(
    st.just(schedule("main")),
    st.integers(1, 9).map(lambda slots: schedule("chunked", slots=slots)),
    st.builds(
        lambda slots, lead, ahead: schedule("overlap", slots=slots, lead=lead, ahead=ahead),
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(0, 6),
    ),
    st.builds(
        lambda lead, staging, most: schedule(
            "stream", lead=lead, staging_bytes=staging << 20, loss_bytes=None if most is None else most << 20
        ),
        st.integers(1, 9),
        st.integers(1, 1100),
        st.one_of(st.none(), st.integers(0, 1100)),
    ),
    st.integers(1, 9).map(lambda lead: schedule("zerocopy", lead=lead)),
)
"""Every arm that offloads."""


@settings(deadline=None, max_examples=300)
@given(
    plan=offloaded,
    kept=st.integers(0, 400),
    layout=layouts(),
    compute=times,
    links=rates,
    small=st.builds(SmallCopies, st.booleans(), st.booleans()),
)
def test_a_step_is_never_below_its_compute_or_its_copies_and_waits_explain_the_rest(
    plan: Schedule, kept: int, layout: Layout, compute: Compute, links: Links, small: SmallCopies
) -> None:
    plan = replace(plan, resident_bytes=kept << 20)
    found = simulate(plan, layout, compute, links, small_copies_wait=small)
    moving = layout.nbytes - sum(chunk.nbytes for chunk in layout.chunks[: resident(layout, plan)])
    # An update in host memory runs beside the forward, so that AdamW is no part of what must run in turn.
    least = compute.total - (compute.update * moving / layout.nbytes if plan.update == "host_memory" else 0.0)
    assert found.step_s * ROUNDING >= max(least, links.floor_s(moving))
    assert found.step_s == pytest.approx(least + found.waits.total, rel=1e-6)
    assert min(found.waits.move_in, found.waits.slot, found.waits.write_back, found.waits.small) >= 0
    # Nothing moves beside forward and backward, or what moves are no copies.
    assert (plan.deferred and plan.update == "device") or not found.waits.small
    assert simulate(plan, layout, compute, links, small_copies_wait=small) == found


@settings(deadline=None)
@given(
    arm=st.sampled_from(["chunked", "overlap"]),
    slots=st.integers(1, 8),
    layout=st.integers(1, 40).map(lambda count: equal_chunks(count * GIB, count)),
    compute=times,
    links=even_rates,
)
def test_more_slots_for_equal_chunks_are_never_slower(
    arm: str, slots: int, layout: Layout, compute: Compute, links: Links
) -> None:
    # Rates alike each way: with 8 in, 9 out and 9 in all, a chunk that comes in alone leaves some of the link idle.
    few, many = (simulate(schedule(arm, slots=n), layout, compute, links) for n in (slots, slots + 1))
    assert many.step_s <= few.step_s * ROUNDING


@settings(deadline=None)
@given(
    arm=st.sampled_from(["chunked", "overlap"]),
    slots=st.integers(1, 8),
    layout=st.one_of(st.just(QWEN), layouts()),
    compute=times,
    links=rates,
)
def test_uneven_chunks_may_pack_worse_into_more_slots_but_by_one_chunk_at_most(
    arm: str, slots: int, layout: Layout, compute: Compute, links: Links
) -> None:
    few, many = (simulate(schedule(arm, slots=n), layout, compute, links) for n in (slots, slots + 1))
    largest = max(chunk.nbytes for chunk in layout.chunks)
    assert many.step_s <= few.step_s + largest / links.into + largest / links.out + compute.update


@settings(deadline=None, max_examples=300)
@given(
    arm=st.sampled_from(["main", "chunked", "overlap", "stream", "zerocopy"]),
    kept=st.integers(0, 8),
    layout=layouts(),
    compute=times,
    links=st.one_of(st.just(SEED_LINKS), rates),
)
def test_more_resident_state_is_never_slower_but_for_updates_that_ran_beside_the_forward(
    arm: str, kept: int, layout: Layout, compute: Compute, links: Links
) -> None:
    def keeping(count: int) -> Simulated:
        budget = sum(chunk.nbytes for chunk in layout.chunks[:count])
        # Little staging packs the chunks that are left in another way, which may hold one of them up.
        ample: dict[str, object] = {"slots": len(layout.chunks), "staging_bytes": layout.nbytes}
        room = {name: ample[name] for name in ("slots", "staging_bytes") if (name == "slots") == (arm in RINGS)}
        roomy = schedule(arm, lead=len(layout.chunks), **({} if arm == "zerocopy" else room))
        return simulate(replace(roomy, resident_bytes=budget), layout, compute, links)

    few, many, all_of_it = keeping(kept), keeping(kept + 1), keeping(len(layout.chunks))
    # zerocopy updates in host memory beside the forward, but state on the GPU by AdamW alone: at most by that slower.
    more = many.state_at_backward_end_bytes - few.state_at_backward_end_bytes
    alone_s = compute.update * more / layout.nbytes if arm == "zerocopy" else 0.0
    assert many.step_s <= (few.step_s + alone_s) * ROUNDING
    assert all_of_it.step_s == pytest.approx(compute.total)
    assert all_of_it.state_at_backward_end_bytes == all_of_it.peak_state_bytes == layout.nbytes


def test_resident_state_does_not_move() -> None:
    plan = replace(schedule("main"), resident_bytes=10 * GIB)
    found = simulate(plan, QWEN, SEED, SEED_LINKS)
    kept = sum(chunk.nbytes for chunk in QWEN.chunks[:11])  # the 12th does not fit whole
    assert kept <= 10 * GIB < kept + QWEN.chunks[11].nbytes
    assert found.waits.move_in == pytest.approx((QWEN.nbytes - kept) / SEED_LINKS.into)
    assert found.state_at_backward_end_bytes == kept


@settings(deadline=None)
@given(layout=layouts(), compute=times, links=rates)
def test_main_is_compute_plus_all_in_plus_all_out(layout: Layout, compute: Compute, links: Links) -> None:
    found = simulate(schedule("main"), layout, compute, links)
    assert found.step_s == pytest.approx(compute.total + layout.nbytes / links.into + layout.nbytes / links.out)
    assert found.waits.move_in == pytest.approx(layout.nbytes / links.into)
    assert found.waits.write_back == pytest.approx(layout.nbytes / links.out)
    assert found.peak_state_bytes == layout.nbytes


@given(count=st.integers(2, 40), slots=st.integers(2, 8), rate=st.floats(2, 100))
def test_chunked_on_a_full_duplex_link_is_all_chunks_one_way_and_one_back(count: int, slots: int, rate: float) -> None:
    layout = equal_chunks(count * GIB, count)
    found = simulate(
        schedule("chunked", slots=slots),
        layout,
        Compute(1, 1, 0),
        Links(rate * GIB, rate * GIB, 2 * rate * GIB),
    )
    assert found.step_s == pytest.approx(2 + (count + 1) / rate)


@pytest.mark.parametrize("arm", ["chunked", "overlap"])
def test_one_slot_moves_one_chunk_at_a_time(arm: str) -> None:
    found = simulate(schedule(arm, slots=1), equal_chunks(8 * GIB, 8), Compute(0, 1, 0.5), Links(GIB, GIB, 2 * GIB))
    # Deferred, the last chunk's way out runs beside the next backward.
    assert found.step_s == pytest.approx(1.5 + 8 + (8 if arm == "chunked" else 7))


@given(compute=times, links=rates)
def test_none_is_its_compute(compute: Compute, links: Links) -> None:
    found = simulate(schedule("none"), QWEN, compute, links)
    assert (found.step_s, found.waits.total) == (compute.total, 0)
    assert found.state_at_backward_end_bytes == found.peak_state_bytes == QWEN.nbytes


@pytest.mark.parametrize(
    ("arm", "options", "step_s"),
    [
        ("none", {}, 2.255),
        ("main", {}, 4.44),
        ("chunked", {}, 3.65),
        ("overlap", {"slots": 4}, 3.02),
        ("overlap", {"slots": 8}, 3.02),
    ],
)
def test_ideal_steps_are_the_published_ones(arm: str, options: dict[str, object], step_s: float) -> None:
    layout = equal_chunks(28.4 * GIB, 33)
    found = simulate(schedule(arm, **options), layout, SEED, SEED_LINKS, ideal=True)
    assert found.step_s == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize(("kept_gib", "step_s"), [(4, 2.80), (8, 2.62), (12, 2.39)])
def test_ideal_steps_with_resident_state_are_the_published_ones(kept_gib: int, step_s: float) -> None:
    layout, nbytes = equal_chunks(28.4 * GIB, 33), kept_gib * GIB
    eager = replace(schedule("overlap", lead=33), resident_bytes=nbytes)
    assert simulate(eager, layout, SEED, SEED_LINKS, ideal=True).step_s == pytest.approx(step_s, rel=0.02)
    # A small lead starts the copies of the others late.
    late = replace(eager, lead=1)
    assert simulate(late, layout, SEED, SEED_LINKS, ideal=True).step_s > step_s


def test_the_layout_is_what_launches_recorded() -> None:
    shape = presets.find("qwen3-30b-a3b")
    assert (len(QWEN.chunks), QWEN.nbytes) == (33, 30_532_208_640)
    assert 0 <= QWEN.nbytes - 8 * shape.local_params(8, 8) < 2 * 512 * 579
    assert len(QWEN.last_chunk) == len(QWEN.shares) == 50
    assert list(QWEN.last_chunk) == sorted(QWEN.last_chunk)
    assert QWEN.last_chunk[-1] == 32
    assert sum(QWEN.shares) == pytest.approx(1)


def test_staging_is_the_engines() -> None:
    for slots in (2, 4, 8):
        found = simulate(schedule("overlap", slots=slots), QWEN, SEED, SEED_LINKS)
        assert found.staging_bytes == found.peak_state_bytes == plan_staging(QWEN.chunks, slots).nbytes
        assert found.state_at_backward_end_bytes == 0


def test_a_slow_way_out_sets_the_step_and_is_still_busy_when_backward_ends() -> None:
    links = Links(50 * GIB, 5 * GIB, 55 * GIB)
    found = simulate(schedule("overlap", slots=33), QWEN, SEED, links)
    assert found.step_s == pytest.approx(QWEN.nbytes / links.out)
    assert found.state_at_backward_end_bytes == found.staging_bytes
    assert found.peak_state_bytes == 2 * found.staging_bytes
    assert found.waits.slot > 0


def test_a_backlog_that_grows_slowly_still_ends_at_the_floor() -> None:
    layout = equal_chunks(10 * GIB, 10)
    links = Links(8 * GIB, 2 * GIB, 10 * GIB)
    found = simulate(schedule("overlap", slots=10), layout, Compute(3, 1.874, 0), links)
    assert found.step_s == pytest.approx(5.0)
    assert found.waits.total == pytest.approx(5 - 4.874)


def test_chunks_asked_for_late_cost_time() -> None:
    late, early = (simulate(schedule("overlap", lead=1, ahead=n), QWEN, SEED, SEED_LINKS) for n in (0, 4))
    assert late.step_s > early.step_s + 0.1
    queued = simulate(schedule("overlap", lead=33, ahead=0), QWEN, SEED, SEED_LINKS)
    assert queued.step_s == pytest.approx(early.step_s)


def test_copies_beside_a_long_forward_cost_nothing_but_the_first() -> None:
    compute = replace(SEED, forward=10.0)
    found = simulate(schedule("overlap"), QWEN, compute, SEED_LINKS)
    assert found.waits.total < 2 * QWEN.chunks[0].nbytes / SEED_LINKS.into


LATE_READER = replace(equal_chunks(8 * GIB, 8), last_chunk=(0, 7), shares=(0.5, 0.5))
"""A unit that reads the first chunk, and one that reads all."""


def eager(lead: int, slots: int = 8) -> Schedule:
    return schedule("overlap", slots=slots, lead=lead, ahead=0)


@pytest.mark.parametrize(
    ("plan", "waits"),
    [
        # Up at 1 s, as chunk 0 is there: behind all that step() has queued, which ends at 8 s.
        (eager(lead=8), 7),
        # Behind chunks 1 and 2, to 3 s. The others are queued at 3.5 s, when the upload of the last unit is far off.
        (eager(lead=3), 2),
        # Behind chunk 1, to 2 s: the next one itself waits for a slot, as its way out takes long.
        (eager(lead=8, slots=2), 1),
    ],
    ids=["all queued", "some queued", "the queue waits"],
)
def test_an_upload_waits_until_no_move_in_may_run(plan: Schedule, waits: float) -> None:
    out = GIB if plan.slots == 8 else GIB / 8
    compute, links = Compute(2, 99, 0), Links(GIB, out, GIB + out)
    found = simulate(plan, LATE_READER, compute, links, small_copies_wait=SmallCopies(uploads=True))
    assert found.waits.small == pytest.approx(waits)


def test_a_read_back_waits_until_no_write_back_may_run_and_then_the_host_goes_on() -> None:
    # Out is half as fast: chunks 0 and 1 go from 1 to 5 s, counts are up at 1.5 s. Only then are the others queued:
    # in from 5 to 11 s, out from 6 to 18 s, and counts up at 11.5.
    compute, links = Compute(2, 99, 0), Links(GIB, GIB / 2, 1.5 * GIB)
    found = simulate(eager(lead=2), LATE_READER, compute, links, small_copies_wait=SmallCopies(readbacks=True))
    assert found.waits.small == pytest.approx(3.5 + 6.5)


def test_every_arm_of_a_deep_model_is_simulated_in_well_under_a_second() -> None:
    began = time.process_time()
    for arm in arms.ARMS:
        simulate(schedule(arm), QWEN, SEED, SEED_LINKS)
    simulate(stream(14 * GIB), QWEN, SEED, SEED_LINKS, small_copies_wait=True)
    assert time.process_time() - began < 0.5


def test_bytes_without_a_model_are_cut_into_equal_layers() -> None:
    layout = uniform(28 * GIB, 10, GIB)
    assert layout.nbytes == pytest.approx(28 * GIB, rel=1e-4)
    assert max(chunk.nbytes for chunk in layout.chunks) <= GIB
    assert layout.last_chunk[-1] == len(layout.chunks) - 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Links(10, 10, 5), "no faster than both ways"),
        (lambda: Links(0, 10, 10), "positive"),
        (lambda: Compute(-1, 2, 0), "none negative"),
        (lambda: Compute(0, 0, 0), "not all zero"),
        (lambda: Compute(float("inf"), 0, 0), "give seconds"),
        (lambda: Compute(1, 2, 0, loss=1.5), "a part of the forward"),
    ],
)
def test_impossible_inputs_are_refused(make: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()  # type: ignore[operator]


def test_figures_that_disagree_are_taken_at_the_lower_one() -> None:
    assert Links.of(60, 50, 55) == Links(55, 50, 55)
    assert Links.of(60, 50) == Links(60, 50, 110)
    assert Links(26, 26, 38.8).now(True, True) == pytest.approx((19.4, 19.4))
    assert Links(26, 20, 46).now(False, True) == (0, 20)
