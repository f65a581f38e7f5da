"""Host slabs: exact size, stable addresses, zero at first."""

from __future__ import annotations

import gc
import mmap
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from offbench.errors import OffbenchError
from offbench.offload import OffloadedAdamW, hoststore
from offbench.offload.chunks import plan_chunks
from offbench.offload.hoststore import PAGE, HostStore, require_room
from offbench.offload.schedule import Schedule
from offbench.units import GIB
from tests.offload.test_chunks import local_bytes


def test_slabs_are_exact_and_chunks_do_not_share_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoststore, "SLAB_BYTES", 8192)
    sizes = [512, 4096, 2048, 12800, 512, 512]
    store = HostStore(sizes)
    assert store.requested_bytes == sum(sizes)
    assert sum(nbytes for _, nbytes in store.addresses) <= sum(sizes) + PAGE * len(store.addresses)
    assert len(store.addresses) == 3
    for index, size in enumerate(sizes):
        assert store.chunk(index).numel() == size
        assert not store.chunk(index).any()
        store.chunk(index).fill_(index + 1)
    for index in range(len(sizes)):
        assert bool((store.chunk(index) == index + 1).all())
    assert all(address % PAGE == 0 for address, _ in store.addresses)
    assert store.locked_bytes == 0


def test_slabs_of_the_real_model_are_not_rounded_up() -> None:
    """torch's pinned blocks are powers of two: pytorch#150517, #95823, #171662, vllm#48436, #53042"""
    moments = [nbytes for nbytes in local_bytes() for _ in range(2)]
    assert sum(moments) / GIB == pytest.approx(28.435, abs=5e-4)
    assert sum(1 << (nbytes - 1).bit_length() for nbytes in moments) / GIB == pytest.approx(37.856, abs=5e-4)
    chunks = [chunk.nbytes for chunk in plan_chunks(local_bytes(), GIB)]
    slabs = [sum(chunks[first:last]) for first, last in hoststore._slabs(chunks)]
    assert len(slabs) == 8
    assert sum(-(-slab // PAGE) * PAGE for slab in slabs) / GIB == pytest.approx(28.435, abs=1e-3)


def test_views_outlive_the_store() -> None:
    store = HostStore([4096])
    view = store.chunk(0)
    view.fill_(7)
    del store
    gc.collect()
    assert int(view.sum()) == 7 * 4096


def test_a_container_too_small_is_said_before_anything_is_touched(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text(f"{4 << 30}\n")
    (group / "memory.current").write_text(f"{1 << 30}\n")
    require_room(3 << 30, tmp_path)
    with pytest.raises(OffbenchError, match=r"5\.0 GiB .* only 3\.0 GiB more of its 4\.0"):
        require_room(5 << 30, tmp_path)


def test_a_store_asks_for_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoststore, "cgroup_memory", lambda root: [(8192, 4096)])
    with pytest.raises(OffbenchError, match="this container may take only"):
        HostStore([512, 4096])
    store = HostStore([4096])
    with pytest.raises(OffbenchError, match="this container may take only"):
        store.extend([8192])
    assert store.requested_bytes == 4096


def test_local_ranks_that_all_find_room_are_warned_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoststore, "cgroup_memory", lambda root: [(16384, 4096)])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    HostStore([8192])
    with pytest.warns(UserWarning, match="as 2 local ranks may do, and its container has"):
        HostStore([12288])
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostStore([12288])


def test_a_host_too_small_for_its_ranks_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoststore, "cgroup_memory", lambda root: [])
    monkeypatch.setattr(hoststore, "host_memory", lambda root: (16384, 16384))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="as 2 local ranks may do, and the host has"):
        HostStore([12288])
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostStore([12288])


def test_memory_the_system_refuses_is_one_line_and_leaves_the_store_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore([4096])
    made: list[int] = []

    def refused(fileno: int, length: int, **others: int) -> mmap.mmap:
        if made:
            raise OSError(12, "Cannot allocate memory")
        made.append(length)
        return mmap.mmap(fileno, length)

    fake = SimpleNamespace(mmap=refused, MAP_PRIVATE=0, MAP_ANONYMOUS=0)
    monkeypatch.setattr(hoststore, "mmap", fake)
    monkeypatch.setattr(hoststore, "SLAB_BYTES", 4096)
    with pytest.raises(OffbenchError, match=r"refused 0\.000 GiB .*Cannot allocate memory.*ulimit -v"):
        store.extend([4096, 4096])
    assert made == [4096]
    assert store.requested_bytes == 4096
    assert len(store.addresses) == 1


