"""On a CUDA device: what the watch says is what the allocator's own counters say."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch

from offbench.device import Device
from offbench.pools import PoolWatch, summed_up

MIB = 1 << 20


@pytest.mark.gpu
def test_pools_and_parts_are_the_allocators_own(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    side = torch.cuda.Stream(device)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    with PoolWatch(Device.of(device), lambda: {side.cuda_stream: "side"}, tmp_path / "a" / "memory.pickle") as watch:
        early = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
        del early  # compute's pool has its most now
        with torch.cuda.stream(side):
            gradient = torch.empty(300 * MIB, dtype=torch.uint8, device=device)
        late = torch.empty(100 * MIB, dtype=torch.uint8, device=device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            late.record_stream(side)
        del late  # held back: the side stream has to pass
        more = torch.empty(40 * MIB, dtype=torch.uint8, device=device)
        del gradient, more
    found = watch.figures()
    assert found is not None
    assert found.reserved_bytes == torch.cuda.memory_reserved(device)
    assert found.reserved_bytes - before >= (256 + 300) * MIB
    assert found.allocated_bytes == torch.cuda.max_memory_allocated(device)
    assert found.held_bytes == 40 * MIB, "100 of late are still in use when 40 more come"
    assert found.allocated_bytes + found.held_bytes + found.apart_bytes + found.spare_bytes == found.reserved_bytes
    named = {pool.stream: pool for pool in found.pools}
    assert named["side"].most_bytes == named["side"].at_peak_bytes == 300 * MIB
    snapshot = pickle.loads((tmp_path / "a" / "memory.pickle").read_bytes())
    assert summed_up(snapshot, 0, {}).pools[0].reserved_bytes == found.pools[0].reserved_bytes
