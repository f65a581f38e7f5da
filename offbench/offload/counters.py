"""The `step` of every parameter: tensors of their own, as torch's, that are counted in one call."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from offbench.offload.layout import apart


class StepCounters:
    """Hundreds of tiny tensors on the CPU cost a millisecond or more to count one by one, in step(), where the device
    waits for the host. So they share memory, and only where some parameter has no gradient is each counted alone."""

    def __init__(self) -> None:
        self._shared: list[torch.Tensor] = []
        self._all: list[torch.Tensor] = []

    def make(self, many: int) -> list[torch.Tensor]:
        """Counters of so many further parameters, 0-dim float32 on the CPU, at 0."""
        shared = torch.zeros(many, dtype=torch.float32, device="cpu")  # whatever the defaults are
        made = [apart(counter) for counter in shared.unbind()]
        self._shared.append(shared)
        self._all += made
        return made

    def count(self, counters: Sequence[torch.Tensor]) -> None:
        """Add 1 to each of these, in the order in which they were made; others in their place are counted, too."""
        if len(counters) == len(self._all) and all(map(is_, counters, self._all)):
            for shared in self._shared:
                shared.add_(1)
        elif counters:
            torch._foreach_add_(list(counters), 1)
