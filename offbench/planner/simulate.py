"""Simulate the engine's own Schedule for one rank: the order of `offload.engine`, on a link with flat rates.

Note [What is modelled]
    Three queues, each first in, first out, as the engine's streams are: move-in, update, write-back. Their waits are
    those of Note [Who waits for whom] in `offload/engine.py`; `room` decides whether memory lets a chunk move.
    Copies share the link as a fluid: `Links.now`. An update takes its share of the GPU, so forward and backward
    stand still while it runs: AdamW is bound by memory bandwidth and gains nothing beside them.
    An update in host memory is its own copy: nothing is staged, it takes as long as the link makes it
    (`Links.in_place`), and forward runs beside it on the multiprocessors that its programs leave.
    What the compute stream does and waits for, and when the host queues chunks: Notes in `tasks`.
    Not modelled: launch cost, other users of the link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offbench.offload.schedule import Schedule
from offbench.offload.zerocopy import PROGRAMS
from offbench.planner.inputs import MULTIPROCESSORS, Compute, Footprint, Layout, Links
from offbench.planner.policy import Policy
from offbench.planner.result import Simulated, Span, Waits
from offbench.planner.room import Progress, Sums, make_room, resident
from offbench.planner.tasks import SmallCopies, Task, tasks

MOST_STEPS = 40
"""Steps after which step times that do not repeat are averaged."""
SAME = 1e-9
"""Two numbers this close, relatively, are one: step times that repeat, and ends at the same moment."""


def simulate(
    schedule: Schedule,
    layout: Layout,
    compute: Compute,
    links: Links,
    *,
    ideal: bool = False,
    small_copies_wait: SmallCopies | bool = False,
    footprint: Footprint | None = None,
    spans: list[Span] | None = None,
) -> Simulated:
    """The steady step of `schedule`: several steps are simulated until their time repeats.

    ideal: updates beside copies take no time, as closed-form models of policies assume.
    spans: filled with what happens in the steady step, moment by moment.
    small_copies_wait: which of a trainer's own small copies wait behind bulk ones; True: all of them.
    """
    policy, used = Policy.of(schedule), footprint or Footprint()
    if policy.loss_bytes is None and policy.write_back == "backward" and not policy.prefetch:
        policy = replace(policy, loss_bytes=used.left_at_loss)
    all_or_none = SmallCopies(bool(small_copies_wait), bool(small_copies_wait))
    small = small_copies_wait if isinstance(small_copies_wait, SmallCopies) else all_or_none
    if not schedule.offloaded:
        n = layout.nbytes
        return Simulated(compute.total, Waits(), 0, n, n, n, n + round(used.most))
    hidden = ideal and schedule.copy_streams
    return _Run(policy, layout, compute, links, hidden, small, used, spans).steady()


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        compute: Compute,
        links: Links,
        hidden: bool,
        small: SmallCopies,
        used: Footprint,
        spans: list[Span] | None,
    ) -> None:
        self.policy, self.layout, self.compute, self.links = policy, layout, compute, links
        self.small, self.used, self.spans = small, used, spans
        kept = resident(layout, policy)
        # Resident chunks lead the queues, so bytes that take no time there change nobody's order.
        in_place = policy.update == "host_memory"
        still = len(layout.chunks) if in_place else kept
        moving = [replace(chunk, nbytes=0) if chunk.index < still else chunk for chunk in layout.chunks]
        self.kept, self.resident = kept, sum(chunk.nbytes for chunk in layout.chunks[:kept])
        self.beside = range(kept, still)
        """Chunks whose updates run beside the forward."""
        self.sizes = sizes = [chunk.nbytes for chunk in moving]
        self.count, self.total = len(sizes), layout.nbytes
        self.moves = Sums(sizes)
        self.room = make_room(policy, layout, moving)
        update = 0.0 if hidden else compute.update
        self.update_s = [update * chunk.nbytes / self.total for chunk in layout.chunks]
        for index in self.beside:
            self.update_s[index] = max(self.update_s[index], 2 * layout.chunks[index].nbytes / links.in_place)
        self.now = 0.0
        self.at = Progress(self.count)
        self.left_in, self.left_out = float(sizes[0]), float(sizes[0])
        self.left_update = self.update_s[0]
        self.task, self.began = Task(0.0), 0.0
        self.waited = dict.fromkeys(("move_in", "slot", "write_back", "small", "slowed"), 0.0)
        self.peak_state = self.peak = self.at_loss = self.at_end = 0.0

    def steady(self) -> Simulated:
        """Run steps until one ends as the one before did: with as much left to move, after as long a time."""
        times: list[float] = []
        waits: list[Waits] = []
        behind: tuple[float, ...] = ()
        for step in range(MOST_STEPS):
            began = self.now
            self.waited = dict.fromkeys(self.waited, 0.0)
            self.peak_state = self.peak = 0.0
            self.began = began
            if self.spans is not None:
                self.spans.clear()
            for task in tasks(
                self.policy, self.layout, self.compute, step, self.kept, self.room.forced[0], self.small
            ):
                self._run(task)
            times.append(self.now - began)
            waits.append(Waits(**self.waited))
            # A write-back that falls further behind with every step is not steady, though the times may repeat.
            here, at = step * self.count, self.at
            before, behind = behind, (here - at.written, here - at.loaded, self.left_out, self.left_in)
            repeats = before[:2] == behind[:2] and all(
                abs(a - b) <= SAME * self.total for a, b in zip(before[2:], behind[2:], strict=True)
            )
            if repeats and abs(times[-1] - times[-2]) <= SAME * times[-1]:
                return self._result(times[-1:], waits[-1:])
        return self._result(times[MOST_STEPS // 2 :], waits[MOST_STEPS // 2 :])

    def _result(self, times: list[float], waits: list[Waits]) -> Simulated:
        n = len(times)
        step_s = sum(times) / n
        # A backlog that still grows ends where copies set the pace: the time that is short of it becomes a wait.
        short = max(0.0, self.links.floor_s(sum(self.sizes)) - step_s)
        mean = Waits(
            sum(w.move_in for w in waits) / n,
            sum(w.slot for w in waits) / n + short,
            sum(w.write_back for w in waits) / n,
            sum(w.small for w in waits) / n,
            sum(w.slowed for w in waits) / n,
        )
        state = (self.peak_state, self.at_end, self.at_loss)
        peak_state, at_end, at_loss = (self.resident + round(nbytes) for nbytes in state)
        staging = self.room.nbytes if self.room.nbytes is not None else round(self.peak_state)
        peak = self.resident + round(self.peak)
        return Simulated(step_s + short, mean, staging, peak_state, at_end, at_loss, peak)

    def _run(self, task: Task) -> None:
        """Advance time until the task has run."""
        at, self.task = self.at, task
        if task.reads_back:
            self._wait_behind(self._may_move_out)
        at.queued = max(at.queued, task.queue)
        while at.updated < task.updated or at.written < task.written:
            self._advance(None)
        if task.backward:
            self.at_loss = self.room.held(at)
            at.backwards += 1
        if task.uploads:
            self._wait_behind(self._may_move_in)
        left = task.seconds
        while left > 0:
            left = self._advance(left)
        if task.ready:
            self.at_end = self.room.held(at)
            at.begun += 1
            self._remember()

    def _wait_behind(self, bulk: Callable[[], bool]) -> None:
        """A small copy has come up: it waits for as long as its copy engine has a bulk one to serve."""
        while bulk():
            self._advance(None, "small")

    def _may_move_in(self) -> bool:
        return self.at.loaded < self.at.queued and self.room.may_move_in(self.at)

    def _may_update(self) -> bool:
        at = self.at
        whole = self.policy.copy_streams or at.loaded % self.count == 0
        return at.loaded > at.updated and at.updated // self.count < at.begun and whole

    def _may_move_out(self) -> bool:
        at = self.at
        whole = self.policy.copy_streams or at.updated % self.count == 0
        return at.updated > at.written and whole and self.room.may_move_out(at)

    def _advance(self, left: float | None, waits_for: str | None = None) -> float:
        """Go to the next moment at which something ends. left: seconds of the running task, None while it waits;
        returns what is left of it."""
        moving_in, updating, moving_out = self._may_move_in(), self._may_update(), self._may_move_out()
        beside = updating and self.at.updated % self.count in self.beside
        alone = updating and not beside
        pace = 1 - PROGRAMS / MULTIPROCESSORS if beside else 1.0
        rate_in, rate_out = self.links.now(moving_in, moving_out)
        ends = []
        if moving_in:
            ends.append(self.left_in / rate_in)
        if updating:
            ends.append(self.left_update)
        if left is not None and not alone:
            ends.append(left / pace)
        if moving_out:
            ends.append(self.left_out / rate_out)
        assert ends, f"{self.policy.name}: chunk {self.at.loaded % self.count} is waited for, but nothing runs"
        passed = min(ends)
        over = passed * (1 + SAME)
        self.at.moving_in = moving_in
        self._remember(left)
        waits_for = waits_for or self._waits_for(moving_in or beside)
        if self.spans is not None:
            doing = "update" if alone else waits_for if left is None else self.task.phase
            start, held = self.now - self.began, self.resident + self.room.held(self.at)
            self.spans.append(Span(start, start + passed, doing, moving_in, moving_out, held))
        self.now += passed
        if left is None and not alone:
            self.waited[waits_for] += passed
        if left is not None and not alone:
            self.waited["slowed"] += passed * (1 - pace)
            left = 0.0 if left <= over * pace else left - passed * pace
        self._remember(left)
        self._progress(passed, over, rate_in if moving_in else 0, updating, rate_out if moving_out else 0)
        return 0.0 if left is None else left

    def _progress(self, passed: float, over: float, rate_in: float, updating: bool, rate_out: float) -> None:
        """Let `passed` seconds of copies and updates happen; what would end by `over` has ended."""
        at = self.at
        if rate_in:
            self.left_in -= passed * rate_in
            if self.left_in <= (over - passed) * rate_in:
                at.loaded += 1
                at.moving_in = False
                self.left_in = float(self.sizes[at.loaded % self.count])
        if updating:
            self.left_update -= passed
            if self.left_update <= over - passed:
                at.updated += 1
                self.left_update = self.update_s[at.updated % self.count]
        if rate_out:
            self.left_out -= passed * rate_out
            if self.left_out <= (over - passed) * rate_out:
                at.written += 1
                self.left_out = float(self.sizes[at.written % self.count])

    def _remember(self, left: float | None = None) -> None:
        """Keep the largest memory so far of this step."""
        held = self.room.held(self.at)
        self.peak_state = max(self.peak_state, held)
        fresh = 1 - self.room.freed(self.at) / max(1, self.total)
        task, running = self.task, left is not None
        done = task.done + (task.share * (1 - left / task.seconds) if left is not None and task.seconds else 0.0)
        self.peak = max(self.peak, held + self.used.now(task.phase, done, running, fresh))

    def _waits_for(self, moving_in: bool) -> str:
        if moving_in:
            return "move_in"
        return "slot" if self.at.loaded < self.at.queued else "write_back"
