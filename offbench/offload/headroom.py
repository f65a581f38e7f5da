"""How much staging memory raises no peak, for batches of any length.

All bytes here are the workload's own: what its allocator has handed out, less staging and resident state.

When a backward begins activations are there and gradients are not; at step() it is the other way round. The workload's
peak lies as far above the larger of the two, so staging may hold the difference without raising it. A longer batch
leaves less of it, and the next one may be as long: the least difference of any step so far counts.
"""

from __future__ import annotations


def arena_retires(at_loss: int | None, arena: int) -> bool:
    """Whether what may be staged at the loss is limited, but so large that gradients can replace an arena so large."""
    return at_loss is not None and at_loss >= 2 * arena


def arena_replaced(freed: float, total: float, grown: float, arena: int) -> bool:
    """Whether they have: updates have freed half of all there is to free, and staging has grown by an arena. freed and
    total are of one kind, gradients or state."""
    return 2 * freed >= total and grown >= arena


class Headroom:
    """Watches the workload's own memory from the first backward on."""

    def __init__(self) -> None:
        self.peak: int | None = None
        """Most own bytes seen in any backward, or at step(); None: nobody counts, or nothing was seen yet."""
        self.falling: int | None = None
        """Most seen in any backward after some of its activations had gone: what the loss took is not in it, so it
        compares with what any other layer begins with. None: never were there fewer bytes than when one began."""
        self._left: int | None = None
        self._at_loss: int | None = None
        self._first: int | None = None
        """When the present backward began."""

    def backward(self, own: int | None) -> None:
        """A module's backward is about to begin; of those since the last step() the first one tells the activations.
        None: nobody counts."""
        if own is not None:
            self._at_loss = own if self._at_loss is None else self._at_loss
            self._first = own if self._first is None else self._first
            if own < self._first:
                self.falling = own if self.falling is None else max(self.falling, own)
            self._seen(own)

    def backward_ends(self) -> None:
        """The next call of `backward` is another backward's."""
        self._first = None

    def step(self, own: int | None) -> int | None:
        """step() is about to take its arena. Returns bytes that may be staged when the next forward ends; None when
        nobody has counted yet."""
        if own is not None and self._at_loss is not None:
            left = max(0, own - self._at_loss)
            self._left = left if self._left is None else min(self._left, left)
            self._seen(own)
        self._at_loss = self._first = None
        return self._left

    def _seen(self, own: int) -> None:
        self.peak = own if self.peak is None else max(self.peak, own)
