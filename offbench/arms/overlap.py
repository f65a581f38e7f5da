"""overlap: chunks are updated during the next forward, each before its layer is gathered (prime-rl#4427)."""

from __future__ import annotations

from offbench.arms.arm import Arm
from offbench.config import GIB
from offbench.offload.schedule import Schedule

ARM = Arm(
    name="overlap",
    moves="chunks in, updated, out",
    when="step() queues `lead`, the next forward the rest, `ahead` in front",
    memory="`slots` chunks from step() into the next forward",
    schedule=lambda spec: Schedule(
        "overlap",
        offloaded=True,
        chunk_bytes=spec.chunk_bytes or GIB,
        resident_bytes=spec.resident_bytes,
        slots=spec.slots or 4,
        deferred=True,
        lead=spec.lead or 8,
        ahead=4 if spec.ahead is None else spec.ahead,
        first_step=spec.first_step or "bounded",
    ).in_pieces(spec.pieces or 1),
    defaults={
        "chunk_bytes": GIB,
        "pieces": 4,
        "state_budget": 0,
        "slots": 4,
        "lead": 8,
        "ahead": 4,
        "first_step": "bounded",
    },
)
