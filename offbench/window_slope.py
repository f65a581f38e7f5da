"""`--check-window`: is `step_s` what a job of any length takes for a step?

A window that begins and ends with nothing in flight takes some time for its first and last copies and, for each step,
the step's: from one length to another it grows by steps alone. So the slope over two lengths must be `step_s`,
whatever copies run across the ends of the measured window.
"""

from __future__ import annotations

from collections.abc import Callable

from offbench.device import Device

TOLERANCE = 0.005
"""Share of step_s by which the slope may differ."""


def slope(device: Device, steps: int, train: Callable[[int], None], drain: Callable[[], None]) -> float:
    """Seconds a step, by two drained windows of `steps` and twice as many. train(n) runs n steps; drain returns when
    nothing of the optimizer is in flight."""
    seconds = []
    for count in (steps, 2 * steps):
        drain()
        device.synchronize()
        start = device.stamp()
        train(count)
        drain()
        device.synchronize()
        seconds.append(device.seconds(start, device.stamp()))
    return (seconds[1] - seconds[0]) / steps


def disagreement(step_s: float, slope_s: float) -> str | None:
    """None when the two are the same within TOLERANCE."""
    apart = slope_s / step_s - 1
    if abs(apart) <= TOLERANCE:
        return None
    return f"a step took {step_s:.4f} s in the window, {slope_s:.4f} s by two drained ones: {apart:+.1%}"
