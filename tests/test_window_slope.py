"""--check-window: the slope over two windows is the step, whatever their ends cost."""

from __future__ import annotations

import pytest
import torch

from offbench.device import CpuDevice, Stamp
from offbench.window_slope import disagreement, slope


class Clock(CpuDevice):
    """A device on which time passes only by what the test does."""

    now = 100.0

    def stamp(self) -> Stamp:
        return Stamp(None, self.now)


def test_what_the_ends_of_a_window_cost_is_no_part_of_the_slope() -> None:
    clock = Clock(torch.device("cpu"))
    ran: list[int] = []
    drained: list[float] = []

    def train(count: int) -> None:
        ran.append(count)
        clock.now += 7.0 + count * 2.5  # copies that nothing hides at the start, then the steps

    def drain() -> None:
        drained.append(clock.now)
        clock.now += 3.0

    assert slope(clock, 4, train, drain) == pytest.approx(2.5)
    assert ran == [4, 8]
    assert len(drained) == 4, "before and after each"


@pytest.mark.parametrize(
    ("found", "same"), [(1.0, True), (1.0049, True), (0.9951, True), (1.0051, False), (0.99, False)]
)
def test_half_a_percent_is_allowed(found: float, same: bool) -> None:
    assert (disagreement(2.0, 2.0 * found) is None) is same
