"""How much staging memory raises no peak."""

from __future__ import annotations


class Headroom:
    """The workload's own memory, seen in the first forward and backward, when nothing is staged yet.

    When the backward begins activations are there and gradients are not; at step() it is the other way round. The
    workload's peak lies as far above the larger of the two, so staging may hold the difference without raising it.
    """

    def __init__(self) -> None:
        self._at_loss: int | None = None

    def backward(self, allocated: int | None) -> None:
        """A module's backward is about to begin, before the first step(); the first one counts."""
        if self._at_loss is None:
            self._at_loss = allocated

    def left_at_loss(self, allocated: int | None) -> int | None:
        """Bytes that may be staged when the forward ends; None when nobody counts memory. Call at the first step()."""
        if self._at_loss is None or allocated is None:
            return None
        return max(0, allocated - self._at_loss)
