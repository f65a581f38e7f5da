"""What a profiler's trace says about the host: where it waited for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


FEW = 512
"""Bytes; state moves by far more."""


def waits(trace: Iterable[Mapping[str, Any]], label: str) -> Counter[str]:
    """Calls inside the ranges of that name that make the host wait, copies of pageable memory among them, and copies
    of a few bytes to the host, which are there for somebody who waits."""
    events = [event for event in trace if event.get("ph") == "X"]
    ranges = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "user_annotation" and e["name"] == label]
    calls = [e for e in events if e["cat"] == "cuda_runtime" and any(a <= e["ts"] <= b for a, b in ranges)]
    copies = [e for e in events if e["cat"] == "gpu_memcpy"]
    pageable = {e["args"]["correlation"] for e in copies if "Pageable" in e["name"]}
    few = {e["args"]["correlation"] for e in copies if "DtoH" in e["name"] and e["args"].get("bytes", FEW) < FEW}
    found = Counter(e["name"] for e in calls if e["name"] in WAITS)
    for kind, correlations in (("pageable", pageable), ("few bytes", few)):
        found[kind] = sum(e["args"].get("correlation") in correlations for e in calls)
    found["ranges"] = len(ranges)
    return +found
