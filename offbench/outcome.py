"""What a launch's exit and the files it left amount to: a status, a reason, and the first rank's own error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbench.launcher import Exit
from offbench.progress import Progress, ProgressTail, show_seconds
from offbench.record import Failure, Status


@dataclass(frozen=True)
class Outcome:
    """How one launch ended."""

    status: Status
    reason: str | None = None
    phase: str | None = None
    failure: Failure | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    """The worker's result: fields of RunRecord."""


def classify(folder: Path, end: Exit, timeout_s: float) -> Outcome:
    """Judge a launch by its exit and its folder. A failed rank counts only if it failed by itself: the earliest such
    failure decides, since its peers then fail too, only because it is gone."""
    where = last_progress(folder)
    phase, logs = where.phase if where else None, str(folder)
    if end.interrupted:
        return Outcome("interrupted", "interrupted by the user", phase)
    if end.timed_out:
        at = f"{where.phase} step {where.step} of {where.of}" if where and where.of else phase or "the start"
        reason = f"not done after {show_seconds(timeout_s)}, in {at}; stacks are in the record, logs in {folder.name}"
        return Outcome("timeout", reason, phase, Failure(phase=phase, log=logs, stacks=end.stacks))
    result = folder / "result.json"
    if end.code == 0 and result.exists():
        measured = json.loads(result.read_text())
        return Outcome(measured.get("status", "ok"), measured.get("reason"), measured.get("phase"), None, measured)
    first = first_failure(folder)
    if first is None:
        return Outcome("crash", _without_failure(folder, end), phase, Failure(phase=phase, log=logs))
    failure = Failure(
        rank=first.get("rank"),
        type=first.get("type"),
        message=first.get("message"),
        phase=first.get("phase"),
        stack=first.get("stack"),
        log=logs,
    )
    summary = (first.get("message") or "").strip().splitlines()
    reason = f"rank {failure.rank}: {failure.type}" + (f": {summary[0]}" if summary else "")
    return Outcome("oom" if first.get("oom") else "crash", reason, failure.phase or phase, failure)


def last_progress(folder: Path) -> Progress | None:
    """The last thing rank 0 said it was doing."""
    entries = ProgressTail(folder / "progress.jsonl").read()
    return entries[-1] if entries else None


def first_failure(folder: Path) -> dict[str, Any] | None:
    """The earliest failure that is no peer's, else the earliest of all, else None."""
    found = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    return min(found, key=lambda item: (bool(item.get("peer")), item.get("time_ns") or 0), default=None)


def _without_failure(folder: Path, end: Exit) -> str:
    """No rank left a failure: killed from outside, or dead before the worker's own code ran."""
    if end.code == 0:
        return "torchrun ended without an error and without a result"
    for log in sorted(folder.glob("logs/**/stderr.log")):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"local rank {log.parent.name} left no report; its last words: {lines[-1]}"
    return (
        f"torchrun ended with code {end.code} and no rank left a report: killed from outside, "
        "perhaps for host memory; see torchrun.log"
    )
