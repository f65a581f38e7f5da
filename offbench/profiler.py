"""Traces of whole training steps, taken after the measured window so that no figure carries the profiler's cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

STEPS = 2
"""Profiled steps: copies of one step run over into the next. Named as the profiler names its own."""


def profile(step: Callable[[int], None], first: int, path: Path, device: torch.device) -> None:
    """Run one step to warm the profiler up and STEPS more under it; write a Chrome trace, gzipped, to `path`.

    step(i) runs the i-th training step, counted from `first`. The device is idle before the first and after the last.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    path.parent.mkdir(parents=True, exist_ok=True)
    step(first)
    with torch.profiler.profile(activities=kinds) as profiler:
        for number in range(first + 1, first + 1 + STEPS):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step(number)
        torch.get_device_module(device).synchronize()
    profiler.export_chrome_trace(str(path))
