"""What `offbench trace` does once the command line is parsed."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbench.errors import UsageError
from offbench.trace.events import Event
from offbench.trace.summary import SMALL_BYTES, summarize
from offbench.trace.text import summary_lines
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


def trace_command(options: TraceOptions) -> int:
    """Print the summary of a trace. Raises UsageError for a file that is none."""
    small_bytes = parse_size("--small", options.small) if options.small else SMALL_BYTES
    events = read_events(options.path)
    try:
        found = summarize(events, options.steps, small_bytes)
    except ValueError as error:
        raise UsageError(f"{options.path}: {error}") from error
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print("\n".join(summary_lines(found)))
    return 0


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
