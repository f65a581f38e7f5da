"""What the simulator is told beside the engine's Schedule: whether state is fetched during backward already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from offbench.offload.headroom import arena_replaced, arena_retires
from offbench.offload.schedule import Schedule


@dataclass(frozen=True)
class Policy(Schedule):
    """A Schedule, and prefetch. Without it it is that Schedule, which is how every arm is simulated: stream, too,
    though it prefetches where activations make the peak.

    `staging_bytes` beside prefetch is the staged state allowed when backward ends, `write_back` backward leaves
    everything that memory does not demand to the next backward, and `loss_bytes` is what the forward may leave.
    """

    prefetch: bool = False
    """Move-in starts with backward, in forward order; step() queues all that is left."""

    @staticmethod
    def of(schedule: Schedule) -> Policy:
        """The same schedule as a policy; fields that it lacks keep their defaults."""
        return Policy(**{field.name: getattr(schedule, field.name) for field in fields(schedule)})


def stream(
    staging_bytes: int,
    resident_bytes: int = 0,
    *,
    write_back: Literal["forward", "backward"] = "backward",
    loss_bytes: int | None = None,
    chunk_bytes: int = 1 << 30,
) -> Policy:
    """Arm stream as it could be: with prefetch in backward, everything queued by step()."""
    return Policy(
        "stream",
        offloaded=True,
        chunk_bytes=chunk_bytes,
        resident_bytes=resident_bytes,
        deferred=True,
        prefetch=True,
        staging_bytes=staging_bytes,
        write_back=write_back,
        loss_bytes=loss_bytes,
    )


def grows(policy: Policy, nbytes: float, gradients: float) -> float:
    """Bytes that staging grows by per byte of state updated, `nbytes` in all: its gradient's; without prefetch no more
    than the even pace that gets to `loss_bytes` with the last update (`Allowance.grows`)."""
    if policy.prefetch or policy.loss_bytes is None or not nbytes:
        return gradients
    held = 0 if _retires(policy) else policy.staging_bytes or 0
    return min(gradients, max(0, policy.loss_bytes - held) / nbytes)


def _retires(policy: Policy) -> bool:
    """Whether what step() takes goes back before the forward ends."""
    return not policy.prefetch and arena_retires(policy.loss_bytes, policy.staging_bytes or 0)


def staging_room(policy: Policy, growth: float, freed: float, total: float) -> float:
    """Bytes that may be staged once `freed` of `total` bytes of state are updated: the arena and what it has grown by;
    without the arena from half of the updates on, if it has grown by as much."""
    arena = policy.staging_bytes or 0
    gone = _retires(policy) and arena_replaced(freed, total, growth * freed, arena)
    return growth * freed if gone else arena + growth * freed


def written_in_forward(policy: Policy, sizes: Sequence[int], growth: float, kept: int = 0) -> tuple[int, int]:
    """Leading chunks that are written back in forward already: those the loss's memory demands, and those without
    which a later chunk would find no room (at least as many).

    sizes: bytes a chunk moves, 0 for resident ones, whose state is `kept` bytes; growth: as `grows`.
    """
    if policy.staging_bytes is None or policy.write_back == "forward":
        demanded = _first_with_rest(sizes, policy.loss_bytes)
        return demanded, len(sizes)
    demanded, most = _first_with_rest(sizes, policy.loss_bytes) if policy.prefetch else 0, 0.0
    moved = 0
    for size in sizes:
        # The chunk before this one may still be updating: its gradient is there.
        freed = kept + max(0, moved - size)
        most = max(most, moved + size - staging_room(policy, growth, freed, kept + sum(sizes)))
        moved += size
    pressed, out = 0, 0
    while out < most and pressed < len(sizes):
        out += sizes[pressed]
        pressed += 1
    return demanded, max(demanded, pressed)


def _first_with_rest(sizes: Sequence[int], allowed: int | None) -> int:
    """How many leading chunks must be gone for the others to take at most `allowed` bytes."""
    left, gone = sum(sizes), 0
    while allowed is not None and left > allowed:
        left -= sizes[gone]
        gone += 1
    return gone
