"""The engine of arm zerocopy: updates read and write state where it lives, in host memory; nothing is staged.

Note [Who waits for whom]
    stream   waits for           because (see `streams.Why`)
    update   compute             gradients must be complete and clipped                        GRADIENTS_READY
    reader   update              a layer is gathered after its last chunk's update             READ

The next step's update of the same host bytes follows on the same stream, so nothing else has to be waited for. Updates
of a synchronous schedule run on the compute stream itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from offbench.offload.copies import Direction
from offbench.offload.engine import InOrderEngine, Work
from offbench.offload.gradients import one_of_each
from offbench.offload.staged import Staged
from offbench.offload.streams import Stream, Why

_BOTH: tuple[Direction, Direction] = ("in", "out")


class ZeroCopyEngine(InOrderEngine):
    """Runs the updates of one optimizer in order. Only one step can have work left: the next step() first queues
    whatever the forward never asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._step: deque[Work] | None = None
        """What one step still owes; None when nothing."""
        super().__init__(*args, **kwargs)

    def _plan(self) -> None:
        moving = [chunk for chunk in self.chunks if chunk.index not in self._resident]
        self._in_place = {c.index: Staged.at_home(c, self._store.visible(c.home)) for c in moving}

    @property
    def staging_bytes(self) -> int:
        """None is ever held."""
        return 0

    def _begin_step(self, works: Sequence[Work]) -> None:
        self._step = deque(works)
        if self.schedule.deferred:
            self._streams.side("update").wait(self._streams.compute().record(), Why.GRADIENTS_READY)
            self._queue(self._lead(works))
        else:
            self._queue(len(works))
            self._streams.compute().record().synchronize()

    def _waiting(self) -> Sequence[Work]:
        return self._step or ()

    def _queue(self, count: int) -> None:
        """Queue the next `count` chunks, if there are as many."""
        if self._step is None:
            return
        updates = self._streams.side("update") if self.schedule.deferred else self._streams.compute()
        for _ in range(min(count, len(self._step))):
            self.check()
            self._queue_chunk(updates, self._step[0])
            self._step.popleft()
        if not self._step:
            self._step = None

    def _queue_chunk(self, updates: Stream, work: Work) -> None:
        index = work.chunk.index
        if index in self._resident:
            self._updated[index] = self._update(updates, work, self._kept(work.chunk))
        else:
            begin = updates.record() if self.ledger.keep else None
            self._updated[index] = end = self._update(updates, work, self._in_place[index])
            for direction in _BOTH:  # the kernel is the copy, both ways at once
                self.ledger.copied(direction, work.chunk.nbytes, begin, end)
        if self.schedule.deferred:
            # The gradients return to the allocator when the update has run, not when step() returns.
            self._streams.release(one_of_each(work.gradients), used_by=[updates])
