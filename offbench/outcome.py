"""What a launch's exit and the files it left amount to: a status, a reason, and the first rank's own error."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbench.launcher import Exit
from offbench.progress import Progress, ProgressTail, show_seconds
from offbench.record import Failure, Status

_ENDED = re.compile(r"\(local_rank: (\d+)\)\s+exitcode\s*: -(\d+)")
"""A rank that a signal ended, in torchrun's summary."""
AFTERWARDS = "measured, but watched steps, window check and traces, which follow, are not all there"
UNENDED = "all is measured, but the launch did not end as it should"


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
    """Judge a launch by its exit and its folder. One that handed its figures over is measured, however it ended: a
    warning says what is missing and why, and its failure is kept."""
    result = folder / "result.json"
    ended_well = end.code == 0 and not end.interrupted and not end.timed_out
    failed = None if ended_well and result.exists() else _failed(folder, end, timeout_s)
    if not result.exists():
        assert failed is not None
        return failed
    measured = json.loads(result.read_text())
    what = UNENDED if measured.pop("complete", True) else AFTERWARDS
    if failed is not None:
        measured["warnings"] = [*measured.get("warnings", []), f"{what}: {failed.reason}"]
    status, reason, phase = (measured.get(name) for name in ("status", "reason", "phase"))
    return Outcome(status or "ok", reason, phase, failed.failure if failed is not None else None, measured)


def _failed(folder: Path, end: Exit, timeout_s: float) -> Outcome:
    """What became of a launch without a result. A failed rank counts only if it failed by itself: the earliest such
    failure decides, since its peers then fail too, only because it is gone."""
    where = last_progress(folder)
    phase, logs = where.phase if where else "start", str(folder)
    if end.interrupted:
        return Outcome("interrupted", "ended by a signal before it was done", phase)
    if end.timed_out:
        at = f"{where.phase} step {where.step} of {where.of}" if where and where.of else phase
        reason = f"not done after {show_seconds(timeout_s)}, in {at}; stacks are in the record, logs in {folder.name}"
        return Outcome("timeout", reason, phase, Failure(phase=phase, log=logs, stacks=end.stacks))
    first = first_failure(folder)
    killed = killed_rank(folder) if first is None or first.get("peer") else None
    if killed is not None:
        rank, name = killed
        reason = f"rank {rank} was killed by {name}" + (", perhaps for host memory" if name == "SIGKILL" else "")
        said = _last_words(folder, rank)
        failure = Failure(rank=rank, type=name, message=said, phase=phase, log=logs)
        return Outcome("crash", reason + (f"; its last words: {said}" if said else ""), phase, failure)
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


def killed_rank(folder: Path) -> tuple[int, str] | None:
    """The rank that a signal ended, and the signal, as torchrun's summary says; such a rank cannot report.

    None when no rank was killed, or only by torchrun itself (SIGTERM) because another one had failed.
    """
    log = folder / "torchrun.log"
    ends = _ENDED.findall(log.read_text(errors="replace")) if log.exists() else []
    killed = [(int(rank), int(code)) for rank, code in ends if int(code) != signal.SIGTERM]
    if not killed:
        return None
    rank, code = killed[-1]  # the summary ends with what it takes for the root cause
    known = {number.value: number.name for number in signal.Signals}
    return rank, known.get(code, f"signal {code}")


def _last_words(folder: Path, rank: int | str) -> str | None:
    """The last line a local rank wrote to stderr."""
    for log in sorted(folder.glob(f"logs/**/{rank}/stderr.log")):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return None


def _without_failure(folder: Path, end: Exit) -> str:
    """No rank left a failure: killed from outside, or dead before the worker's own code ran."""
    if end.code == 0:
        return "torchrun ended without an error and without a result"
    for rank in sorted({log.parent.name for log in folder.glob("logs/**/stderr.log")}):
        if said := _last_words(folder, rank):
            return f"local rank {rank} left no report; its last words: {said}"
    return (
        f"torchrun ended with code {end.code} and no rank left a report: killed from outside, "
        "perhaps for host memory; see torchrun.log"
    )
