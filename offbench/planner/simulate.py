"""Simulate the engine's own Schedule for one rank: the order of `offload.engine`, on a link with flat rates.

Note [What is modelled]
    Three queues, each first in, first out, as the engine's streams are: move-in, update, write-back. Their waits are
    those of Note [Who waits for whom] in `offload/engine.py`, and the staging ring is the engine's own.
    Copies share the link as a fluid: `Links.now`. An update takes its share of the GPU, so forward and backward
    stand still while it runs: AdamW is bound by memory bandwidth and gains nothing beside them.
    The forward's CPU side is one unit ahead: as the GPU begins a unit, the next one's chunks are asked for. Expert
    counts are read back once a layer, so the CPU cannot run further.
    Not modelled: launch cost, the small copies of FSDP that queue behind bulk ones, other users of the link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from offbench.offload.chunks import plan_staging
from offbench.offload.schedule import Schedule
from offbench.planner.inputs import Compute, Layout, Links

MOST_STEPS = 40
"""Steps after which step times that do not repeat are averaged."""
SAME = 1e-9
"""Two numbers this close, relatively, are one: step times that repeat, and ends at the same moment."""


@dataclass(frozen=True)
class Waits:
    """Seconds per step in which the compute stream had nothing to do, by what it waited for."""

    move_in: float = 0.0
    """State on its way to the GPU."""
    slot: float = 0.0
    """Staging memory, or host memory, still being written back."""
    write_back: float = 0.0
    """The end of a synchronous step."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.move_in + self.slot + self.write_back


@dataclass(frozen=True)
class Simulated:
    """A steady step of one schedule."""

    step_s: float
    waits: Waits
    staging_bytes: int
    peak_state_bytes: int
    """Most optimizer state, or memory set aside for it, on the GPU at any time."""
    state_at_backward_end_bytes: int


@dataclass(frozen=True)
class _Task:
    """A stretch of the compute stream."""

    seconds: float
    updated: int = 0
    """Begins when so many updates have run since the start."""
    written: int = 0
    """Begins when so many chunks have been written back since the start."""
    queue: int = 0
    """As it begins, so many chunks have been queued by the CPU since the start."""
    ready: bool = False
    """Its end is the end of clipping: an optimizer step begins."""
    ends_step: bool = False


def simulate(schedule: Schedule, layout: Layout, compute: Compute, links: Links, *, ideal: bool = False) -> Simulated:
    """The steady step of `schedule`: several steps are simulated until their time repeats.

    ideal: updates beside copies take no time, as closed-form models of policies assume.
    """
    if not schedule.offloaded:
        return Simulated(compute.total, Waits(), 0, layout.nbytes, layout.nbytes)
    return _Run(schedule, layout, compute, links, hidden=ideal and schedule.copy_streams).steady()


def resident(layout: Layout, schedule: Schedule) -> int:
    """How many leading chunks never move: those that fit whole into `resident_bytes`."""
    ends = itertools.accumulate(chunk.nbytes for chunk in layout.chunks)
    return sum(1 for end in ends if end <= schedule.resident_bytes)


