from __future__ import annotations

import re
import time

import pytest
import torch

from offbench.device import CpuDevice, CudaDevice, Device, ScalarReader, peak_bf16_flops
from offbench.errors import UsageError


def test_unsupported_device_names_the_supported_ones() -> None:
    with pytest.raises(UsageError, match="device meta is not supported; use cuda or cpu"):
        Device.of(torch.device("meta"))


def test_cpu_counts_nothing_and_never_says_zero() -> None:
    device = Device.of(torch.device("cpu"))
    device.reset_peaks()
    device.synchronize()
    device.trim()
    figures = (
        device.allocated,
        device.reserved,
        device.peak_allocated,
        device.peak_reserved,
        device.alloc_retries,
        device.used,
        device.limit,
    )
    assert [figure() for figure in figures] == [None] * 7
    assert device.pci_bus_id is None
    assert device.name == "cpu"


def test_cpu_stamps_measure_host_time() -> None:
    device = Device.of(torch.device("cpu"))
    start = device.stamp()
    time.sleep(0.02)
    end = device.stamp()
    end.wait()
    assert 0.02 <= device.seconds(start, end) < 1.0
    assert device.seconds(end, start) == -device.seconds(start, end)


def test_scalar_reader_keeps_order_converts_and_reads_once() -> None:
    reader = ScalarReader(CpuDevice(torch.device("cpu")), most=3)
    reader.send([torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor([4.0], requires_grad=True)])
    assert reader.read() == [2.5, 4.0]
    reader.send([torch.tensor(7.0)])
    assert reader.read() == [7.0]
    with pytest.raises(AssertionError, match="nothing was sent"):
        reader.read()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce GTX 1650", None),
        ("NVIDIA H2000", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_name(name: str, peak: float | None) -> None:
    assert peak_bf16_flops(name) == peak


class Module:
    """100 bytes, of which this process's allocator has reserved 30 and others use 20."""

    def __init__(self, share: float) -> None:
        self.share = share

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 50, 100

    def memory_reserved(self, device: torch.device) -> int:
        return 30

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.share


@pytest.mark.parametrize(("share", "limit"), [(1.0, 80), (0.9, 80), (0.5, 50)])
def test_the_allocator_is_limited_by_other_users_and_by_its_own_share(share: float, limit: int) -> None:
    device = object.__new__(CudaDevice)
    device._module = Module(share)  # type: ignore[assignment]
    device.torch_device = torch.device("cuda", 0)
    assert device.limit() == limit


@pytest.mark.gpu
def test_cuda_identity_and_memory() -> None:
    device = Device.of(torch.device("cuda"))
    assert device.torch_device.index is not None
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0", device.pci_bus_id or "")
    before = device.allocated() or 0
    device.reset_peaks()
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device.torch_device)
    assert (device.allocated() or 0) - before >= 64 << 20
    del block
    assert device.allocated() == before
    assert (device.peak_allocated() or 0) >= before + (64 << 20)
    assert (device.peak_reserved() or 0) >= (device.peak_allocated() or 0)
    assert (device.used() or 0) >= (device.reserved() or 0) > 0
    device.reset_peaks()
    assert device.peak_allocated() == before
    assert (device.reserved() or 0) < (device.limit() or 0)
    device.trim()
    assert (device.reserved() or 0) < (device.peak_reserved() or 0)


@pytest.mark.gpu
def test_cuda_stamp_waits_for_the_compute_stream_alone() -> None:
    device = Device.of(torch.device("cuda"))
    side = torch.cuda.Stream()
    stamp = device.stamp()
    stamp.wait()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # about a second at 2 GHz
        slow = device.stamp()
    start = device.stamp()
    torch.cuda._sleep(20_000_000)
    end = device.stamp()
    assert device.seconds(start, end) > 0.005
    assert not slow.event.query(), "the host waited for another stream"
    device.synchronize()
    assert slow.event.query()
