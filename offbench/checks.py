"""A launch checks itself: did the arm do what its name says? A failed check makes the record `invalid`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbench import arms
from offbench.config import RunSpec
from offbench.measure import first_non_finite, window_valid

if TYPE_CHECKING:
    from offbench.rank_report import RankReport


def check_launch(spec: RunSpec, reports: Sequence[RankReport]) -> dict[str, str]:
    """Name of each check -> `ok` or what was seen instead."""
    return {
        "schedule": _schedule(spec, reports) or "ok",
        "state": _state(spec, reports) or "ok",
        "window": _window(spec, reports) or "ok",
        "finite": first_non_finite([report.result for report in reports]) or "ok",
        "norms agree": _norms(spec, reports) or "ok",
    }


def _schedule(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """No silent fallback from deferred to synchronous updates."""
    arm, _ = arms.find(spec.arm.name)
    wanted = "deferred" if arm.schedule(spec.arm).deferred else "synchronous"
    for report in reports:
        if report.schedule != wanted:
            return f"rank {report.rank} ran {report.schedule} updates, the arm has {wanted} ones"
    return None


def _state(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """After a drained step the moments are where the arm keeps them, all of them."""
    offloaded = arms.find(spec.arm.name)[0].schedule(spec.arm).offloaded
    for report in reports:
        expected = report.local_params * 8  # two fp32 moments
        device, host = report.state.device_bytes or 0, report.state.host_bytes or 0
        if device + host != expected:
            need = f"{report.local_params} parameters need {expected}"
            return f"rank {report.rank} holds {device + host} bytes of state, {need}"
        wrong = device if offloaded else host if spec.mode.device == "cuda" else 0
        if wrong:
            place = "on the device" if offloaded else "in host memory"
            return f"rank {report.rank} keeps {wrong} bytes of state {place}"
    return None


def _window(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """All copies of the window's steps completed inside it, in both directions."""
    for report in reports:
        found = window_valid(
            report.traffic, spec.window.steps, report.largest_chunk, in_flight_slack=report.largest_chunk
        )
        if found:
            return f"rank {report.rank}: {found}"
    return None


def _norms(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """The gradient norm is global: real ranks must agree on it. Rehearsed ranks see different data."""
    if spec.mode.kind == "rehearsal":
        return None
    for step, scalars in enumerate(zip(*(report.result.scalars for report in reports), strict=True)):
        norms = {s.grad_norm for s in scalars}
        if len(norms) > 1:
            return f"ranks disagree on the gradient norm of step {step + 1}: {sorted(map(str, norms))}"
    return None
