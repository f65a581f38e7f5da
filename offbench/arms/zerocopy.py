"""zerocopy: the update itself reads and writes state in pinned host memory; no staging, no copy engine."""

from __future__ import annotations

from offbench.arms.arm import Arm
from offbench.config import GIB
from offbench.offload.schedule import Schedule

ARM = Arm(
    name="zerocopy",
    moves="state through the update's own loads and stores, in one kernel of few programs",
    when="step() queues `lead`, the next forward the rest, `ahead` in front",
    memory="`state_budget` always, nothing else: no staging",
    schedule=lambda spec: Schedule(
        "zerocopy",
        offloaded=True,
        chunk_bytes=spec.chunk_bytes or GIB,
        resident_bytes=spec.resident_bytes,
        slots=4,  # of overlap, whose schedule it falls back to
        deferred=True,
        lead=spec.lead or 8,
        ahead=4 if spec.ahead is None else spec.ahead,
        update="host_memory",
    ),
    defaults={"chunk_bytes": GIB, "state_budget": 0, "lead": 8, "ahead": 4},
    unproven="not yet shown on CUDA, where its kernel is compared with torch's at the start, else state is staged",
)
