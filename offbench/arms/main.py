"""main: at the step everything in, one update, everything out, in turn on the compute stream (prime-rl#3552)."""

from __future__ import annotations

from offbench.arms.arm import Arm
from offbench.config import GIB
from offbench.offload.schedule import Schedule

ARM = Arm(
    name="main",
    moves="all state in, then all out",
    when="in step(), one direction at a time",
    memory="all state during step()",
    schedule=lambda spec: Schedule(
        "main",
        offloaded=True,
        chunk_bytes=spec.chunk_bytes or GIB,
        resident_bytes=spec.resident_bytes,
        slots=None,
        copy_streams=False,
    ),
    defaults={"chunk_bytes": GIB, "state_budget": 0},
)
