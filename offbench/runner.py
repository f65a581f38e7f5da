"""Run a plan of launches: interleave, skip what is done or cannot fit, launch, classify, append. One record a launch.

Arms are interleaved in rounds that change direction (A B C, C B A, ...), so that neither heat nor order favours one.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offbench.config import RunSpec
from offbench.environment import identity
from offbench.estimate import estimate, shortfalls
from offbench.hardware import Hardware
from offbench.launcher import Launcher
from offbench.naming import arm_name
from offbench.outcome import AFTERWARDS, UNENDED, Outcome, classify
from offbench.planner.ideal import set_ideal
from offbench.progress import Display, phase_seconds, show_seconds
from offbench.record import RunRecord
from offbench.results_file import ResultsFile
from offbench.units import gib


@dataclass(frozen=True)
class Planned:
    """One launch of the plan."""

    order: int
    """Position in the plan, from 0."""
    launch: int
    """Which repeat of this spec, from 1."""
    spec: RunSpec


def interleave(specs: Sequence[RunSpec], launches: int, past: Iterable[RunRecord] = ()) -> list[Planned]:
    """`launches` rounds over the specs, every second one backwards. A spec given twice is launched twice a round.

    `past`: records already in the results file; the numbers of repeats go on after them.
    """
    count = Counter[str]()
    for record in past:
        count[record.run_id] = max(count[record.run_id], record.launch)
    planned: list[Planned] = []
    for round_number in range(launches):
        for spec in specs if round_number % 2 == 0 else reversed(specs):
            count[spec.run_id] += 1
            planned.append(Planned(len(planned), count[spec.run_id], spec))
    return planned


def without_done(plan: Sequence[Planned], past: Iterable[RunRecord], env: dict[str, Any]) -> list[Planned]:
    """The plan less the launches that have an ok record of the same spec, repeat, versions and hardware."""
    done = {
        (record.run_id, record.launch)
        for record in past
        if record.status == "ok" and identity(record.env, record.spec) == identity(env, record.spec)
    }
    return [item for item in plan if (item.spec.run_id, item.launch) not in done]


@dataclass(frozen=True)
class RunReport:
    """The records a run appended, in order, and whether it was cut short."""

    records: list[RunRecord]
    interrupted: bool


@dataclass(frozen=True)
class Runner:
    """Runs a plan. Everything it needs from outside is passed in, so tests replace any of it."""

    launcher: Launcher
    results: ResultsFile
    display: Display
    hardware: Hardware
    env: dict[str, Any]
    """This host's environment, for records of launches that could not write their own."""
    timeout_s: float
    clock: Callable[[], float] = time.monotonic

    def run(self, plan: Sequence[Planned]) -> RunReport:
        """Launch the plan in order; a launch that fails is recorded and the others go on."""
        records: list[RunRecord] = []
        with terminations_interrupt():
            try:
                for number, item in enumerate(plan, start=1):
                    rest = self._rest(records, plan)
                    record, interrupted = self._one(item, f"launch {number} of {len(plan)}", rest)
                    records.append(record)
                    if interrupted:
                        return RunReport(records, interrupted=True)
            except KeyboardInterrupt:
                return RunReport(records, interrupted=True)
        return RunReport(records, interrupted=False)

    def _rest(self, records: Sequence[RunRecord], plan: Sequence[Planned]) -> str:
        """`, about 3 min left` once a launch has shown how long one takes."""
        took = [record.duration_s for record in records if record.duration_s]
        if not took:
            return ""
        return f", about {show_seconds(sum(took) / len(took) * (len(plan) - len(records)))} left"

    def _one(self, item: Planned, number: str, rest: str) -> tuple[RunRecord, bool]:
        """Launch one spec, or refuse it, and append its record; and whether it was interrupted."""
        name, interrupted = arm_name(item.spec), False
        short = shortfalls(item.spec, self.hardware)
        if short:
            outcome = Outcome("skipped", "; ".join(short))
            record = build_record(item, outcome, self.env)
        else:
            self.display.start(f"{number}{rest}: {name}, repeat {item.launch}", item.spec.window.steps)
            folder = fresh_folder(self.results.path, item)
            started, began = datetime.now(UTC), self.clock()
            end = self.launcher.launch(item.spec, folder, self.timeout_s, self.display.update)
            outcome, interrupted = classify(folder, end, self.timeout_s), end.interrupted
            record = build_record(item, outcome, self.env, started, self.clock() - began)
            ended = datetime.now(UTC)
            record.wall_s = phase_seconds(folder / "progress.jsonl", started.timestamp(), ended.timestamp())
        set_ideal(record, self.results.path)
        self.results.append(record)
        self.display.finish(closing_line(name, record))
        return record, interrupted


def build_record(
    item: Planned,
    outcome: Outcome,
    env: dict[str, Any],
    started: datetime | None = None,
    duration_s: float | None = None,
) -> RunRecord:
    """The worker's figures plus what only the runner knows."""
    need = estimate(item.spec)
    measured = dict(outcome.measured)
    measured["host"] = {
        **(measured.get("host") or {}),
        "estimated_gpu_bytes": need.gpu_bytes or None,
        "estimated_host_bytes": need.host_bytes,
        "estimated_pinned_bytes": need.pinned_bytes,
    }
    measured |= {
        "run_id": item.spec.run_id,
        "launch": item.launch,
        "order": item.order,
        "started_at": started.isoformat(timespec="seconds") if started else None,
        "duration_s": round(duration_s, 3) if duration_s is not None else None,
        "status": outcome.status,
        "reason": outcome.reason,
        "phase": outcome.phase,
        "failure": outcome.failure,
        "spec": item.spec,
        "source": "measured",
        "env": measured.get("env") or env,
    }
    return RunRecord.model_validate(measured)


def closing_line(name: str, record: RunRecord) -> str:
    """One line when a launch ends: what it took, and how the estimate compares with the measured peak."""
    if record.status != "ok":
        return f"  {name}: {record.status}: {record.reason}"
    parts = [f"{record.step_s:.4g} s a step" if record.step_s is not None else "ok"]
    measured, guess = record.peak.steady_allocated_bytes, record.host.estimated_gpu_bytes
    if measured and guess:
        parts.append(f"peak {gib(measured)} GiB allocated (estimated {gib(guess)})")
    rss, rss_guess = record.host.rss_bytes, record.host.estimated_host_bytes
    if rss and rss_guess:
        parts.append(f"{gib(rss)} GiB resident a process (estimated {gib(rss_guess)})")
    locked, locked_guess = record.host.pinned_locked_bytes, record.host.estimated_pinned_bytes
    if locked and locked_guess:
        parts.append(f"{gib(locked)} GiB pinned (estimated {gib(locked_guess)})")
    late = [warning for warning in record.warnings if warning.startswith((AFTERWARDS, UNENDED))]
    return "\n  ".join([f"  {name}: {', '.join(parts)}", *late])


def run_root(results: Path) -> Path:
    """Where a results file's launches keep their logs: `x.jsonl` -> `x.runs`."""
    return results.with_name(results.stem + ".runs").absolute()


def fresh_folder(results: Path, item: Planned) -> Path:
    """A new, empty run folder. A repeat that failed before keeps its own, with its logs."""
    base = run_root(results) / f"{item.spec.run_id}-{item.launch}"
    folder, tries = base, 1
    while folder.exists():
        tries += 1
        folder = base.with_name(f"{base.name}-try{tries}")
    folder.mkdir(parents=True)
    return folder


@contextmanager
def terminations_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal end a run as Ctrl-C does: children ended, record kept."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {name: signal.signal(name, interrupt) for name in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
