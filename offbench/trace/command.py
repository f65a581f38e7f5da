"""What `offbench trace` does once the command line is parsed."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbench.errors import UsageError
from offbench.record import Split
from offbench.trace.events import Event, Parsed, parse
from offbench.trace.summary import SMALL_BYTES, summarize
from offbench.trace.text import split_lines, summary_lines
from offbench.trace.timeline import difference, split
from offbench.units import parse_size

GZIP = b"\x1f\x8b"
HOW = "give what torch.profiler's export_chrome_trace wrote"


@dataclass(frozen=True)
class TraceOptions:
    """The options as typed."""

    path: Path
    steps: int | None = None
    small: str | None = None
    json: bool = False
    against: Path | None = None


def trace_command(options: TraceOptions) -> int:
    """Print what a trace says, and what sets it apart from another one. Raises UsageError for a file that is none."""
    small_bytes = parse_size("--small", options.small) if options.small else SMALL_BYTES
    parsed = _parsed(options.path)
    try:
        found = summarize(parsed, options.steps, small_bytes)
    except ValueError as error:
        raise UsageError(f"{options.path}: {error}") from error
    ours = split(parsed, small_bytes)
    apart = None
    if options.against is not None:
        base = split(_parsed(options.against), small_bytes)
        apart = difference(_needed(options.path, ours), _needed(options.against, base))
    if options.json:
        parts = {"split": ours.model_dump() if ours else None, "difference": apart.model_dump() if apart else None}
        print(json.dumps(asdict(found) | parts, indent=2))
    else:
        print("\n".join([*split_lines(ours, apart, options.against), *summary_lines(found)]))
    return 0


def split_of(path: Path) -> Split | None:
    """Where the time of a trace's steps went; None where it holds no marked steps or no device work.

    Raises UsageError when the file cannot be read or holds something else.
    """
    return split(_parsed(path))


def _parsed(path: Path) -> Parsed:
    try:
        return parse(read_events(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _needed(path: Path, found: Split | None) -> Split:
    if found is None:
        raise UsageError(
            f"{path}: --against needs kernels and marked steps in both traces; call prof.step() after each"
        )
    return found


def read_events(path: Path) -> list[Event]:
    """The events of a Chrome trace, compressed or not: an object with `traceEvents`, or the bare list.

    Raises UsageError, one line, when the file cannot be read or holds something else.
    """
    try:
        data = path.read_bytes()
        held: Any = json.loads(gzip.decompress(data) if data.startswith(GZIP) else data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: damaged gzip file ({error}); {HOW}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; {HOW}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a trace: no JSON ({error}); {HOW}") from error
    events = held.get("traceEvents") if isinstance(held, dict) else held
    if not isinstance(events, list):
        raise UsageError(f"{path}: not a trace: no list of traceEvents; {HOW}")
    return events
