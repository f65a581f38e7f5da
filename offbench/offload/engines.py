"""Which engine executes a schedule."""

from __future__ import annotations

import torch

from offbench.errors import OffbenchError
from offbench.offload.copies import Copier
from offbench.offload.engine import Engine
from offbench.offload.flow import FlowEngine
from offbench.offload.hoststore import HostStore
from offbench.offload.ring import RingEngine
from offbench.offload.schedule import Schedule
from offbench.offload.streams import Streams
from offbench.offload.zerocopy.engine import ZeroCopyEngine


def engine_of(schedule: Schedule) -> type[Engine]:
    """The engine that executes such schedules."""
    if schedule.update == "host_memory":
        return ZeroCopyEngine
    return FlowEngine if schedule.write_back == "backward" else RingEngine


def engine_for(
    present: Engine | None,
    schedule: Schedule,
    store: HostStore,
    streams: Streams,
    copy_repeat: float,
    resident: dict[int, torch.Tensor],
    debug: bool,
) -> Engine:
    """The engine there is, or another one, with its books, for a schedule that it cannot execute."""
    if schedule.update == "host_memory" and copy_repeat > 1:
        raise OffbenchError(f"{schedule.name}: updates in host memory copy no bytes that could be repeated")
    kind = engine_of(schedule)
    if present is not None:
        present.drain()
        if isinstance(present, kind):
            return present
    made = kind((), store, schedule, streams, Copier(copy_repeat), resident, debug)
    if present is not None:
        made.ledger = present.ledger
    return made
