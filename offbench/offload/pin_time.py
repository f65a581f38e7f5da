"""How long it takes to pin host memory here, as slabs and as torch's pinned tensors: one JSON line.

    python -m offbench.offload.pin_time --bytes 28.4GiB

The slabs come first and are given back before the tensors: memory that this machine touches for the first time counts
against them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch

from offbench.errors import OffbenchError, UsageError
from offbench.offload.chunks import ALIGNMENT
from offbench.offload.hoststore import HostStore
from offbench.units import GIB, parse_size

TENSORS = 96
"""Two moments of each of 48 chunks: Qwen3-30B-A3B's 28.4 GiB of state over 8 ranks in chunks of up to 1 GiB."""


def chunk_sizes(nbytes: int) -> list[int]:
    """Chunks of 1 GiB and one of the rest, together at least `nbytes`."""
    whole, rest = divmod(nbytes, GIB)
    return [GIB] * whole + ([-(-rest // ALIGNMENT) * ALIGNMENT] if rest else [])


def pin_times(nbytes: int, tensors: int, device: torch.device) -> dict[str, float]:
    """Seconds for a HostStore of `nbytes` bytes and for so many pinned tensors that hold as much, and their ratio.

    Raises OffbenchError when the memory cannot be had.
    """
    torch.empty(1, pin_memory=True)  # starts CUDA, whose time is nobody's
    store = HostStore(chunk_sizes(nbytes), pin_for=device)
    found = {"bytes": nbytes, "slabs_s": store.seconds, "slabs_locked_bytes": store.locked_bytes}
    del store
    began = time.perf_counter()
    pinned = [torch.empty(nbytes // tensors, dtype=torch.uint8, pin_memory=True) for _ in range(tensors)]
    found |= {"tensors": len(pinned), "tensors_s": time.perf_counter() - began}
    return found | {"ratio": found["slabs_s"] / found["tensors_s"]}


def main(words: Sequence[str] | None = None) -> int:
    """Print the line; 2, with one line that says why, when nothing can be measured here."""
    parser = argparse.ArgumentParser(prog="python -m offbench.offload.pin_time", description="Time to pin host memory")
    parser.add_argument("--bytes", default="28.4GiB", help="how much, as in 28.4GiB (the default)")
    parser.add_argument("--tensors", type=int, default=TENSORS, help=f"in how many tensors ({TENSORS})")
    flags = parser.parse_args(words)
    try:
        nbytes = parse_size("--bytes", flags.bytes)
        if not 1 <= flags.tensors <= nbytes:
            raise UsageError(f"--tensors {flags.tensors}: must be at least 1, and every tensor at least a byte")
        if not torch.cuda.is_available():
            raise UsageError("no CUDA device: only its driver can pin memory; run this on a machine with a GPU")
        print(json.dumps(pin_times(nbytes, flags.tensors, torch.device("cuda"))))
    except OffbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
