"""The schedules the engine can run, simulated side by side at several budgets; which of them nobody beats, and which
one to take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offbench import arms
from offbench.config import ArmSpec
from offbench.planner.inputs import Compute, Footprint, Layout, Links
from offbench.planner.policy import Policy
from offbench.planner.result import Simulated, Span
from offbench.planner.room import resident
from offbench.planner.simulate import simulate
from offbench.planner.tasks import SmallCopies
from offbench.units import GIB, gib

SHARES = (0.0, 0.125, 0.25, 0.5, 0.75)
"""Budgets of a plan, as shares of the state, where none are given."""
STAGINGS = (0.07, 0.14)
"""Staging of stream at step(), as shares of the state: 2 and 4 GiB of 28.4."""
AT_LOSS = (0.42, 0.56)
"""The most of it when the forward ends, alike: 12 and 16 GiB. What raises no peak, the default, is tried as well."""


@dataclass(frozen=True)
class Setting:
    """Everything but the schedule."""

    cut: Callable[[int], Layout]
    """The state in copies of at most so many bytes."""
    compute: Compute
    links: Links
    chunk_bytes: int
    """Cap of a chunk before it is cut into pieces."""
    footprint: Footprint
    small: SmallCopies
    in_place: bool = True
    """Whether updates may run in host memory: on an emulated link, whose copies are repeated, they cannot."""

    @property
    def layout(self) -> Layout:
        """The state in whole chunks."""
        return self.cut(self.chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of state of a rank."""
        return self.layout.nbytes

    def simulate(self, schedule: Policy, spans: list[Span] | None = None) -> Simulated:
        """One schedule here, cut as it says."""
        return simulate(
            schedule,
            self.cut(schedule.chunk_bytes),
            self.compute,
            self.links,
            small_copies_wait=self.small,
            footprint=self.footprint,
            spans=spans,
        )


@dataclass(frozen=True)
class Candidate:
    """One schedule and what the simulation says of it."""

    arm: ArmSpec
    simulated: Simulated
    floor_s: float
    """Least seconds of its copies; 0 when nothing moves."""

    @property
    def name(self) -> str:
        """`overlap, 4 slots`, or `stream, 4.0 to 14.0 GiB`: staging at step() and when the forward ends, where that is
        given."""
        arm = self.arm
        if arm.staging_bytes is not None:
            to = "" if arm.loss_bytes is None else f" to {gib(arm.loss_bytes)}"
            return f"{arm.name}, {gib(arm.staging_bytes)}{to} GiB"
        return arm.name if arm.slots is None else f"{arm.name}, {arm.slots} slots"

    @property
    def budget(self) -> int:
        """`--state-budget`, bytes."""
        return self.arm.resident_bytes


@dataclass(frozen=True)
class Choice:
    """What to run, and why."""

    candidate: Candidate
    meets_target: bool
    reason: str
    fits: bool = True
    """False: nothing fits the memory there is, and the candidate needs least."""


def budgets_of(nbytes: int) -> list[int]:
    """Budgets to show for so much state, in numbers that can be typed."""
    unit = _unit(nbytes)
    return sorted({round(share * nbytes / unit) * unit for share in SHARES})


def _unit(nbytes: int) -> int:
    return GIB if nbytes >= 8 * GIB else max(1, nbytes >> 6)


def _step(nbytes: int) -> int:
    return 1 << max(0, (nbytes >> 7).bit_length())  # a power of two: budgets that can be typed


def candidates(setting: Setting, budgets: Sequence[int]) -> list[Candidate]:
    """`none`, then for every budget the arms that offload. Slots are an axis of overlap where nothing is resident."""
    found = [_candidate(setting, arms.ARMS["none"].resolve())]
    for budget in budgets:
        found.append(at_budget(setting, "main", budget))
        found.append(at_budget(setting, "chunked", budget))
        found += [at_budget(setting, "overlap", budget, slots) for slots in ((2, 4, 8) if budget == 0 else (4,))]
        lean, fast = (stream_at(setting, budget, fastest) for fastest in (False, True))
        found += [lean] if lean == fast else [lean, fast]
        found += [at_budget(setting, "zerocopy", budget)] if setting.in_place else []
    return found


def at_budget(setting: Setting, name: str, budget: int, slots: int | None = None) -> Candidate:
    """An arm with so many bytes of state resident."""
    return _candidate(
        setting, arms.ARMS[name].resolve(chunk_bytes=setting.chunk_bytes, slots=slots, state_budget=budget)
    )


