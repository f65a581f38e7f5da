"""What PyTorch's caching allocator reserves beyond what tensors have at once, and in whose pool it lies.

The allocator keeps a pool a stream: what was freed on one serves that stream alone. So a process reserves more than
the most its tensors ever have together, for three reasons, told apart here by every allocation and release of a step:

- held: memory that is freed, but that another stream has still to pass (`Tensor.record_stream`);
- apart: pools have their most at different times, and each keeps its most;
- spare: within a pool, what lies between blocks or is rounded up, and what it needed outside the watched step only.

Reserved = allocated at most + held + apart + spare, where allocated, held and apart are of the watched step and what
is reserved is read at its end.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offbench.device import Device
from offbench.offload.fsdp import UnknownFSDP, param_groups
from offbench.record_parts import Pool, Reserved

COMPUTE = "compute"
_FSDP = {
    "all_gather_copy_in_stream": "FSDP2 gather, copy-in",
    "all_gather_stream": "FSDP2 gather",
    "reduce_scatter_stream": "FSDP2 reduce-scatter",
    "all_reduce_stream": "FSDP2 all-reduce",
}
_MOST_EVENTS = 1_000_000
"""Allocations and releases kept of a step: of 48 layers and one micro-batch there are tens of thousands."""


def names(model: nn.Module, side: Mapping[str, Any], compute: Any) -> dict[int, str]:
    """What each stream's pool is called, by the stream's handle.

    side: the optimizer's own streams by their names; compute: the current stream.
    """
    found = {stream.cuda_stream: f"optimizer {name}" for name, stream in side.items()}
    try:
        contexts = [group.comm_ctx for group in param_groups(model)]
    except UnknownFSDP:
        contexts = []
    for context in contexts:
        for attribute, name in _FSDP.items():
            if (stream := getattr(context, attribute, None)) is not None:
                found[stream.cuda_stream] = name
    return found | {compute.cuda_stream: COMPUTE}


class PoolWatch:
    """Keeps every allocation and release inside its `with` block; not while a step is measured."""

    def __init__(self, device: Device, named: Callable[[], Mapping[int, str]], keep: Path | None = None) -> None:
        """named: asked when the block is left, by when FSDP2 has its streams; keep: the file for what was seen, as
        torch's own viewer reads it."""
        self._device, self._named, self._keep = device, named, keep
        self._is_cuda = device.torch_device.type == "cuda"
        self._found: Reserved | None = None

    def __enter__(self) -> PoolWatch:
        if self._is_cuda:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", max_entries=_MOST_EVENTS, device=self._device.torch_device
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_cuda:
            return
        try:
            if error is None:
                self._device.synchronize()
                snapshot = torch.cuda.memory._snapshot(self._device.torch_device)
                if self._keep is not None:
                    self._keep.parent.mkdir(parents=True, exist_ok=True)
                    self._keep.write_bytes(pickle.dumps(snapshot))
                self._found = summed_up(snapshot, self._device.torch_device.index or 0, self._named())
        finally:
            torch.cuda.memory._record_memory_history(None, device=self._device.torch_device)

    def figures(self) -> Reserved | None:
        """What was seen; None on the CPU, which has no pools, and where the step was too long to keep."""
        return self._found


def summed_up(snapshot: Mapping[str, Any], index: int, named: Mapping[int, str]) -> Reserved | None:
    """The figures from `torch.cuda.memory._snapshot()` of a process whose history was kept; index: of the device."""
    segments = [one for one in snapshot["segments"] if one["device"] == index]
    events = snapshot["device_traces"][index]
    if len(events) >= _MOST_EVENTS:
        return None
    reserved: Counter[int] = Counter()
    in_use: Counter[int] = Counter()
    allocated = 0
    for segment in segments:
        stream = segment["stream"]
        reserved[stream] += segment["total_size"]
        for block in segment["blocks"]:
            in_use[stream] += block["requested_size"] if block["state"] != "inactive" else 0
            allocated += block["requested_size"] if block["state"] == "active_allocated" else 0
    most_allocated = allocated + _most(events, _allocated)
    most_in_use = sum(in_use.values()) + _most(events, _in_use)
    pools = []
    for stream in sorted(reserved, key=lambda one: -reserved[one]):
        own = [event for event in events if event.get("stream") == stream]
        pools.append(
            Pool(
                stream=named.get(stream, f"stream {stream:#x}"),
                reserved_bytes=reserved[stream],
                most_bytes=in_use[stream] + _most(own, _in_use),
                at_peak_bytes=in_use[stream] + _at_peak(events, stream),
            )
        )
    return Reserved(allocated_bytes=most_allocated, in_use_bytes=most_in_use, pools=pools)


def _in_use(event: Mapping[str, Any]) -> int:
    """By how many bytes the event changes what some stream may still use."""
    return int(event["size"]) * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)


def _allocated(event: Mapping[str, Any]) -> int:
    """By how many bytes the event changes what tensors have."""
    return int(event["size"]) * {"alloc": 1, "free_requested": -1}.get(event["action"], 0)


def _most(events: Sequence[Mapping[str, Any]], change: Callable[[Mapping[str, Any]], int]) -> int:
    """The largest sum after any of them, less that after the last: by how much the most exceeds the end."""
    return _largest(map(change, events)) - sum(map(change, events))


def _largest(changes: Iterable[int]) -> int:
    total = most = 0
    for change in changes:
        total += change
        most = max(most, total)
    return most


def _at_peak(events: Sequence[Mapping[str, Any]], stream: int) -> int:
    """What the stream's pool has when all pools together first have their most, less what it has at the end."""
    total = most = own = then = 0
    for event in events:
        change = _in_use(event)
        total += change
        own += change if event.get("stream") == stream else 0
        if total > most:
            most, then = total, own
    return then - own
