"""Reserved memory is told apart by pool, and its parts add up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offbench.device import Device
from offbench.pools import PoolWatch, names, summed_up
from offbench.record import Pool, Reserved

GIB = 1 << 30
COMPUTE, REDUCE = 0, 0x77


def event(action: str, size: int, stream: int) -> dict[str, Any]:
    return {"action": action, "size": size, "stream": stream, "addr": 0, "time_us": 0}


def segment(stream: int, total: int, *blocks: tuple[str, int], device: int = 0) -> dict[str, Any]:
    listed = [{"state": state, "requested_size": size, "size": size} for state, size in blocks]
    return {"device": device, "stream": stream, "total_size": total, "blocks": listed}


SNAPSHOT = {
    "segments": [
        segment(COMPUTE, 120, ("active_allocated", 20), ("inactive", 100)),
        segment(REDUCE, 60, ("active_pending_free", 10), ("inactive", 50)),
        segment(REDUCE, 999, ("active_allocated", 999), device=1),
    ],
    "device_traces": [
        [
            event("segment_map", 500, COMPUTE),
            event("alloc", 80, COMPUTE),  # 100 in compute's pool: its most
            event("free_requested", 70, COMPUTE),
            event("free_completed", 70, COMPUTE),
            event("alloc", 50, REDUCE),  # 50 in the reducing pool, 80 in all
            event("free_requested", 10, COMPUTE),
            event("alloc", 45, COMPUTE),  # 125 in use, 115 of them allocated: the most of both
            event("free_completed", 10, COMPUTE),
            event("free_requested", 45, COMPUTE),
            event("free_completed", 45, COMPUTE),
            event("free_requested", 50, REDUCE),
            event("free_completed", 40, REDUCE),
        ],
        [event("alloc", 999, REDUCE)],
    ],
}


def test_each_part_of_what_is_reserved() -> None:
    found = summed_up(SNAPSHOT, 0, {COMPUTE: "compute"})
    assert found is not None
    assert found.pools == [
        Pool(stream="compute", reserved_bytes=120, most_bytes=100, at_peak_bytes=75),
        Pool(stream="stream 0x77", reserved_bytes=60, most_bytes=50, at_peak_bytes=50),
    ]
    assert (found.allocated_bytes, found.in_use_bytes) == (115, 125)
    parts = found.allocated_bytes, found.held_bytes, found.apart_bytes, found.spare_bytes
    assert parts == (115, 10, 25, 30)
    assert sum(parts) == found.reserved_bytes == 180


def test_a_step_with_more_events_than_are_kept_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbench.pools._MOST_EVENTS", 12)
    assert summed_up(SNAPSHOT, 0, {}) is None


def test_a_pool_is_called_after_its_stream_and_computes_own_name_goes_first() -> None:
    """Streams come from a small set, so two of them may be one."""

    def stream(handle: int) -> Any:
        return SimpleNamespace(cuda_stream=handle)

    side = {"in": stream(1), "out": stream(2), "update": stream(0)}
    assert names(nn.Linear(1, 1), side, stream(0)) == {1: "optimizer in", 2: "optimizer out", 0: "compute"}


def test_the_cpu_has_no_pools() -> None:
    with PoolWatch(Device.of(torch.device("cpu")), dict) as watch:
        pass
    assert watch.figures() is None


def test_the_rank_that_reserves_most_counts() -> None:
    small, large = (
        Reserved(
            allocated_bytes=1,
            in_use_bytes=1,
            pools=[Pool(stream="a", reserved_bytes=n, most_bytes=1, at_peak_bytes=1)],
        )
        for n in (2, 3)
    )
    assert Reserved.worst([None, small, large, small]) is large
    assert Reserved.worst([None]) is None