def stream_at(setting: Setting, budget: int, fastest: bool = False) -> Candidate:
    """stream with so many bytes of state resident. Of the ways to stage the rest those with the least peak, and of
    them the fastest; or the fastest, and of them the one with the least peak."""

    coarse = max(1, setting.nbytes >> 10)

    def cost(row: Candidate) -> tuple[float, float]:
        step, peak = _digits(row.simulated.step_s), float(row.simulated.peak_bytes // coarse)
        return (step, peak) if fastest else (peak, step)

    return min((_candidate(setting, spec) for spec in streams(setting, budget)), key=cost)


def streams(setting: Setting, budget: int) -> Iterator[ArmSpec]:
    """stream with every `--staging` and `--at-loss` that is tried."""
    unit = _unit(setting.nbytes)
    sizes = [max(unit, round(share * setting.nbytes / unit) * unit) for share in STAGINGS]
    at_loss = [max(unit, round(share * setting.nbytes / unit) * unit) for share in AT_LOSS]
    for staging, most in itertools.product(sizes, (*at_loss, None)):
        yield arms.ARMS["stream"].resolve(
            chunk_bytes=setting.chunk_bytes, state_budget=budget, staging_bytes=staging, loss_bytes=most
        )


def least_stream(setting: Setting, limit_s: float) -> Candidate | None:
    """stream with the least budget whose step takes at most `limit_s`; None where only all of the state does."""
    return _least(setting, limit_s, lambda budget: stream_at(setting, budget))


def least_memory(setting: Setting, limit_s: float) -> Candidate | None:
    """Of all arms that copy beside the forward, each with the least budget whose step takes at most `limit_s`, the one
    with the least peak; None where there is none."""
    ways: list[Callable[[int], Candidate]] = [lambda budget: stream_at(setting, budget)]
    ways += [lambda budget: at_budget(setting, "overlap", budget, 4)]
    ways += [lambda budget: at_budget(setting, "zerocopy", budget)] if setting.in_place else []
    found = [row for way in ways if (row := _least(setting, limit_s, way))]
    return min(found, key=lambda row: (row.simulated.peak_bytes, row.simulated.step_s), default=None)


def _least(setting: Setting, limit_s: float, at: Callable[[int], Candidate]) -> Candidate | None:
    """To a hundredth of the state or so: by bisection, since a larger budget is never slower but for the packing of
    whole chunks, and for zerocopy by a little."""
    high = setting.nbytes
    unit = _step(high)
    best = at(0)
    if best.simulated.step_s <= limit_s:
        return best
    few, many = 0, -(-high // unit)
    while many - few > 1:
        middle = (few + many) // 2
        tried = at(middle * unit)
        if tried.simulated.step_s <= limit_s:
            many, best = middle, tried
        else:
            few = middle
    return best if best.simulated.step_s <= limit_s else None


def fullest_stream(setting: Setting, most: int) -> Candidate | None:
    """stream with the largest budget whose peak is at most `most` bytes, to a hundredth of the state or so; None where
    none is."""
    unit = _step(setting.nbytes)
    few, many, best = -1, -(-setting.nbytes // unit) + 1, None
    while many - few > 1:
        middle = (few + many) // 2
        tried = stream_at(setting, middle * unit)
        if tried.simulated.peak_bytes <= most:
            few, best = middle, tried
        else:
            many = middle
    return best


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one matches or beats in both step time and peak memory; of equals the first."""

    costs = [_cost(row) for row in found]

    def beaten(place: int) -> bool:
        step, peak = costs[place]
        others = [(cost, index) for index, cost in enumerate(costs) if index != place]
        return any(
            cost[0] <= step and cost[1] <= peak and (cost != costs[place] or index < place) for cost, index in others
        )

    return [row for place, row in enumerate(found) if not beaten(place)]


def choose(found: Sequence[Candidate], target: float, most: int | None = None) -> Choice:
    """The offloaded schedule with the least peak memory among those within `target` times the step of `none`; where
    there is none, the fastest. most: bytes of GPU memory, which none of them may exceed."""
    none, *offloaded = found
    least = min(offloaded, key=lambda row: (row.simulated.peak_bytes, row.simulated.step_s))
    offloaded = [row for row in offloaded if most is None or row.simulated.peak_bytes <= most]
    if most is not None and not offloaded:
        peak = f"{least.name} needs least, {gib(least.simulated.peak_bytes)} GiB"
        return Choice(least, False, f"nothing here fits into {gib(most)} GiB: {peak}", fits=False)
    limit = target * none.simulated.step_s * (1 + 1e-9)
    within = [row for row in offloaded if row.simulated.step_s <= limit]
    if within:
        best = min(within, key=lambda row: (row.simulated.peak_bytes, row.simulated.step_s))
        saved = (none.simulated.peak_bytes - best.simulated.peak_bytes) / GIB
        if saved <= 0:
            return Choice(
                none, True, "with these budgets all state stays on the GPU, so nothing that offloads saves memory"
            )
        return Choice(
            best,
            True,
            f"of all within {target:g} x none it needs the least memory, {gib(best.simulated.peak_bytes)} GiB at its "
            f"peak, {saved:.1f} GiB less than none",
        )
    best = min(offloaded, key=_cost)
    times = best.simulated.step_s / none.simulated.step_s
    reason = (
        f"no schedule that offloads stays within {target:g} x none on this link; this is the fastest, at "
        f"{times:.3f} x. If the state fits the GPU beside the rest, keep it there (none)"
    )
    if most is not None:
        fit = f"{gib(most)} GiB; this is the fastest that fits, at {times:.3f} x"
        keep = ". All state fits the GPU beside the rest: keep it there (none)"
        reason = f"no schedule that offloads stays within {target:g} x none and {fit}"
        reason += keep if none.simulated.peak_bytes <= most else ""
    return Choice(best, False, reason)


def _candidate(setting: Setting, spec: ArmSpec) -> Candidate:
    policy = Policy.of(arms.ARMS[spec.name].schedule(spec))
    return Candidate(spec, setting.simulate(policy), _floor_s(setting, policy))


def _floor_s(setting: Setting, policy: Policy) -> float:
    if not policy.offloaded:
        return 0.0
    layout = setting.cut(policy.chunk_bytes)
    return setting.links.floor_s(sum(c.nbytes for c in layout.chunks[resident(layout, policy) :]))


def _digits(seconds: float) -> float:
    # Step times within a millionth are the same: the last digits are rounding of the simulation.
    return float(f"{seconds:.6g}")


def _cost(row: Candidate) -> tuple[float, float]:
    return _digits(row.simulated.step_s), float(row.simulated.peak_bytes)
