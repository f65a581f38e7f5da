"""How a rank dies: with its parent, and leaving one file that says why.

torchrun's own error file has whole-second time stamps, so the rank that failed first cannot be told from those that
only lost their peer. Each rank therefore writes its own record with nanoseconds, its phase and its stack.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# prctl(2): the signal a process gets when its parent dies; and who may attach to it where only parents may.
PR_SET_PDEATHSIG = 1
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)

_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|remote process exit"
    r"|peer (closed|disconnected)|rendezvous.*closed|recvvalue failed|network error|caused pair closure",
    re.IGNORECASE,
)
_OOM = re.compile(r"out of memory|cannot allocate memory|refused to pin|ALLOC_FAILED|bad_alloc", re.IGNORECASE)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the launcher goes away, however that happens."""
    parent = os.getppid()
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was in place
        os._exit(1)


def signal_with_parent(number: signal.Signals) -> None:
    """Get this signal when the parent dies; nothing between a fork and an exec is needed for it but this call."""
    _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def let_samplers_attach() -> None:
    """Let a stack sampler that is not our parent attach where the kernel restricts that (yama's ptrace_scope)."""
    _libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)


def write_json(path: Path, value: Any) -> None:
    """Write a file that is either complete or absent."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


def record_failure(out: Path, rank: int, error: BaseException, phase: str) -> None:
    """Write `failure-<rank>.json` for an error that ends this rank."""
    message = str(error).strip()
    described = {
        "rank": rank,
        "time_ns": time.time_ns(),
        "type": type(error).__name__,
        "message": message,
        "phase": phase,
        "stack": "".join(traceback.format_exception(error)),
        "oom": is_out_of_memory(error),
        "peer": is_peer_failure(error),
    }
    write_json(out / f"failure-{rank}.json", described)
    print(f"rank {rank} failed in {phase}: {type(error).__name__}: {message}", file=sys.stderr, flush=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or bool(_OOM.search(str(error)))
    )


def is_peer_failure(error: BaseException) -> bool:
    """Whether this rank failed only because another one went away."""
    return not is_out_of_memory(error) and bool(_PEER.search(str(error)))
