"""A launcher that starts nothing: it writes into the run folder what a worker would have written.

It makes the whole command line testable in milliseconds: every status, resume, interrupts, the order of launches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbench import environment
from offbench.config import GIB, RunSpec
from offbench.extras import USUAL
from offbench.launcher import Exit
from offbench.progress import Progress, ProgressTail

Outcome = Callable[[RunSpec, Path], Exit]
"""Plays one launch in its folder."""


class FakeLauncher:
    """Plays `outcomes[arm]` for each launch of that arm (a list is played in turn), and `ok` for other arms."""

    def __init__(self, outcomes: Mapping[str, Outcome | list[Outcome]] | None = None) -> None:
        self.outcomes = dict(outcomes or {})
        self.launched: list[RunSpec] = []
        self.extras = USUAL

    def command(self, spec: RunSpec, folder: Path) -> list[str]:
        return ["fake", spec.arm.name, str(folder)]

    def launch(self, spec: RunSpec, folder: Path, timeout_s: float, on_progress: Callable[[Progress], None]) -> Exit:
        self.launched.append(spec)
        outcome = self.outcomes.get(spec.arm.name, ok())
        if isinstance(outcome, list):
            outcome = outcome.pop(0)
        end = outcome(spec, folder)
        for progress in ProgressTail(folder / "progress.jsonl").read():
            on_progress(progress)
        return end


def write_progress(spec: RunSpec, folder: Path, *phases: str) -> None:
    """Progress entries as rank 0 appends them, one second a step."""
    with (folder / "progress.jsonl").open("a") as file:
        clock = 0.0
        for phase in phases:
            of = {"warmup": spec.window.warmup, "measure": spec.window.steps}.get(phase, 0)
            for step in range(1, of + 1) if of else (0,):
                clock += 1.0
                entry = {"phase": phase, "step": step, "of": of, "tok_s": 1000.0 if of else None, "time": clock}
                file.write(json.dumps(entry) + "\n")


def ok(step_s: float | None = None, **fields: Any) -> Outcome:
    """A launch that succeeds; `fields` replace parts of the result."""

    def play(spec: RunSpec, folder: Path) -> Exit:
        write_progress(spec, folder, "start", "build", "pin", "warmup", "measure", "drain", "gather", "extras")
        seconds = (
            step_s
            or {"none": 2.0, "main": 4.0, "chunked": 3.0, "overlap": 2.5, "stream": 2.1, "zerocopy": 2.2}[
                spec.arm.name
            ]
        )
        tokens = spec.tokens_per_step
        result = {
            "status": "ok",
            "step_s": seconds,
            "tok_s": tokens / seconds,
            "tokens_per_step": tokens,
            "steps": [{"step_s": seconds, "loss": 10.0, "grad_norm": 1.0}] * spec.window.steps,
            "peak": {"first_step_allocated_bytes": 2 * GIB, "steady_allocated_bytes": GIB},
            "host": {"pinned_requested_bytes": GIB, "rss_bytes": 3 * GIB},
            "adamw": "fused",
            "env": environment.capture(None),
        }
        (folder / "result.json").write_text(json.dumps(result | fields))
        return Exit(code=0)

    return play


def failed(*failures: Mapping[str, Any], code: int = 1) -> Outcome:
    """A launch whose ranks leave these failures: at least `rank`, `time_ns`, `type`."""

    def play(spec: RunSpec, folder: Path) -> Exit:
        write_progress(spec, folder, "start", "build")
        for failure in failures:
            body = {"message": "", "phase": "warmup", "stack": "", "oom": False, "peer": False} | dict(failure)
            (folder / f"failure-{failure['rank']}.json").write_text(json.dumps(body))
        return Exit(code=code)

    return play


def oom() -> Outcome:
    """Rank 1 runs out of device memory."""
    message = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore text"
    return failed({"rank": 1, "time_ns": 5, "type": "OutOfMemoryError", "message": message, "oom": True})


def timed_out() -> Outcome:
    """A launch that hangs in its warm-up."""

    def play(spec: RunSpec, folder: Path) -> Exit:
        write_progress(spec, folder, "start", "build", "warmup")
        return Exit(code=None, timed_out=True, stacks={"rank 0": "Thread 1 (idle): wait"})

    return play


def interrupted() -> Outcome:
    """The user presses Ctrl-C while it measures."""

    def play(spec: RunSpec, folder: Path) -> Exit:
        write_progress(spec, folder, "start", "measure")
        return Exit(code=None, interrupted=True)

    return play
