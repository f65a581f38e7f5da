"""`offbench report`: read, compare, print. No torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offbench import report_plot
from offbench.compare import compare
from offbench.errors import UsageError
from offbench.floor import of_launch
from offbench.record import RunRecord
from offbench.render import to_csv, to_json, to_markdown, to_table
from offbench.results_file import read_records
from offbench.topo import cache as topo_cache

FORMATS = ("table", "md", "csv", "json")


def report(paths: Sequence[Path], form: str | None = None, plot: str | None = None) -> None:
    """Print the records of the files; without a format a table on a terminal and Markdown elsewhere. plot: a folder
    for figures of step time against memory, whose names go to stderr.

    What could not be read goes to stderr, line by line. Raises UsageError for an unknown format or files without
    records, RecordError for a file that cannot be opened.
    """
    form = form or ("table" if sys.stdout.isatty() else "md")
    if form not in FORMATS:
        raise UsageError(f"--format {form}: choose {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if plot is not None and not plot.strip():
        raise UsageError("--plot is empty: name a folder for the figures")
    found = read_records(paths)
    for problem in found.problems:
        print(f"warning: skipped {problem}", file=sys.stderr)
    if not found.records:
        raise UsageError(f"no records in {', '.join(map(str, paths))}; `offbench run` writes them")
    groups = compare(with_shared_links(record) for record in found.records)
    for path in report_plot.write(Path(plot), groups) if plot is not None else ():
        print(f"plot: {path}", file=sys.stderr)
    if form == "table":
        to_table(groups, Console())
    elif form == "md":
        print(to_markdown(groups), end="")
    elif form == "csv":
        print(to_csv(groups), end="")
    else:
        print(to_json(groups, found.problems), end="")


def with_shared_links(record: RunRecord) -> RunRecord:
    """The record with the floor of what its ranks shared, where `offbench topo --measure` has found that out on its
    machine since the launch, and keeps it on this host. It only ever raises a floor."""
    name = str(record.env.get("machine"))
    machine = topo_cache.kept(name) if re.fullmatch("[0-9a-f]{16}", name) else None
    tree = topo_cache.launch_tree(machine, record.spec.mode.nproc) if machine is not None else None
    if tree is None:
        return record
    floor, was = of_launch(record.moved, record.link, tree), record.floor
    if floor.seconds is None or floor.seconds <= (was.seconds or 0.0):
        return record
    ends = was.pipeline_seconds - was.seconds if was.pipeline_seconds is not None and was.seconds is not None else None
    floor.pipeline_seconds = floor.seconds + ends if ends is not None else None
    return record.model_copy(update={"floor": floor})
