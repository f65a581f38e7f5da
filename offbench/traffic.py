"""What an optimizer really moved in the measured window, placed on the compute stream's time line by events."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from offbench.device import Device, Stamp
from offbench.offload.adamw import OffloadedAdamW
from offbench.offload.copies import ArenaEntry, Ledger
from offbench.record import Moved
from offbench.window import Traffic


class TrafficLog:
    """Counts an optimizer's copies between two step boundaries; None of it waits while the window is open."""

    def __init__(self, optimizer: OffloadedAdamW, device: Device) -> None:
        self._optimizer = optimizer
        self._ledger = optimizer.ledger or Ledger()
        self._ledger.keep = True
        self._before = (self._ledger.step, self._ledger.in_bytes, self._ledger.out_bytes)
        self._moved_in = self._ledger.in_bytes - self._ledger.out_bytes
        self._device = device
        self._notes: list[tuple[int, Stamp, dict[str, int], dict[str, int]]] = []

    def note(self, steps_done: int, boundary: Stamp) -> None:
        """Remember the books as they are at a step boundary: call it at the start and at the end of the window."""
        ledger = self._ledger
        nbytes = {"in": ledger.in_bytes, "out": ledger.out_bytes}
        copies = {"in": ledger.in_copies, "out": ledger.out_copies}
        self._notes.append((steps_done, boundary, nbytes, copies))

    def traffic(self) -> list[Traffic]:
        """Per direction what had completed, and what the steps still owed, at both ends. Call after the drain."""
        (first, *_), (last, *_) = self._notes
        planned = self._optimizer.bytes_per_step
        # Of the steps before a step's bytes last changed nothing was owed any more.
        steps, *moved = (max(0, a - b) for a, b in zip(self._ledger.settled, self._before, strict=True))
        ways = []
        before = dict(zip(("in", "out"), moved, strict=True))
        for which in ("in", "out"):
            done = [self._completed(which, index) for index in (0, 1)]
            owed = [(n - steps) * planned - (d - before[which]) for n, d in zip((first, last), done, strict=True)]
            ways.append(Traffic(which, done[0], done[1], owed[0], owed[1], planned))
        return ways

    def moved(self, steps: int, copy_repeat: float) -> Moved:
        """The record's account of the window."""
        (*_, copies_start), (*_, copies_end) = self._notes
        completed = {way.direction: (way.completed_at_end - way.completed_at_start) / steps for way in self.traffic()}
        return Moved(
            in_bytes_per_step=completed["in"],
            out_bytes_per_step=completed["out"],
            planned_in_bytes_per_step=self._optimizer.bytes_per_step,
            planned_out_bytes_per_step=self._optimizer.bytes_per_step,
            copies_in_per_step=(copies_end["in"] - copies_start["in"]) / steps,
            copies_out_per_step=(copies_end["out"] - copies_start["out"]) / steps,
            copy_repeat=copy_repeat,
            copy_span_s=self._span(),
            copy_busy_s=self._busy(steps),
        )

    def state_at(self, moments: Sequence[Stamp]) -> int | None:
        """Largest bytes of optimizer state on the device at any of the moments: what stays there, and what had arrived
        and had not left again. None on the CPU. Staging memory that state has not reached yet holds none."""
        if self._device.torch_device.type == "cpu":
            return None
        resident = self._optimizer.where().get("device", 0)
        return resident + max((self._arrived(moment) for moment in moments), default=0)

    def _arrived(self, moment: Stamp) -> int:
        """Copies from before the log began were over by its first moment: their streams run in order."""
        ended = {"in": 0, "out": 0}
        for entry in self._ledger.copies:
            if _seconds(entry.end, moment.event) >= 0:
                ended[entry.direction] += entry.nbytes
        return max(0, self._moved_in + ended["in"] - ended["out"])

    def _completed(self, which: Literal["in", "out"], index: int) -> int:
        """Bytes whose copy had ended when the compute stream reached the noted boundary."""
        _, boundary, nbytes, _ = self._notes[index]
        if boundary.event is None:  # the CPU: a copy is over when it returns
            return nbytes[which]
        entries = [entry for entry in self._ledger.copies if entry.direction == which]
        return sum(entry.nbytes for entry in entries if _seconds(entry.end, boundary.event) >= 0)

    def _span(self) -> float | None:
        """Mean seconds from staging memory handed over to the last write-back's end, over the window's steps."""
        start, end = self._notes[0][1], self._notes[1][1]
        if start.event is None:
            return None
        spans: dict[int, list[ArenaEntry]] = {}
        for arena in self._ledger.arenas:
            if _seconds(start.event, arena.begin) >= 0 and _seconds(arena.begin, end.event) >= 0:
                spans.setdefault(arena.step, []).append(arena)
        inside = [max(_seconds(held[0].begin, arena.end) for arena in held) for held in spans.values()]
        return statistics.fmean(inside) if inside else None

    def _busy(self, steps: int) -> float | None:
        """Seconds per step during which some copy was under way: the union of the copies' own times."""
        start, end = self._notes[0][1], self._notes[1][1]
        if start.event is None or not self._ledger.copies:
            return None
        spans = [(_seconds(start.event, e.begin), _seconds(start.event, e.end)) for e in self._ledger.copies]
        return union(spans, 0.0, _seconds(start.event, end.event)) / steps


def summed(parts: Sequence[Moved]) -> Moved:
    """What several optimizers of one rank moved together. Their copies may run side by side, so times do not add up:
    null but for one optimizer."""
    if len(parts) <= 1:
        return parts[0] if parts else Moved()
    added = {
        name: sum(getattr(part, name) for part in parts) for name in Moved.model_fields if name.endswith("_per_step")
    }
    return Moved(**added, copy_repeat=parts[0].copy_repeat)


def union(spans: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Length of what at least one of the (begin, end) spans covers between start and stop."""
    covered, reached = 0.0, start
    for begin, end in sorted(spans):
        new = min(end, stop) - max(begin, reached)
        if new > 0:
            covered += new
            reached = min(end, stop)
    return covered


def _seconds(earlier: Any, later: Any) -> float:
    """Device seconds between two events, ours or raw; negative when `later` came first."""
    first, second = getattr(earlier, "raw", earlier), getattr(later, "raw", later)
    return float(first.elapsed_time(second)) / 1e3
