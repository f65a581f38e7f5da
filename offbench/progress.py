"""What a launch is doing: read from the worker's progress file, shown as a bar on a terminal, as lines elsewhere."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

LINE_EVERY_S = 10.0
"""Without a terminal: at most one line this often inside a phase."""


@dataclass(frozen=True)
class Progress:
    """One line of progress.jsonl."""

    phase: str
    step: int = 0
    of: int = 0
    tok_s: float | None = None
    time: float = 0.0
    """Unix seconds."""


class ProgressTail:
    """Reads what has been appended to a progress file since the last look; an unfinished last line waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[Progress]:
        """New entries, oldest first; empty while the file does not exist."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_entry(line) for line in whole.decode().splitlines() if line.strip()]


def phase_seconds(path: Path, began: float, ended: float) -> dict[str, float]:
    """How long each phase of a launch took, from its progress file; `launch` is what came before the first entry.

    began, ended: of the launch, Unix seconds. A phase that comes again adds up; the last one ends with the launch.
    """
    entries = ProgressTail(path).read()
    marks = [("launch", began), *((entry.phase, entry.time) for entry in entries), ("", ended)]
    found: dict[str, float] = {}
    for (phase, start), (_, stop) in pairwise(marks):
        found[phase] = round(found.get(phase, 0.0) + stop - start, 3)
    return found


def _entry(line: str) -> Progress:
    found = json.loads(line)
    return Progress(
        found["phase"], found.get("step") or 0, found.get("of") or 0, found.get("tok_s"), found.get("time") or 0.0
    )


class Pace:
    """Time left in the window, from the last two step marks."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._last: Progress | None = None
        self._step_s: float | None = None

    def left(self, now: Progress) -> float | None:
        """Seconds until the window ends; None before two steps of one phase were seen and outside the steps.

        During warm-up the measured steps are still to come and count as well.
        """
        last, self._last = self._last, now
        if now.phase not in {"warmup", "measure"}:
            return None
        if last is not None and last.phase == now.phase and now.step > last.step:
            self._step_s = (now.time - last.time) / (now.step - last.step)
        if self._step_s is None:
            return None
        remaining = now.of - now.step + (self.steps if now.phase == "warmup" else 0)
        return remaining * self._step_s


class Display(Protocol):
    """Where a run is shown."""

    def start(self, title: str, steps: int) -> None:
        """A launch begins; `steps` are measured."""

    def update(self, progress: Progress) -> None:
        """The launch has got this far."""

    def finish(self, line: str) -> None:
        """The launch is over; `line` says how."""

    def say(self, line: str) -> None:
        """Anything else worth a line."""


class PlainDisplay:
    """Flushed lines: for pipes, logs and tests. A phase change is always a line, steps at most every 10 s."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.out = out or sys.stdout
        self._clock = clock
        self._phase = ""
        self._shown_at = 0.0
        self._pace = Pace(0)

    def start(self, title: str, steps: int) -> None:
        self._phase, self._pace = "", Pace(steps)
        self.say(title)

    def update(self, progress: Progress) -> None:
        left = self._pace.left(progress)
        last = progress.of > 0 and progress.step == progress.of
        if progress.phase == self._phase and not last and self._clock() - self._shown_at < LINE_EVERY_S:
            return
        self._phase, self._shown_at = progress.phase, self._clock()
        self.say("  " + describe(progress, left))

    def finish(self, line: str) -> None:
        self.say(line)

    def say(self, line: str) -> None:
        print(line, file=self.out, flush=True)


class TerminalDisplay:
    """A bar that is redrawn in place. No thread draws it: a launch forks, and forking beside threads can hang."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._bar: RichProgress | None = None
        self._pace = Pace(0)

    def start(self, title: str, steps: int) -> None:
        self._pace = Pace(steps)
        self.say(title)
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
        self._bar = RichProgress(*columns, console=self.console, auto_refresh=False, transient=True)
        self._bar.start()
        self._bar.add_task("start", total=None)
        self._bar.refresh()

    def update(self, progress: Progress) -> None:
        if self._bar is None:
            return
        text = describe(progress, self._pace.left(progress))
        task = self._bar.task_ids[0]
        self._bar.update(task, description=text, total=progress.of or None, completed=progress.step)
        self._bar.refresh()

    def finish(self, line: str) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.say(line)

    def say(self, line: str) -> None:
        self.console.print("\n".join(wrapped(line, self.console.width)), markup=False, soft_wrap=True)


def describe(progress: Progress, left: float | None) -> str:
    """`measure step 3 of 15, 57800 tok/s, 27 s left`."""
    parts = [progress.phase + (f" step {progress.step} of {progress.of}" if progress.of else "")]
    if progress.tok_s is not None:
        parts.append(f"{progress.tok_s:.0f} tok/s")
    if left is not None:
        parts.append(f"{show_seconds(left)} left")
    return ", ".join(parts)


def wrapped(line: str, width: int, indent: int | None = None) -> list[str]:
    """The line as lines of at most so many columns, cut at spaces only; a word that is longer stays whole. Later lines
    are set in by `indent`, by default two columns more than the first one."""
    under = " " * (len(line) - len(line.lstrip()) + 2 if indent is None else indent)
    return textwrap.wrap(line, width, subsequent_indent=under, break_long_words=False, break_on_hyphens=False) or [""]


def show_seconds(seconds: float) -> str:
    """`9 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def choose_display() -> Display:
    """A bar on a terminal, plain lines everywhere else."""
    return TerminalDisplay() if sys.stdout.isatty() else PlainDisplay()
