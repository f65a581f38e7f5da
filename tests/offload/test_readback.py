"""Small values reach the host, bit for bit, by a copy and by a kernel."""

from __future__ import annotations

import pytest
import torch

from offbench.offload.readback import Mailbox

VALUES = torch.tensor([3, -1, 1 << 40, 0, 7, 7], dtype=torch.int64)


@pytest.mark.parametrize("way", ["copy", "kernel"])
def test_on_the_cpu_both_ways_are_copies(way: str) -> None:
    box = Mailbox(torch.full((2, 4), -9, dtype=torch.int64), torch.device("cpu"), way)
    box.send(VALUES.view(2, 3))
    assert box.buffer.flatten().tolist() == [*VALUES.tolist(), -9, -9]
    assert box.kernel_writes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("way", ["copy", "kernel"])
def test_the_device_writes_what_the_host_reads(way: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    values = torch.tensor([3, -1, 1 << 20, 0, 7, 7]).to(dtype)
    box = Mailbox(torch.full((2, 4), -9, dtype=dtype, pin_memory=True), device, way)
    box.send(values.to(device).view(2, 3))
    torch.cuda.current_stream(device).synchronize()
    assert box.buffer.flatten().tolist() == [*values.tolist(), -9, -9]
    assert box.kernel_writes == (way == "kernel")
