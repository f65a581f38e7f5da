"""How fast few programs update state in host memory: one JSON line.

    python -m offbench.offload.zerocopy --bytes 4GiB

Each update reads and writes all of it, so as many bytes go in as out. The copy engines' rate stands beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

import torch

from offbench import bandwidth
from offbench.device import Device
from offbench.errors import OffbenchError, UsageError
from offbench.offload.chunks import ALIGNMENT
from offbench.offload.hoststore import HostStore
from offbench.units import GIB, parse_size

PROGRAMS = (4, 8, 16, 32)
ROUNDS = 5
"""Timed updates for each number of programs, after one to warm up; the median counts."""


@torch.no_grad()
def rates(nbytes: int, device: torch.device) -> dict[str, object]:
    """GiB/s, both directions together, of updates of `nbytes` bytes of state by each of PROGRAMS, and of copies.

    Takes `nbytes` of pinned host memory and as much on the device. Raises OffbenchError when it cannot be had.
    """
    from offbench.offload.zerocopy.kernel import adamw

    count = -(-nbytes // (8 * ALIGNMENT)) * ALIGNMENT
    store = HostStore([8 * count], pin_for=device)
    memory, clock = store.visible(0).view(torch.float32), Device.of(device)
    param, grad = torch.ones(count, device=device), torch.ones(count, device=device)
    steps = torch.zeros((), device=device)
    found: dict[str, float] = {}
    for programs in PROGRAMS:
        seconds = []
        for _ in range(1 + ROUNDS):
            begin = clock.stamp()
            adamw(
                [param], [grad], [memory[:count]], [memory[count:]], [steps],
                lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, programs=programs,
            )  # fmt: skip
            seconds.append(clock.seconds(begin, clock.stamp()))
        found[str(programs)] = round(2 * 8 * count / statistics.median(seconds[1:]) / GIB, 2)
    copies = bandwidth.probe(device, store.chunk(0)).both_bytes_per_s
    return {
        "device": clock.name,
        "bytes": 8 * count,
        "both_ways_gib_per_s": found,
        "copies_both_ways_gib_per_s": None if copies is None else round(copies / GIB, 2),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Print the line; 2, with one line that says why, when nothing can be measured here."""
    parser = argparse.ArgumentParser(
        prog="python -m offbench.offload.zerocopy", description="Rates of updates in place"
    )
    parser.add_argument("--bytes", default="4GiB", help="how much state, as in 4GiB (the default)")
    flags = parser.parse_args(words)
    try:
        nbytes = parse_size("--bytes", flags.bytes)
        if not torch.cuda.is_available():
            raise UsageError("no CUDA device: run this on a machine with a GPU")
        print(json.dumps(rates(nbytes, torch.device("cuda", torch.cuda.current_device()))))
    except OffbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
