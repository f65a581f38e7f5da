"""stream: state flows through the memory gradients leave behind; move-in has the link to itself during the forward,
write-back during the end of the forward and the backward. The leading layers' state stays on the GPU; where
activations leave room for more, that of the next layers moves in during the backward; the staging arena fills as soon
as that ends."""

from __future__ import annotations

from offbench.arms.arm import Arm
from offbench.config import GIB
from offbench.offload.schedule import Schedule

STAGING_CHUNKS = 2
"""Default arena, in chunks: at step() activations are gone; of the 4 GiB that Qwen3-30B-A3B with full checkpointing
takes beyond parameters and gradients (one H200, rehearsal of 8) the first layer needs about two for itself."""
LEAD = 12
"""Default of what step() queues, in chunks, besides those that stay: 23 layers of Qwen3-30B-A3B. What the first
updates free decides how fast state can arrive, and in one go they cost the host half of what they cost between a
forward's kernels: a step took 1.973 and 1.980 s with 12, 2.019 and 2.021 s with 6, 2.013 s with 24
(docs/hiding-copies.md)."""

ARM = Arm(
    name="stream",
    moves="chunks in, updated; out when memory asks for it, and after the last move-in",
    when="step() queues `lead`, the next forward the rest, `ahead` in front; out into the next backward",
    memory="`state_budget` always; `staging_bytes` from step() on, growing into gradients to `loss_bytes`",
    schedule=lambda spec: Schedule(
        "stream",
        offloaded=True,
        chunk_bytes=spec.chunk_bytes or GIB,
        resident_bytes=spec.resident_bytes,
        deferred=True,
        lead=spec.lead or LEAD,
        ahead=12 if spec.ahead is None else spec.ahead,
        write_back="backward",
        staging_bytes=STAGING_CHUNKS * (spec.chunk_bytes or GIB) if spec.staging_bytes is None else spec.staging_bytes,
        loss_bytes=spec.loss_bytes,
    ).in_pieces(spec.pieces or 1),
    defaults={
        "chunk_bytes": GIB,
        "pieces": 4,
        "state_budget": 0,
        "staging_bytes": None,
        "loss_bytes": None,
        "lead": LEAD,
        "ahead": 12,
    },
)
