"""The schedules the engine can run, simulated side by side; which of them nobody beats, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbench import arms
from offbench.config import ArmSpec
from offbench.planner.inputs import Compute, Layout, Links
from offbench.planner.simulate import Simulated, simulate

CANDIDATES: tuple[tuple[str, int | None], ...] = (
    ("none", None),
    ("main", None),
    ("chunked", None),
    ("overlap", 2),
    ("overlap", 4),
    ("overlap", 8),
)
"""Arms, and slots where not the arm's own."""


@dataclass(frozen=True)
class Candidate:
    """One schedule and what the simulation says of it."""

    arm: ArmSpec
    simulated: Simulated
    floor_s: float
    """Least seconds of its copies; 0 when nothing moves."""

    @property
    def name(self) -> str:
        """`overlap, 4 slots`."""
        return self.arm.name if self.arm.slots is None else f"{self.arm.name}, {self.arm.slots} slots"


@dataclass(frozen=True)
class Choice:
    """What to run, and why."""

    candidate: Candidate
    meets_target: bool
    reason: str


def candidates(layout: Layout, compute: Compute, links: Links, chunk_bytes: int) -> list[Candidate]:
    """Every candidate, `none` first."""
    found = []
    for name, slots in CANDIDATES:
        arm = arms.ARMS[name]
        spec = arm.resolve(chunk_bytes=chunk_bytes, slots=slots, pieces=1)
        schedule = arm.schedule(spec)
        floor = links.floor_s(layout.nbytes) if schedule.offloaded else 0.0
        found.append(Candidate(spec, simulate(schedule, layout, compute, links), floor))
    return found


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one matches or beats in both step time and state on the GPU; of equals the first."""

    costs = [_cost(row) for row in found]

    def beaten(place: int) -> bool:
        step, state = costs[place]
        others = [(cost, index) for index, cost in enumerate(costs) if index != place]
        return any(
            cost[0] <= step and cost[1] <= state and (cost != costs[place] or index < place) for cost, index in others
        )

    return [row for place, row in enumerate(found) if not beaten(place)]


def choose(found: Sequence[Candidate], target: float) -> Choice:
    """The offloaded schedule with the least state on the GPU within `target` times the step of `none`; where there
    is none, the fastest of those nobody beats."""
    none, *offloaded = found
    limit = target * none.simulated.step_s
    within = [row for row in offloaded if row.simulated.step_s <= limit]
    if within:
        best = min(within, key=lambda row: (row.simulated.peak_state_bytes, row.simulated.step_s))
        return Choice(best, True, f"the least state on the GPU of all within {target:g} x none")
    best = min(offloaded, key=lambda row: (row.simulated.step_s, row.simulated.peak_state_bytes))
    times = best.simulated.step_s / none.simulated.step_s
    reason = (
        f"no schedule that offloads stays within {target:g} x none on this link; this is the fastest, at "
        f"{times:.3f} x. If the state fits the GPU beside the rest, keep it there (none)"
    )
    return Choice(best, False, reason)


def _cost(row: Candidate) -> tuple[float, float]:
    # Step times within a millionth are the same: the last digits are rounding of the simulation.
    return float(f"{row.simulated.step_s:.6g}"), float(row.simulated.peak_state_bytes)
