"""`--broadcast-every N`: the weight broadcasts of a launch, as one rank makes them, and the record of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from offbench.config import RunSpec
from offbench.offload import OffloadedAdamW
from offbench.record import Broadcast
from offbench.workload.broadcast import Broadcaster, Sent
from offbench.workload.parallel import Job


class ReplicaLog:
    """Broadcasts after every N-th step and remembers what each one took. All host memory is taken at construction.

    Every broadcast comes right after a step(), while the updates of a deferred arm are in flight, and belongs to that
    step's time. `workload.rules` sees to it that the first one, which is whole, is in the warm-up and that the last
    step ends with one.
    """

    def __init__(self, spec: RunSpec, job: Job, optimizer: OffloadedAdamW) -> None:
        assert spec.workload.broadcast_every is not None
        self._every = spec.workload.broadcast_every
        self._warmup = spec.window.warmup
        self._broadcaster = Broadcaster(job.model, job.dp.get_group(), optimizer.settled, spec.workload.ep)
        self._sent: list[Sent] = []

    def after(self, step: int) -> None:
        """Broadcast if it is the turn of that step, counted from 0. A collective."""
        if (step + 1) % self._every == 0:
            self._sent.append(self._broadcaster.broadcast())

    @property
    def pinned_bytes(self) -> tuple[int, int]:
        """Host memory of this rank that is requested and locked for it, the replica itself left out."""
        return self._broadcaster.pinned_bytes

    def differences(self) -> list[str]:
        """Parameters whose replica is not the trainer's weight, on rank 0. A collective."""
        return self._broadcaster.differences()

    def describe(self) -> Broadcast:
        """The record's account. Figures of the window are null when no broadcast fell into it."""
        first, window = self._sent[0], self._sent[self._warmup // self._every :]
        elements = self._broadcaster.whole_bytes / 2
        return Broadcast(
            broadcasts=len(self._sent),
            full_bytes=first.nbytes,
            full_s=first.seconds,
            delta_bytes=_mean(sent.nbytes for sent in window),
            delta_s=_mean(sent.seconds for sent in window),
            drain_s=_mean(sent.drain_s for sent in window),
            changed=_mean(sent.changed / elements for sent in window if sent.changed is not None),
        )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None
