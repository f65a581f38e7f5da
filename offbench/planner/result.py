"""What a simulation finds: the step, what it waited for, its memory, and what happened in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Waits:
    """Seconds per step in which the compute stream had nothing to do, by what it waited for."""

    move_in: float = 0.0
    """State on its way to the GPU."""
    slot: float = 0.0
    """Staging memory, or host memory, still being written back."""
    write_back: float = 0.0
    """The end of a synchronous step, or memory that the loss needs."""
    small: float = 0.0
    """Small copies behind bulk ones on the same copy engine."""
    slowed: float = 0.0
    """No wait: what forward loses to the multiprocessors that updates in host memory take."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.move_in + self.slot + self.write_back + self.small + self.slowed


@dataclass(frozen=True)
class Span:
    """A stretch of a step in which nothing changed."""

    start: float
    end: float
    """Seconds since the step began with its forward."""
    compute: str
    """`forward`, `loss`, `backward`, `step` (clip), `update`, or what is waited for, as in Waits. Updates in host
    memory run beside what is named."""
    moving_in: bool
    moving_out: bool
    held: float
    """Bytes of state on the GPU, resident ones included."""


@dataclass(frozen=True)
class Simulated:
    """A steady step of one schedule."""

    step_s: float
    waits: Waits
    staging_bytes: int
    """The ring, or the most staged at once."""
    peak_state_bytes: int
    """Most optimizer state, or memory set aside for it, on the GPU at any time."""
    state_at_backward_end_bytes: int
    state_at_loss_bytes: int
    """Optimizer state on the GPU when the forward ends."""
    peak_bytes: int
    """Most memory of all kinds at any time, as far as the Footprint counts it: never below peak_state_bytes."""
