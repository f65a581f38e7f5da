"""A stream that waits, with a kernel behind its wait, slows the copies of every other stream beside a busy model.

    python waiting_streams.py [--rounds 3] [--json FILE]      # one NVIDIA GPU with 8 GB, torch 2.11 or newer

Pinned host memory is copied one way by the copy engine while another stream multiplies matrices, or sleeps in one long
kernel, or does nothing. Meanwhile further streams wait for an event behind those products, which will not come before
the copies have ended. What they would do then is a tiny kernel, a small copy, or nothing. Nothing but torch's streams,
events and copies is used. Rounds go through all rows, so that all see the same GPU; a table of medians comes out,
GiB/s, and with --json one object a row with the figure of each round.

Times are the GPU's, from the first copy to the last.
"""

import argparse
import json
import sys
from itertools import product
from statistics import median
from typing import NamedTuple

import torch

GIB = 1 << 30
COPY_BYTES, COPIES, BUFFERS = 200 << 20, 25, 4
SIDE = 8192  # of the square bf16 matrices
PRODUCTS = 160  # about twice as long as the copies on an H200
SLEEP_CYCLES = 500_000_000


class Row(NamedTuple):
    """One setting."""

    direction: str  # in: host to device; out: device to host
    model: str  # products, one kernel, nothing
    behind: str  # what waits: a kernel, a copy, nothing
    waiting: int  # streams that wait


def rows() -> list[Row]:
    """All settings. Without a model the event that streams wait for comes at once: nothing waits."""
    found = []
    for direction, model in product(("in", "out"), ("products", "one kernel", "nothing")):
        found.append(Row(direction, model, "nothing", 0))
        if model != "nothing":
            found += [Row(direction, model, "a kernel", waiting) for waiting in (1, 2, 4)]
    for direction, behind in product(("in", "out"), ("a copy", "nothing")):
        found += [Row(direction, "products", behind, waiting) for waiting in (1, 4)]
    return found


class Bench:
    """Memory and streams, made once."""

    def __init__(self) -> None:
        self.host = [torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(BUFFERS)]
        self.device = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(BUFFERS)]
        self.small = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory(), self.device[0].new_zeros(1 << 20)
        self.matrix = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
        self.copies, self.model = torch.cuda.Stream(), torch.cuda.Stream()
        self.others = [torch.cuda.Stream() for _ in range(4)]
        torch.mm(self.matrix, self.matrix)  # a kernel's first launch loads it, which may wait for the whole device
        self.small[1].add_(1)
        torch.cuda._sleep(1)

    def rate(self, row: Row) -> float:
        """GiB/s of the copies. Raises RuntimeError if what others wait for came before the copies ended."""
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.model):
            if row.model == "products":
                for _ in range(PRODUCTS):
                    torch.mm(self.matrix, self.matrix)
            elif row.model == "one kernel":
                torch.cuda._sleep(SLEEP_CYCLES)
            late = torch.cuda.Event()
            late.record()
        begin.record(self.copies)
        with torch.cuda.stream(self.copies):
            for at in range(COPIES):
                pair = self.device[at % BUFFERS], self.host[at % BUFFERS]
                target, source = pair if row.direction == "in" else pair[::-1]
                target.copy_(source, non_blocking=True)
        end.record(self.copies)
        for stream in self.others[: row.waiting]:
            with torch.cuda.stream(stream):
                stream.wait_event(late)
                if row.behind == "a kernel":
                    self.small[1].add_(1)
                elif row.behind == "a copy":
                    self.small[1].copy_(self.small[0], non_blocking=True)
        end.synchronize()
        if row.model != "nothing" and bool(late.query()):
            raise RuntimeError(f"{row}: the model had ended before the copies: raise PRODUCTS and SLEEP_CYCLES")
        torch.cuda.synchronize()
        return COPIES * COPY_BYTES / GIB / (float(begin.elapsed_time(end)) / 1e3)


def measure(rounds: int) -> dict[Row, list[float]]:
    """GiB/s of each row, round after round, after one that does not count."""
    bench, found = Bench(), {row: list[float]() for row in rows()}
    for at in range(rounds + 1):
        for row, rates in found.items():
            rate = bench.rate(row)
            if at:
                rates.append(rate)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write one object a row to this file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, must be at least 1")
    if not torch.cuda.is_available():
        print("waiting_streams.py: no GPU here: run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    found = measure(options.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.rounds} rounds")
    print(f"{'copies':8}{'model':12}{'streams that wait':20}{'GiB/s':>8}")
    for row, rates in found.items():
        waits = f"{row.waiting}, for {row.behind}" if row.waiting else "none"
        print(f"{row.direction:8}{row.model:12}{waits:20}{median(rates):8.1f}")
    if options.json:
        with open(options.json, "w") as file:
            file.writelines(json.dumps({**row._asdict(), "gib_s": rates}) + "\n" for row, rates in found.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
