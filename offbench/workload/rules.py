"""Which workloads make sense at all; asked before anything starts, and again by each rank. No torch here."""

from __future__ import annotations

from offbench.config import RunSpec
from offbench.errors import UsageError
from offbench.workload.presets import ModelShape


def check(spec: RunSpec, shape: ModelShape) -> None:
    """Raise UsageError when the workload cannot run on that many ranks."""
    w, world = spec.workload, spec.mode.world
    if world % w.ep or shape.experts % w.ep:
        raise UsageError(f"--ep {w.ep} must divide {world} ranks and {shape.experts} experts; choose another")
    if w.routing == "balanced" and w.seq_len * w.micro_batch * shape.top_k % shape.experts:
        raise UsageError(
            f"{w.seq_len * w.micro_batch} tokens x {shape.top_k} choices do not divide by {shape.experts} experts; "
            "choose another --seq-len or --natural-routing"
        )
    if not w.count_readback and w.routing != "balanced":
        raise UsageError("--no-count-readback: only balanced routing makes the counts known; add --balanced-routing")
    if w.activation_offload and w.ac != "full":
        raise UsageError("--activation-offload keeps block inputs: it needs --ac full")
    for flag, steps in (("--warmup", spec.window.warmup), ("--steps", spec.window.steps)):
        if w.broadcast_every and steps % w.broadcast_every:
            raise UsageError(
                f"{flag} {steps} is no multiple of --broadcast-every {w.broadcast_every}: the whole broadcast belongs "
                f"into the warm-up, and the last step must end with one; "
                f"use {flag} {-(-steps // w.broadcast_every) * w.broadcast_every}"
            )