class _Run:
    """The state of one simulation. Chunks are numbered on over the steps, since every queue is first in, first out:
    chunk k of step s is number s * chunks + k, and three counters say how far each queue is."""

    def __init__(self, schedule: Schedule, layout: Layout, compute: Compute, links: Links, hidden: bool) -> None:
        self.schedule, self.layout, self.compute, self.links = schedule, layout, compute, links
        # Resident chunks lead the queues, so bytes that take no time there change nobody's order.
        self.kept = kept = resident(layout, schedule)
        """Leading chunks that never move; `lead` counts those behind them."""
        moving = [replace(chunk, nbytes=0) if chunk.index < kept else chunk for chunk in layout.chunks]
        self.resident = sum(chunk.nbytes for chunk in layout.chunks[:kept])
        self.sizes = sizes = [chunk.nbytes for chunk in moving]
        self.count, self.total = len(sizes), layout.nbytes
        self.staging = plan_staging(moving, schedule.slots if schedule.copy_streams else None)
        self.displaced = [len(self.staging.displaced(moving, index)) for index in range(self.count)]
        update = 0.0 if hidden else compute.update
        self.update_s = [update * chunk.nbytes / self.total for chunk in layout.chunks]
        self.now = 0.0
        self.queued = self.begun = 0
        """Chunks queued by the CPU; optimizer steps whose staging memory compute has handed over."""
        self.loaded = self.updated = self.written = 0
        self.left_in, self.left_out = float(sizes[0]), float(sizes[0])
        self.left_update = self.update_s[0]
        self.waited = {"move_in": 0.0, "slot": 0.0, "write_back": 0.0}

    def steady(self) -> Simulated:
        """Run steps until one ends as the one before did: with as much left to move, after as long a time."""
        times: list[float] = []
        waits: list[Waits] = []
        late, behind = False, (0, math.inf)
        for step in range(MOST_STEPS):
            began = self.now
            self.waited = dict.fromkeys(self.waited, 0.0)
            for task in self._tasks(step):
                self._run(task)
                if task.ready:
                    late = self.written < step * self.count
            times.append(self.now - began)
            waits.append(Waits(**self.waited))
            # A write-back that falls further behind with every step is not steady, though the times may repeat.
            before, behind = behind, (step * self.count - self.written, self.left_out)
            repeats = before[0] == behind[0] and abs(before[1] - behind[1]) <= SAME * self.total
            if repeats and abs(times[-1] - times[-2]) <= SAME * times[-1]:
                return self._result(times[-1:], waits[-1:], late)
        return self._result(times[MOST_STEPS // 2 :], waits[MOST_STEPS // 2 :], late)

    def _result(self, times: list[float], waits: list[Waits], late: bool) -> Simulated:
        nbytes, n = self.staging.nbytes, len(times)
        step_s = sum(times) / n
        # A backlog that still grows ends where copies set the pace: the time that is short of it becomes a wait.
        short = max(0.0, self.links.floor_s(sum(self.sizes)) - step_s)
        mean = Waits(
            sum(w.move_in for w in waits) / n,
            sum(w.slot for w in waits) / n + short,
            sum(w.write_back for w in waits) / n,
        )
        # A step takes a new arena while the write-back of the last one may still hold the old.
        at_end = self.resident + (nbytes if late else 0)
        return Simulated(step_s + short, mean, nbytes, at_end + nbytes, at_end)

    def _tasks(self, step: int) -> Iterator[_Task]:
        """One step on the compute stream: forward, backward and clip, then what step() makes it wait for."""
        layout, past, here = self.layout, (step - 1) * self.count, step * self.count
        deferred, ahead = self.schedule.deferred, self.schedule.ahead
        units = len(layout.shares)
        for unit, share in enumerate(layout.shares):
            needs = past + layout.last_chunk[unit] + 1 if deferred else 0
            asked = layout.last_chunk[min(unit + 1, units - 1)] + ahead + 1
            queue = past + min(asked, self.count) if deferred and step else 0
            yield _Task(share * self.compute.forward, updated=max(needs, 0), queue=queue)
        yield _Task(self.compute.backward + self.compute.clip, ready=True)
        if deferred:
            first = max(self.kept + self.schedule.lead, layout.last_chunk[0] + ahead + 1)
            yield _Task(0.0, queue=here + min(first, self.count), ends_step=True)
        else:
            yield _Task(0.0, queue=here + self.count)
            yield _Task(0.0, updated=here + self.count, written=here + self.count, ends_step=True)

    def _run(self, task: _Task) -> None:
        """Advance time until the task has run."""
        while self.updated < task.updated or self.written < task.written:
            self._advance(None)
        self.queued = max(self.queued, task.queue)
        left = task.seconds
        while left > 0:
            left = self._advance(left)
        self.begun += task.ready

    def _may_move_in(self) -> bool:
        number = self.loaded
        if number >= self.queued or number // self.count >= self.begun:
            return False
        start = number - number % self.count
        slot_free = start + self.displaced[number % self.count]
        host_current = number - self.count + 1
        freed = 0 if slot_free == start else slot_free
        return self.written >= max(freed, host_current)

    def _may_update(self) -> bool:
        return self.loaded > self.updated and (self.schedule.copy_streams or self.loaded % self.count == 0)

    def _may_move_out(self) -> bool:
        return self.updated > self.written and (self.schedule.copy_streams or self.updated % self.count == 0)

    def _advance(self, left: float | None) -> float:
        """Go to the next moment at which something ends. left: seconds of the running task, None while it waits;
        returns what is left of it."""
        moving_in, updating, moving_out = self._may_move_in(), self._may_update(), self._may_move_out()
        rate_in, rate_out = self.links.now(moving_in, moving_out)
        ends = []
        if moving_in:
            ends.append(self.left_in / rate_in)
        if updating:
            ends.append(self.left_update)
        elif left is not None:
            ends.append(left)
        if moving_out:
            ends.append(self.left_out / rate_out)
        assert ends, f"{self.schedule.name}: chunk {self.loaded % self.count} is waited for, but nothing runs"
        passed = min(ends)
        over = passed * (1 + SAME)
        self.now += passed
        if left is None and not updating:
            self._count_wait(passed, moving_in)
        if left is not None and not updating:
            left = 0.0 if left <= over else left - passed
        self._progress(passed, over, rate_in if moving_in else 0, updating, rate_out if moving_out else 0)
        return 0.0 if left is None else left

    def _progress(self, passed: float, over: float, rate_in: float, updating: bool, rate_out: float) -> None:
        """Let `passed` seconds of copies and updates happen; what would end by `over` has ended."""
        if rate_in:
            self.left_in -= passed * rate_in
            if self.left_in <= (over - passed) * rate_in:
                self.loaded += 1
                self.left_in = float(self.sizes[self.loaded % self.count])
        if updating:
            self.left_update -= passed
            if self.left_update <= over - passed:
                self.updated += 1
                self.left_update = self.update_s[self.updated % self.count]
        if rate_out:
            self.left_out -= passed * rate_out
            if self.left_out <= (over - passed) * rate_out:
                self.written += 1
                self.left_out = float(self.sizes[self.written % self.count])

    def _count_wait(self, seconds: float, moving_in: bool) -> None:
        if moving_in:
            self.waited["move_in"] += seconds
        elif self.loaded < self.queued:
            self.waited["slot"] += seconds
        else:
            self.waited["write_back"] += seconds
