"""Host slabs: exact size, stable addresses, zero at first."""

from __future__ import annotations

import gc
import mmap
import warnings
from pathlib import Path

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
