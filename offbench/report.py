"""`offbench report`: read, compare, print. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from offbench.compare import compare
from offbench.errors import UsageError
from offbench.record import read_records
from offbench.render import to_csv, to_json, to_markdown, to_table

FORMATS = ("table", "md", "csv", "json")


def report(paths: Sequence[Path], form: str | None = None) -> None:
    """Print the records of the files; without a format a table on a terminal and Markdown elsewhere.

    What could not be read goes to stderr, line by line. Raises UsageError for an unknown format or files without
    records, RecordError for a file that cannot be opened.
    """
    form = form or ("table" if sys.stdout.isatty() else "md")
    if form not in FORMATS:
        raise UsageError(f"--format {form}: choose {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    found = read_records(paths)
    for problem in found.problems:
        print(f"warning: skipped {problem}", file=sys.stderr)
    if not found.records:
        raise UsageError(f"no records in {', '.join(map(str, paths))}; `offbench run` writes them")
    groups = compare(found.records)
    if form == "table":
        to_table(groups, Console())
    elif form == "md":
        print(to_markdown(groups), end="")
    elif form == "csv":
        print(to_csv(groups), end="")
    else:
        print(to_json(groups, found.problems), end="")
