"""Staging memory made of several pieces of device memory, and who must have passed before a range of it is written.

An extent is one tensor: part of the staging arena, or the memory of a gradient whose update has run. Ranges of it are
taken for state that moves in and given back once that state is written back. Nothing here waits: a range carries the
events its next user has to wait for, so a whole step can be queued at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from offbench.offload.chunks import ALIGNMENT
from offbench.offload.streams import Event, Why

Guards = Mapping[Why, tuple[int, Event]]
"""What to wait for, by reason: a number that grows with time, and the event. Events of one reason pass in order, so
the latest stands for all. Never changed once made: ranges share them."""


@dataclass(eq=False)
class Extent:
    """One piece of device memory."""

    memory: torch.Tensor
    """uint8 [nbytes], contiguous."""
    begin: Event
    """Passed when its last use before staging was over."""
    free: list[_Free] = field(default_factory=list)
    closed: bool = False
    """Nothing more is taken out of it."""
    nbytes: int = field(init=False)
    """Its size."""

    def __post_init__(self) -> None:
        self.nbytes = int(self.memory.numel())

    @property
    def clear_at(self) -> int:
        """When the last of its ranges was given back, as a number that grows with time."""
        return max(free.since for free in self.free)

    @property
    def idle(self) -> bool:
        """Whether every range has been given back."""
        return len(self.free) == 1 and self.free[0].key[0] == self.nbytes


class _Free:
    """A free range of an extent."""

    __slots__ = ("guards", "key", "since", "start", "stop")

    def __init__(self, start: int, stop: int, guards: Guards, since: int) -> None:
        self.start, self.stop, self.guards, self.since = start, stop, guards, since
        self.key: _Key = (stop - start, since, start)


_Key = tuple[int, int, int]
"""What free ranges are sorted by: size, how long they have been free, where. No two have the same: those that have
been free for equally long were one range, of one extent."""


class Range(NamedTuple):
    """Bytes taken out of an extent."""

    extent: Extent
    start: int
    stop: int
    guards: Guards
    since: int
    """The largest number in its guards."""


def joined(segments: Iterable[tuple[int, int]], ranges: Iterable[Range]) -> list[tuple[int, torch.Tensor]]:
    """(byte offset in the chunk, uint8 tensor) of a chunk's segments, (offset, bytes) each and without a gap, in the
    ranges taken for them. Neighbours that are neighbours in one extent, too, become one tensor: one copy for both."""
    runs: list[tuple[int, int, Extent, int]] = []
    for (offset, nbytes), one in zip(segments, ranges, strict=True):
        if runs:
            begin, length, extent, at = runs[-1]
            if extent is one.extent and at + length == one.start:
                runs[-1] = begin, length + nbytes, extent, at
                continue
        runs.append((offset, nbytes, one.extent, one.start))
    return [(begin, extent.memory[at : at + length]) for begin, length, extent, at in runs]


class Extents:
    """First in, best fit: the smallest free range that is large enough, of equals the one free for longest."""

    def __init__(self) -> None:
        self.all: list[Extent] = []
        self.nbytes = 0
        """Bytes of all extents, free or not."""
        self.free_bytes = 0
        """Of them, those that may be taken."""
        self._clock = 0
        self._sorted: list[_Key] = []
        """Free ranges of extents that are not closed: searched for every part of every chunk that moves in."""
        self._free: dict[_Key, tuple[Extent, _Free]] = {}
        """The same ranges and what they are part of."""

    def add(self, memory: torch.Tensor, why: Why, ready: Event) -> Extent:
        """Take over memory (uint8, contiguous) whose last use so far is over when `ready` has passed."""
        extent = Extent(memory, ready)
        self.all.append(extent)
        self.nbytes += extent.nbytes
        self.free_bytes += extent.nbytes
        self._clock += 1
        self._put(extent, 0, extent.nbytes, {why: (self._clock, ready)}, self._clock)
        return extent

    def lend(self, memory: torch.Tensor, why: Why, ready: Event) -> Range:
        """The same with memory that is in use already, and of which nothing more is taken: all of it, as if taken."""
        extent = self.add(memory, why, ready)
        self.close(extent)
        (free,) = extent.free
        self._drop(extent, free)
        return Range(extent, free.start, free.stop, free.guards, free.since)

    def close(self, extent: Extent) -> None:
        """Take nothing more out of an extent; what is taken is given back as ever."""
        extent.closed = True
        for free in extent.free:
            self._unlist(free)
            self.free_bytes -= free.stop - free.start

    def take(self, sizes: Iterable[int]) -> list[Range] | None:
        """A range for each of the sizes, or None, and nothing taken, when they do not all fit."""
        wanted = [-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes]
        if sum(wanted) > self.free_bytes:  # most calls end here
            return None
        taken: list[Range] = []
        for nbytes in wanted:
            found = self._best(nbytes)
            if found is None:
                for one in reversed(taken):
                    self._insert(*one)
                return None
            self.free_bytes -= nbytes
            taken.append(found)
        return taken

    def give(self, range_: Range, why: Why, event: Event) -> None:
        """Give a range back; its next user waits for `event`, which comes after everything waited for before."""
        self._clock = now = self._clock + 1
        self._insert(range_.extent, range_.start, range_.stop, {why: (now, event)}, now)

    @staticmethod
    def guards(ranges: Iterable[Range]) -> list[tuple[Why, Event]]:
        """What must have passed before these ranges are written."""
        return [(why, event) for why, (_, event) in later(*(one.guards for one in ranges)).items()]

    def remove(self, extent: Extent) -> list[tuple[Why, Event]]:
        """Forget an idle extent, whose memory goes back to whom it came from once the returned events have passed."""
        assert extent.idle
        last = extent.free[0]
        self._drop(extent, last)
        self.all.remove(extent)
        self.nbytes -= extent.nbytes
        if not extent.closed:
            self.free_bytes -= extent.nbytes
        return [(why, event) for why, (_, event) in last.guards.items()]

    @staticmethod
    def passed(extent: Extent) -> bool:
        """Whether everything that an idle extent's next user must wait for has passed."""
        return all(event.query() for _, event in extent.free[0].guards.values())

    def _best(self, nbytes: int) -> Range | None:
        at = bisect_left(self._sorted, (nbytes,))
        if at == len(self._sorted):
            return None
        extent, free = self._free.pop(self._sorted.pop(at))
        extent.free.remove(free)
        start, stop, guards, since = free.start, free.start + nbytes, free.guards, free.since
        if stop < free.stop:
            self._put(extent, stop, free.stop, guards, since)
        return Range(extent, start, stop, guards, since)

    def _insert(self, extent: Extent, start: int, stop: int, guards: Guards, since: int) -> None:
        """Add a free range and merge it with its neighbours."""
        if not extent.closed:
            self.free_bytes += stop - start
        for other in tuple(extent.free):  # few
            if other.stop == start:
                start = other.start
            elif other.start == stop:
                stop = other.stop
            else:
                continue
            self._drop(extent, other)
            guards = later(other.guards, guards)
            since = max(since, other.since)
        self._put(extent, start, stop, guards, since)

    def _put(self, extent: Extent, start: int, stop: int, guards: Guards, since: int) -> None:
        free = _Free(start, stop, guards, since)
        extent.free.append(free)
        if not extent.closed:
            insort(self._sorted, free.key)
            self._free[free.key] = extent, free

    def _drop(self, extent: Extent, free: _Free) -> None:
        extent.free.remove(free)
        if not extent.closed:
            self._unlist(free)

    def _unlist(self, free: _Free) -> None:
        del self._sorted[bisect_left(self._sorted, free.key)]
        del self._free[free.key]


def later(first: Guards, *others: Guards) -> Guards:
    """By reason, the latest of the events."""
    latest = first
    for guards in others:
        if guards is not latest:  # ranges that were one share theirs
            found = dict(latest)
            for why, guard in guards.items():
                if why not in found or guard[0] > found[why][0]:
                    found[why] = guard
            latest = found
    return latest
