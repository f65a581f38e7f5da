"""Copies between host and device, repeated when a slower link is to be imitated, and the books about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from offbench.offload.streams import Event

Direction = Literal["in", "out"]


@dataclass(frozen=True)
class CopyEntry:
    """One chunk's copy."""

    direction: Direction
    nbytes: int
    """Payload, repeats excluded."""
    begin: Event
    """Passed when nothing held the copy back any more."""
    end: Event
    """Passed when the copy has ended."""


@dataclass(frozen=True)
class ArenaEntry:
    """Staging memory held during one step."""

    nbytes: int
    begin: Event
    """Passed when compute handed the memory over."""
    end: Event
    """Passed when the last write-back out of it has ended."""
    step: int
    """Which optimizer step held it, from 1."""


class Ledger:
    """What one optimizer moved: running totals always, single entries only while `keep` is set."""

    def __init__(self) -> None:
        self.keep = False
        self.step = 0
        """Optimizer steps begun."""
        self.in_bytes = 0
        """Payload queued host to device so far, without what was dropped."""
        self.out_bytes = 0
        """Payload queued device to host so far."""
        self.in_copies = 0
        self.out_copies = 0
        self.dropped_bytes = 0
        """Copied in before their step() and never used."""
        self.settled = (0, 0, 0)
        """`step`, `in_bytes` and `out_bytes` when what a step moves last changed; nothing was owed then."""
        self.copies: list[CopyEntry] = []
        self.arenas: list[ArenaEntry] = []

    def settle(self) -> None:
        """From now on a step moves another number of bytes; all steps so far have been drained."""
        self.settled = (self.step, self.in_bytes, self.out_bytes)

    def copied(self, direction: Direction, nbytes: int, begin: Event | None, end: Event) -> None:
        """Enter a queued copy; `begin` is needed only while `keep` is set."""
        if direction == "in":
            self.in_bytes += nbytes
            self.in_copies += 1
        else:
            self.out_bytes += nbytes
            self.out_copies += 1
        if self.keep and begin is not None:
            self.copies.append(CopyEntry(direction, nbytes, begin, end))

    def dropped(self, nbytes: int, end: Event) -> None:
        """A copy in that ends there came to nothing: it took its time on the link, but is none of a step's bytes."""
        self.in_bytes -= nbytes
        self.in_copies -= 1
        self.dropped_bytes += nbytes
        self.copies = [replace(entry, nbytes=0) if entry.end is end else entry for entry in self.copies]

    def held(self, nbytes: int, begin: Event, end: Event) -> None:
        """Enter staging memory of the present step: all of its arena, or a part."""
        if self.keep:
            self.arenas.append(ArenaEntry(nbytes, begin, end, self.step))


class Copier:
    """Copies bytes on the current stream.

    repeat: how often each byte is copied, at least 1; 2.33 makes a link of 90 GiB/s both ways behave as one of 38.8.
    Raises ValueError for a smaller repeat: a link cannot be made faster by copying less.
    """

    def __init__(self, repeat: float = 1.0) -> None:
        if repeat < 1:
            raise ValueError(f"repeat is {repeat}, must be at least 1")
        self.repeat = repeat

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue target <- source (uint8, equal sizes), as often as the link demands."""
        if self.repeat == 1:
            target.copy_(source, True)
            return
        whole = int(self.repeat + 1e-9)
        for _ in range(whole):
            target.copy_(source, non_blocking=True)
        nbytes = int((self.repeat - whole) * target.numel())
        if nbytes > 0:
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
