"""chunked: state moves by chunks through staging slots, both directions and the update at once (prime-rl#4008).

First step: `whole` is what prime-rl#4008 did; `bounded` is prime-rl#4154.
"""

from __future__ import annotations

from offbench.arms.arm import Arm
from offbench.config import GIB
from offbench.offload.schedule import Schedule

ARM = Arm(
    name="chunked",
    moves="chunks in, updated, out",
    when="in step(), both directions at once",
    memory="`slots` chunks during step()",
    schedule=lambda spec: Schedule(
        "chunked",
        offloaded=True,
        chunk_bytes=spec.chunk_bytes or GIB,
        resident_bytes=spec.resident_bytes,
        slots=spec.slots or 2,
        first_step=spec.first_step or "bounded",
    ).in_pieces(spec.pieces or 1),
    defaults={"chunk_bytes": GIB, "pieces": 4, "state_budget": 0, "slots": 2, "first_step": "bounded"},
)
