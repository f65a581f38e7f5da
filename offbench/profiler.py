"""Traces of whole training steps, taken after the measured window so that no figure carries the profiler's cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from offbench.device import Device
from offbench.offload.readback import Way
from offbench.trace.events import STAMP
from offbench.window import PhaseName, Scalars, WindowRecorder

STEPS = 2
"""Profiled steps that count: copies of one step run over into the next. Named as the profiler names its own."""


class TracedRecorder(WindowRecorder):
    """A recorder of one step to warm up and STEPS that count, whose stamps a trace can show.

    A trace does not hold events. So each stamp also launches a kernel of one element, inside a mark that names it: it
    starts when the compute stream has come so far, waits for other streams included.
    """

    def __init__(self, device: Device, readbacks: Way = "copy") -> None:
        super().__init__(device, 1, STEPS, readbacks)
        self._element = torch.zeros(1, device=device.torch_device)
        self._element.add_(1)  # so that its kernel is loaded before any step

    def begin(self) -> None:
        """As WindowRecorder's."""
        super().begin()
        self._show("begin")

    def mark(self, phase: PhaseName) -> None:
        """As WindowRecorder's."""
        super().mark(phase)
        self._show(phase)

    def end(self) -> Scalars:
        """As WindowRecorder's."""
        self._show("end")
        return super().end()

    def _show(self, name: str) -> None:
        if self.done < self.warmup:
            return
        with torch.profiler.record_function(STAMP + name), torch.no_grad():
            self._element.add_(1)


def profile(step: Callable[[int], None], first: int, path: Path | None, device: torch.device) -> str | None:
    """Run one step to warm up and STEPS more, all under the profiler, and write a Chrome trace, gzipped, to `path`.
    None: run the steps alone, as other ranks need them. Returns why there is no trace, if there should be one.

    The host stands still while the profiler starts, so that all copies queued until then end unseen: only a step after
    one that began under the profiler has all of its copies. The first is not marked as a step for that reason.
    step(i) runs the i-th training step, counted from `first`. The device is idle before the first and after the last.
    """
    steps = range(first + 1, first + 1 + STEPS)
    if path is None:
        for number in (first, *steps):
            step(number)
        return None
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:  # 2.11 warns without it
        step(first)
        for number in steps:
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step(number)
        torch.get_device_module(device).synchronize()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
