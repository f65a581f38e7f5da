"""How far the host is ahead of the device at each block of one forward, without a profiler, which slows the host.

Before a block's first kernel the host queues a stamp. When the device comes to it, less when the host queued it, is
the host's lead there: the device has that much queued work left. Where the lead is zero the device waits for the host.

Note [Where the stamps are]
    Forward pre-hooks on the blocks, and on what follows the last one. FSDP2 puts its own hook first, so that ours come
    after it: the host has then done all its work for the block's parameters, and the stream waits for their gather.
    So a lead says that the host is not what the block waits for; the device may still wait for a collective or a copy.
    They count until a step's forward first ends: not in the recomputation of a checkpointed block, nor in later
    micro-batches.

Note [Two clocks]
    Stamps on an idle device tie its clock to the host's: some from before the step that precedes the watched one, some
    from after all of them, so that the watched step itself starts with the copies and the lead that any step has. The
    clocks may run at different rates; between the two ends the difference is taken to grow evenly. An idle device
    reaches a stamp a launch later than the host queues it; as that holds for the tying stamps too, it cancels.
    `accuracy_s` is the largest lead, either way, that one of these seems to have: smaller ones mean nothing. What is
    below zero is set to zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

from torch import nn

from offbench.device import Device, Stamp
from offbench.record import HostLead
from offbench.window import PhaseName, WindowRecorder

TIES = 5
"""Stamps on an idle device before and after; the median of either counts."""


class HostClock:
    """The host's clock in the device's time, tied now and by `close`; the device must have nothing to do then."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._first = self._idle()
        self._last: list[Stamp] = []

    def close(self) -> None:
        """Tie the clocks a second time; what was stamped in between can then be told."""
        self._last = self._idle()

    @property
    def known(self) -> bool:
        """Whether the device has a clock of its own."""
        return self._first[0].event is not None

    def lead(self, stamp: Stamp) -> float:
        """Seconds by which the device came to the stamp later than an idle one had; may be a little below zero."""
        (begin, at_begin), (end, at_end) = self._middle(self._first), self._middle(self._last)
        grown = (at_end - at_begin) * (stamp.host_s - begin) / (end - begin)
        return self._apart(stamp) - at_begin - grown

    def accuracy(self) -> float:
        """The largest lead, either way, that any of the tying stamps seems to have, seconds."""
        return max(abs(self.lead(stamp)) for stamp in (*self._first, *self._last))

    def _idle(self) -> list[Stamp]:
        self._device.synchronize()
        found = []
        for _ in range(1 + TIES):
            found.append(self._device.stamp())
            found[-1].wait()
        return found[1:]  # the first one may have to load something

    def _middle(self, stamps: Sequence[Stamp]) -> tuple[float, float]:
        """Median host time of the stamps, and of the device's clock less the host's."""
        return statistics.median(s.host_s for s in stamps), statistics.median(self._apart(s) for s in stamps)

    def _apart(self, stamp: Stamp) -> float:
        base = self._first[0]
        return self._device.seconds(base, stamp) - (stamp.host_s - base.host_s)


class HostLeadWatch:
    """Watches the step that runs inside a `with` block.

    modules: the blocks in the order of the forward, then what follows them. recorder: of the steps, which has run one
    or more between the clock's making and the block.
    """

    def __init__(self, clock: HostClock, recorder: WindowRecorder, modules: Sequence[nn.Module]) -> None:
        self._clock = clock
        self._recorder = recorder
        self._modules = modules
        self._hooks: list[Any] = []
        self._stamps: list[Stamp] = []
        self._step = 0

    def __enter__(self) -> HostLeadWatch:
        self._step = self._recorder.done
        self._hooks = [module.register_forward_pre_hook(self._before) for module in self._modules]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def figures(self) -> HostLead | None:
        """What was seen; call it once the clock is closed. None where the device has no clock of its own: the CPU."""
        if not self._clock.known:
            return None
        assert len(self._stamps) == len(self._modules), f"{len(self._stamps)} of {len(self._modules)} modules ran"
        return HostLead(
            forward_s=[self._recorder.device.seconds(one, other) for one, other in pairwise(self._stamps)],
            lead_s=[self._lead(stamp) for stamp in self._stamps[:-1]],
            after_clip_lead_s=self._after("clip"),
            after_step_lead_s=self._after("step"),
            accuracy_s=self._clock.accuracy(),
        )

    def _before(self, *_: Any) -> None:
        if not self._recorder.marks(self._step):  # the first forward has not ended yet
            self._stamps.append(self._recorder.device.stamp())

    def _after(self, phase: PhaseName) -> float | None:
        return next((self._lead(stamp) for name, stamp in self._recorder.marks(self._step) if name == phase), None)

    def _lead(self, stamp: Stamp) -> float:
        return max(0.0, self._clock.lead(stamp))