def test_a_low_limit_of_locked_memory_is_said_once_and_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[int] = []

    def slab(self: HostStore, nbytes: int) -> torch.Tensor:
        order.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(HostStore, "_slab", slab)
    monkeypatch.setattr(hoststore, "memlock_limit", lambda: 8192)
    device = torch.device("cuda")  # nothing is pinned: no slab is made
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = HostStore([4096], pin_for=device)
        HostStore([16384])  # pageable memory locks nothing
        with pytest.raises(UserWarning, match="this process pins"):
            HostStore([16384], pin_for=device)
    assert order == [4096, 16384]
    with pytest.warns(UserWarning, match="while RLIMIT_MEMLOCK is 0.000 GiB"):
        store.extend([8192])  # with what is pinned already
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.extend([8192])


@pytest.mark.parametrize("wanted", [True, False])
def test_huge_pages_are_asked_for_unless_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    asked: list[int] = []

    class Recorded(mmap.mmap):
        def madvise(self, option: int, *rest: int) -> None:
            asked.append(option)

    monkeypatch.setattr(hoststore.mmap, "mmap", Recorded)
    schedule = Schedule("chunked", offloaded=True, slots=2)
    OffloadedAdamW([torch.nn.Parameter(torch.zeros(512))], schedule=schedule, huge_pages=wanted)
    assert asked == [mmap.MADV_HUGEPAGE] * wanted


def test_every_page_is_touched_at_once_by_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[int] = []

    class Noted(ThreadPoolExecutor):
        def __init__(self, most: int) -> None:
            workers.append(most)
            super().__init__(most)

    monkeypatch.setattr(hoststore, "ThreadPoolExecutor", Noted)
    before = psutil.Process().memory_info().rss
    store = HostStore([256 << 20])
    assert psutil.Process().memory_info().rss - before > 200 << 20
    assert workers == [len(os.sched_getaffinity(0))]
    del store


class Driver:
    """What of CUDA's runtime pins memory; it refuses slabs above `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self.most:
            return 2
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def test_what_the_driver_pinned_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(8192)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(hoststore, "SLAB_BYTES", 8192)
    store = HostStore([4096, 4096, 512], pin_for=torch.device("cuda"))
    assert driver.pinned == dict(store.addresses)
    assert store.locked_bytes == sum(driver.pinned.values()) == 8192 + PAGE
    with pytest.raises(OffbenchError, match=r"refused to pin .* after .*ulimit -l"):
        store.extend([8192, 16384])
    assert driver.pinned == dict(store.addresses), "the first of the two went back"
    assert store.locked_bytes == 8192 + PAGE
    del store
    gc.collect()
    assert driver.pinned == {}


def test_pinned_pages_stay_with_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork, copy-on-write could move them away from where the device writes."""
    asked: list[int] = []

    class Recorded(mmap.mmap):
        def madvise(self, option: int, *rest: int) -> None:
            asked.append(option)

    monkeypatch.setattr(hoststore.mmap, "mmap", Recorded)
    monkeypatch.setattr(hoststore, "_unregister", lambda slabs: None)
    monkeypatch.setattr(HostStore, "_register", lambda self, slab: None)
    HostStore([4096], pin_for=torch.device("cuda"), huge_pages=False)
    assert asked == [mmap.MADV_DONTFORK]


@pytest.mark.gpu
def test_pages_are_pinned_and_released() -> None:
    device = torch.device("cuda")
    store = HostStore([64 << 20, 512], pin_for=device)
    assert store.locked_bytes >= store.requested_bytes
    assert store.locked_bytes <= store.requested_bytes * 1.02
    assert store.chunk(0).is_pinned()
    view = store.chunk(0)
    store._finalizer()
    assert not view.is_pinned()
