"""What the host does while it waits for the device.

A trainer whose forward reads something back, as the expert counts of every layer, holds the host until the device has
got that far. To queue a layer's deferred updates takes the host time, too. In such a wait that costs the step nothing;
anywhere else it may delay the forward's own kernels. How much fits is known only while the host waits, so little is
queued at a time. Trainers that wait by other means lose nothing but that: updates are queued where gathers need them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

QueueMore = Callable[[], bool]
"""Queues a little, if its time has come; returns whether there was anything to queue, now or later in this wait."""


class Awaited(Protocol):
    """An event of a device, as `torch.Event`."""

    def query(self) -> bool:
        """Whether the device has got there."""

    def synchronize(self) -> None:
        """Hold the host until it has."""


_offers: list[QueueMore] = []
_waits = [0]


def waits() -> int:
    """How often the process has waited so far; where the event had passed, the host had no time to queue anything."""
    return _waits[0]


def offer(queue_more: QueueMore) -> Callable[[], None]:
    """Have it called in waits from now on; returns what ends that."""
    _offers.append(queue_more)

    def withdraw() -> None:
        _offers[:] = [other for other in _offers if other is not queue_more]

    return withdraw


def wait(event: Awaited) -> None:
    """Hold the host until `event` has passed, as `event.synchronize()` does; until then optimizers queue updates. The
    host asks again and again while one of them has something to queue.

    Call it on the thread that runs the forward (or recomputes it), with the stream current that the model computes on;
    optimizers of several models in a process must share that stream. Raises whatever they raise.
    """
    if not event.query():
        _waits[0] += 1
        while max([queue_more() for queue_more in list(_offers)], default=False) and not event.query():  # all of them
            pass
    event.synchronize()
