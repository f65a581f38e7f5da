"""What `offbench run` and `offbench arms` do once the command line is parsed."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from offbench import environment
from offbench.arms import ALIASES, ARMS
from offbench.config import RunSpec
from offbench.errors import RecordError, UsageError
from offbench.estimate import cautions, estimate, shortfalls
from offbench.extras import USUAL, Extras
from offbench.hardware import Hardware, detect
from offbench.launcher import Launcher
from offbench.naming import arm_name
from offbench.options import Options, flag_of
from offbench.progress import choose_display, wrapped
from offbench.record import RunRecord
from offbench.resolve import Resolved, resolve
from offbench.results_file import ResultsFile, check_writable, read_records
from offbench.runner import Planned, Runner, interleave, run_root, without_done
from offbench.units import gib, show_size
from offbench.verdict import verdicts

OK, FAILED, INTERRUPTED = 0, 1, 130
ARMS_WIDTH = 80
GLUE = "\N{NO-BREAK SPACE}"
"""Keeps an option and its value on one line."""


@dataclass(frozen=True)
class RunFlags:
    """How to run, as opposed to what."""

    launches: int
    results: Path | None
    resume: bool
    dry_run: bool
    timeout_s: float
    extras: Extras = USUAL


def run_command(options: Options, flags: RunFlags, launcher: Launcher) -> int:
    """Resolve, check, launch, record, judge; returns the exit code.

    Raises UsageError or RecordError before anything starts when the input cannot be run.
    """
    hardware = detect()
    resolved = resolve(options, hardware)
    refuse_hopeless(resolved, hardware)
    path = flags.results or default_results()
    asked = flags.extras.profile
    folder = writable_folder("--profile", asked) if asked is not None and not flags.dry_run else None
    launcher.extras = replace(flags.extras, profile=folder)
    results = open_results(path, flags.dry_run)
    past = read_past(path)
    env = environment.capture(hardware.gpus[0].bus_id if resolved.specs[0].mode.device == "cuda" else None)
    plan = interleave(resolved.specs, flags.launches, [] if flags.resume else past)
    todo = without_done(plan, past, env) if flags.resume else plan
    display = choose_display()
    for line in [*resolved.notes, *caution_lines(resolved, hardware)]:
        display.say(line)
    if results is None:
        for line in dry_run_lines(todo, path, launcher):
            print(line)  # never wrapped: commands are there to be copied
        return OK
    if len(todo) < len(plan):
        display.say(f"resumed: {len(plan) - len(todo)} of {len(plan)} launches are in {path}")
    try:
        report = Runner(launcher, results, display, hardware, env, flags.timeout_s).run(todo)
    finally:
        results.close()
    left_out = {(item.spec.run_id, item.launch) for item in plan} - {(item.spec.run_id, item.launch) for item in todo}
    kept = [record for record in past if record.status == "ok" and (record.run_id, record.launch) in left_out]
    for line in verdicts([*kept, *report.records], hardware.numa_nodes):
        display.say(line)
    display.say(f"records: {path}")
    display.say(f"compare: offbench report {shlex.quote(str(path))}")
    if report.interrupted:
        return INTERRUPTED
    return OK if all(record.status == "ok" and record.failure is None for record in report.records) else FAILED


def refuse_hopeless(resolved: Resolved, hardware: Hardware) -> None:
    """Raise UsageError, with the numbers, when no spec can fit; single ones are skipped and recorded later."""
    short = [shortfalls(spec, hardware) for spec in resolved.specs]
    if all(short):
        name = arm_name(resolved.specs[0])
        raise UsageError(f"no arm fits: {name} {'; '.join(short[0])}; use fewer --layers, a shorter --seq-len or tiny")


def caution_lines(resolved: Resolved, hardware: Hardware) -> list[str]:
    """Each caution once, with the first arm it applies to."""
    found: dict[str, str] = {}
    for spec in resolved.specs:
        for caution in cautions(spec, hardware):
            found.setdefault(caution, arm_name(spec))
    return [f"caution: {name} {caution}" for caution, name in found.items()]


def default_results() -> Path:
    """results/local/<date>-<host>.jsonl under the current folder."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", platform.node()).strip("-") or "host"
    return Path("results") / "local" / f"{date.today().isoformat()}-{host}.jsonl"


def writable_folder(flag: str, path: Path) -> Path:
    """The folder, made if need be. Raises UsageError when nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}; choose another folder") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"{flag} {path}: not writable; choose another folder")
    return path


def open_results(path: Path, dry_run: bool) -> ResultsFile | None:
    """The results file, open before anything is said; None in a dry run, which only looks whether it could be.

    Raises RecordError where it cannot be written, and for a folder, a device or a pipe: records are read back and
    synced to disk.
    """
    if path.exists() and not path.is_file():
        raise RecordError(f"cannot write results to {path}: not a regular file; choose another --results")
    if dry_run:
        check_writable(path)
        return None
    return ResultsFile(path)


def read_past(path: Path) -> list[RunRecord]:
    """Records already in the results file; lines that cannot be read are named and left alone."""
    if not path.exists():
        return []
    found = read_records([path])
    for problem in found.problems:
        print(f"warning: {problem}", file=sys.stderr)
    return found.records


def dry_run_lines(plan: list[Planned], path: Path, launcher: Launcher) -> Iterator[str]:
    """The plan, each spec once in full, its memory estimate and its command."""
    yield f"would append {len(plan)} records to {path}"
    yield "order: " + ", ".join(f"{arm_name(item.spec)} #{item.launch}" for item in plan)
    first: dict[RunSpec, int] = {}
    for item in plan:
        first.setdefault(item.spec, item.launch)
    for spec, launch in first.items():
        need = estimate(spec)
        yield f"{arm_name(spec)}: run {spec.run_id}"
        yield f"  spec     {spec.canonical()}"
        gpu = f"{gib(need.gpu_bytes)} GiB on each GPU, " if need.gpu_bytes else ""
        pinned = f", {gib(need.pinned_bytes)} GiB of it pinned" if need.pinned_bytes else ""
        yield f"  estimate {gpu}{gib(need.host_bytes)} GiB of host memory a process{pinned}"
        yield "  command  " + shlex.join(launcher.command(spec, run_root(path) / f"{spec.run_id}-{launch}"))


def list_arms() -> Iterator[str]:
    """A paragraph per arm, in lines of at most 80 columns; options by the names that `offbench run` knows."""
    for arm in ARMS.values():
        yield f"{arm.name}  ({'exact' if arm.exact else 'inexact'})"
        if arm.unproven:
            yield from wrapped(f"  caveat  {arm.unproven}", ARMS_WIDTH, indent=10)
        options = " ".join(
            f"{flag_of(key)}{GLUE}{shown}" for key, value in arm.defaults.items() if (shown := _shown(value))
        )
        for head, text in (("moves", arm.moves), ("when", arm.when), ("on GPU", arm.memory), ("options", options)):
            if text:
                said = re.sub(r"`(\w+)`", lambda field: flag_of(field[1]), text)
                yield from (line.replace(GLUE, " ") for line in wrapped(f"  {head:<7} {said}", ARMS_WIDTH, indent=10))
    for name, (base, numa) in ALIASES.items():
        yield f"{name}  (the same as --arm {base}{' --numa' if numa else ''})"


def _shown(default: object) -> str:
    """A default as its option takes it; empty where there is none, or nothing of that kind."""
    if isinstance(default, int) and default >= 1024:  # a size; counts are small
        return show_size(default)
    return "" if default is None or default == 0 else str(default)
