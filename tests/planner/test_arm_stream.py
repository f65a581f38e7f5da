"""Arm stream, simulated: its memory, its bound, when it writes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbench import arms
from offbench.offload.chunks import least_arena
from offbench.offload.schedule import Schedule
from offbench.planner.bounds import resident_s, stream_s
from offbench.planner.inputs import Compute, Footprint, Links, of_model
from offbench.planner.result import Span
from offbench.planner.simulate import simulate
from offbench.workload import presets
from tests.planner.test_simulate import GIB, QWEN, ROUNDING, SEED, SEED_LINKS

PARTS = of_model(presets.find("qwen3-30b-a3b"), world=8, ep=8, layers=48, cap=GIB // 4)


LARGEST = max(chunk.nbytes for chunk in PARTS.chunks)


def arm_stream(kept: int, staging: int, at_loss: int | None = None) -> Schedule:
    arm = arms.ARMS["stream"]
    return arm.schedule(
        arm.resolve(
            state_budget=kept * GIB, staging_bytes=staging * GIB, loss_bytes=None if at_loss is None else at_loss * GIB
        )
    )


@pytest.mark.parametrize("kept", [0, 4, 10])
@pytest.mark.parametrize("staging", [1, 4])
@pytest.mark.parametrize("at_loss", [None, 8, 14])
@pytest.mark.parametrize("loss", [0.0, 0.136])
def test_arm_stream_keeps_its_memory_and_is_close_to_its_bound(
    kept: int, staging: int, at_loss: int | None, loss: float
) -> None:
    compute = SEED.with_loss(loss)
    found = simulate(arm_stream(kept, staging, at_loss), PARTS, compute, SEED_LINKS)
    held = found.state_at_backward_end_bytes
    assert kept * GIB - LARGEST < held <= kept * GIB
    most = QWEN.nbytes if at_loss is None else held + at_loss * GIB
    assert found.state_at_loss_bytes <= found.peak_state_bytes <= most
    assert found.step_s == pytest.approx(SEED.total + found.waits.total)
    # With `--at-loss` less than the gradients leave, more must go out in forward.
    gradients = 0.5 if at_loss is None else min(0.5, max(0.0, (at_loss - staging) * GIB / QWEN.nbytes))
    bound = resident_s(QWEN.nbytes, held, max(staging * GIB, 2 * LARGEST), gradients, compute, SEED_LINKS)
    assert bound <= found.step_s * ROUNDING
    assert found.step_s < 1.045 * bound


def test_arm_stream_writes_back_what_no_memory_waits_for_after_the_last_move_in() -> None:
    spans: list[Span] = []
    simulate(arm_stream(0, 15), PARTS, SEED, SEED_LINKS, spans=spans)
    assert not any(span.moving_in and span.moving_out for span in spans)
    assert any(span.moving_out and span.compute == "forward" for span in spans)
    spans.clear()
    simulate(arm_stream(0, 2), PARTS, SEED, SEED_LINKS, spans=spans)
    assert any(span.moving_in and span.moving_out for span in spans)


def test_arm_stream_has_room_for_any_two_neighbours_at_least() -> None:
    tiny = replace(arm_stream(0, 1), staging_bytes=None, loss_bytes=0)
    found = simulate(tiny, PARTS, SEED, SEED_LINKS)
    assert LARGEST < found.peak_state_bytes == least_arena(chunk.nbytes for chunk in PARTS.chunks) < 2 * LARGEST


def test_arm_stream_takes_two_chunks_at_step_unless_told_otherwise() -> None:
    arm = arms.ARMS["stream"]
    used = Footprint(QWEN.nbytes / 2, QWEN.nbytes / 2)
    usual, given = arm.schedule(arm.resolve(loss_bytes=0)), arm_stream(0, 2, 0)
    assert usual == given
    found = simulate(usual, PARTS, SEED, SEED_LINKS, footprint=used)
    assert found.state_at_loss_bytes == found.peak_state_bytes == 2 * GIB
    # It is set aside while all gradients are there still.
    assert found.peak_bytes == pytest.approx(QWEN.nbytes + 2 * GIB)


@pytest.mark.parametrize("kept", [0, 10])
def test_arm_stream_grows_no_faster_than_gets_it_to_the_loss(kept: int) -> None:
    spans: list[Span] = []
    found = simulate(arm_stream(kept, 2, 8), PARTS, SEED, SEED_LINKS, spans=spans)
    resident = found.state_at_backward_end_bytes
    assert found.state_at_loss_bytes == pytest.approx(resident + 8 * GIB)
    # Eight GiB over all updates, those of resident state included: at most an even share of what has run; the arena's
    # two go back on the way.
    update_s, updated_s = SEED.update, 0.0
    for span in spans:
        if span.compute == "backward":
            break
        share = updated_s / update_s
        assert span.held <= (resident + 2 * GIB + 8 * GIB * share) * ROUNDING
        updated_s += (span.end - span.start) * (span.compute == "update")


def test_without_a_limit_staging_grows_to_what_raises_no_peak() -> None:
    half = QWEN.nbytes / 2
    used = Footprint(half, half, saved=3 * GIB, head=1 * GIB)
    assert used.left_at_loss == round(half - 4 * GIB)
    limited = replace(arm_stream(0, 2), loss_bytes=used.left_at_loss)
    found = simulate(arm_stream(0, 2), PARTS, SEED, SEED_LINKS, footprint=used)
    assert found == simulate(limited, PARTS, SEED, SEED_LINKS, footprint=used)
    assert found.peak_bytes == pytest.approx(QWEN.nbytes + 2 * GIB)
    # Micro batches add up unsharded, but are reduced when step() comes; without figures nothing is known.
    assert replace(used, gradients=3 * half).left_at_loss == used.left_at_loss
    assert Footprint().left_at_loss is None
    assert replace(used, saved=half).left_at_loss == 0
    free = simulate(arm_stream(0, 2), PARTS, SEED, SEED_LINKS)
    assert free.state_at_loss_bytes == pytest.approx(2 * GIB + half)


def test_nothing_fetched_in_backward_and_nothing_kept_is_one_bound() -> None:
    links = Links(2, 2, 3)
    # 10 bytes, 2 resident, 1 staged, 5 freed: 2 must go out while 8 come in.
    assert resident_s(10, 2, 1, 0.5, Compute(1, 1e3, 0), links) == pytest.approx(1e3 + 2 / 1.5 + 6 / 2)
    assert resident_s(10, 10, 0, 0.5, SEED, links) == pytest.approx(SEED.total)
    assert resident_s(10, 0, 0, 0.5, SEED, links) == pytest.approx(stream_s(10, 0, 0.5, SEED, links))
