"""Host memory for optimizer state: a few exactly sized slabs, touched by all cores and pinned once.

torch's pinned allocator rounds each block up to a power of two (28.4 GiB of state took 37.9 GiB). A slab is mapped
anonymously, faulted in by parallel threads on the NUMA node those threads are bound to, registered with the device's
driver in place, and released when the store is.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from offbench.errors import OffbenchError
from offbench.hardware import cgroup_memory, host_memory, memlock_caution, memlock_limit
from offbench.offload.readback import device_view
from offbench.units import gib

PAGE = mmap.PAGESIZE
SLAB_BYTES = 4 << 30
"""Slabs hold whole chunks up to this size; a larger chunk gets a slab of its own."""
TOUCH_BYTES = 64 << 20
"""One thread's share of a slab at a time."""


class HostStore:
    """Pinned byte ranges for the chunks of one optimizer, zero at first.

    sizes: bytes of each chunk, multiples of 512. pin_for: the device whose driver must know the pages; None (or a CPU)
    leaves them pageable. huge_pages: ask the kernel for 2 MiB pages: fewer faults, but it may stall to find them where
    memory is fragmented. Before anything is mapped, a container's limit that is too low raises OffbenchError
    (`require_room`); one that is for as much from every local rank, a host that is, and a low RLIMIT_MEMLOCK, are
    UserWarnings. Raises OffbenchError when the system refuses the memory, or the driver to pin it.
    """

    def __init__(self, sizes: Sequence[int], pin_for: torch.device | None = None, *, huge_pages: bool = True) -> None:
        self.requested_bytes = 0
        self.locked_bytes = 0
        self.seconds = 0.0
        """Time spent on mapping, touching and pinning."""
        self.addresses: list[tuple[int, int]] = []
        """(address, bytes) of each slab, for whoever checks on which NUMA node the pages are."""
        self._chunks: list[torch.Tensor] = []
        self._device = pin_for
        self._huge_pages = huge_pages
        self._warned = False
        self._pin = pin_for is not None and pin_for.type == "cuda"
        # Views may outlive the store: their memory stays mapped, it is only no longer pinned.
        self._finalizer = weakref.finalize(self, _unregister, self.addresses if self._pin else [])
        self._finalizer.atexit = False
        self.extend(sizes)

    def extend(self, sizes: Sequence[int]) -> None:
        """Add chunks of these sizes behind the ones there are, whose addresses stay."""
        self._chunks += self._take(sizes)

    def provide(self, sizes: Mapping[int, int]) -> None:
        """Host memory, zero at first, for chunks that had none: their bytes by index."""
        for index, chunk in zip(sizes, self._take(list(sizes.values())), strict=True):
            self._chunks[index] = chunk

    def _take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        began = time.perf_counter()
        self._check(sum(sizes))
        taken, before = [], len(self.addresses)
        try:
            for first, last in _slabs(sizes):
                slab = self._slab(sum(sizes[first:last]))
                start = 0
                for size in sizes[first:last]:
                    taken.append(slab[start : start + size])
                    start += size
        except OffbenchError:  # what was pinned for this call goes back: whoever catches it may ask for less
            unused = [self.addresses.pop() for _ in self.addresses[before:]]
            if self._pin:
                _unregister(unused)
                self.locked_bytes -= sum(nbytes for _, nbytes in unused)
            raise
        self.requested_bytes += sum(sizes)
        self.seconds += time.perf_counter() - began
        return taken

    def _check(self, nbytes: int) -> None:
        """Say what limits stand against so many more bytes; those that may not bind once, as a warning."""
        require_room(nbytes)
        total = self.requested_bytes + nbytes
        cautions = [crowding(total, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]
        if self._pin:
            cautions.append(memlock_caution(total, memlock_limit()))
        for caution in filter(None, [] if self._warned else cautions):
            self._warned = True
            warnings.warn(f"this process {caution}", UserWarning, stacklevel=4)

    def chunk(self, index: int) -> torch.Tensor:
        """uint8 [bytes of the chunk], at the same address for good."""
        return self._chunks[index]

    @property
    def device(self) -> torch.device:
        """Whose kernels the state is for."""
        return self._device if self._device is not None else torch.device("cpu")

    def visible(self, index: int) -> torch.Tensor:
        """The chunk as a tensor of the device, whose kernels reach it over the link; on the CPU the chunk itself."""
        chunk = self._chunks[index]
        if self._device is None or not self._pin:
            return chunk
        view = device_view(chunk, self._device)
        assert view.data_ptr() == chunk.data_ptr(), "a copy"
        return view

    def _slab(self, nbytes: int) -> torch.Tensor:
        if not nbytes:  # all of these chunks' state stays on the device
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        rounded = -(-nbytes // PAGE) * PAGE
        try:
            memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OffbenchError(
                f"the system refused {gib(rounded)} GiB of host memory for optimizer state ({error.strerror}); check "
                "`ulimit -v` and vm.overcommit_memory"
            ) from error
        if self._huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer, larger faults; the kernel may ignore it
        if self._pin:
            # A forked child (a data loader's worker) must not share these pages: copy-on-write could move them away
            # from where the device writes.
            memory.madvise(mmap.MADV_DONTFORK)
        slab = torch.frombuffer(memory, dtype=torch.uint8)
        pieces = [slab[at : at + TOUCH_BYTES] for at in range(0, rounded, TOUCH_BYTES)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(torch.Tensor.zero_, pieces))
        if self._pin:
            self._register(slab)
        self.addresses.append((slab.data_ptr(), rounded))
        return slab

    def _register(self, slab: torch.Tensor) -> None:
        status = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise OffbenchError(
                f"the driver refused to pin {slab.numel() / 2**30:.1f} GiB of host memory after "
                f"{self.locked_bytes / 2**30:.1f} GiB ({status}); check `ulimit -l` and the container's memory limit"
            )
        self.locked_bytes += slab.numel()


def require_room(nbytes: int, root: Path = Path("/")) -> None:
    """Raise OffbenchError when a container would kill this process for touching so many more bytes.

    Only its limit is a wall: free memory may grow (caches, ballooned guests), and drivers pin without charging
    RLIMIT_MEMLOCK.
    """
    for limit, used in cgroup_memory(root):
        if nbytes > limit - used:
            raise OffbenchError(
                f"{nbytes / 2**30:.1f} GiB of host memory for optimizer state, but this container may take only "
                f"{max(0, limit - used) / 2**30:.1f} GiB more of its {limit / 2**30:.1f}; raise its memory limit, "
                "or run fewer ranks in it"
            )


def crowding(nbytes: int, ranks: int, root: Path = Path("/")) -> str | None:
    """Why a container, or the host, is too small for as many bytes from each local rank, which all find room before
    they begin."""
    for limit, _ in cgroup_memory(root):
        if ranks > 1 and ranks * nbytes > limit:
            return (
                f"takes {gib(nbytes)} GiB of host memory, as {ranks} local ranks may do, and its container has "
                f"{gib(limit)} GiB for all; if the ranks share it, raise its memory limit, or run fewer ranks in it"
            )
    if ranks * nbytes > (total := host_memory(root)[0]):
        each = f"{gib(nbytes)} GiB of host memory" + (f", as {ranks} local ranks may do," if ranks > 1 else "")
        return f"takes {each} and the host has {gib(total)} GiB; shard over more hosts"
    return None


def _unregister(slabs: list[tuple[int, int]]) -> None:
    for address, _ in slabs:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _slabs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Index ranges of neighbouring chunks that share a slab."""
    ranges: list[tuple[int, int]] = []
    first = total = 0
    for index, size in enumerate(sizes):
        if total and total + size > SLAB_BYTES:
            ranges.append((first, index))
            first, total = index, 0
        total += size
    if sizes:
        ranges.append((first, len(sizes)))
    return ranges
