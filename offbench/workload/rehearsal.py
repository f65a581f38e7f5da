"""A process group that stands in for all ranks of a job inside one process, as if every rank held what we hold.

| collective | result |
|---|---|
| all-gather | the own shard in every slot |
| reduce-scatter | the own slice, once (AVG) or times the ranks (SUM) |
| all-reduce | SUM times the ranks; AVG, MAX, MIN unchanged |
| all-to-all | from every rank, the segment we would send to ourselves |
| broadcast, scatter, gather, barrier | nothing travels |

So FSDP2 and expert parallelism shard for real, buffers have their true sizes, every result is finite and the same
in each run, and nothing waits for anybody. torch's own fake group leaves outputs unwritten on some versions.
Results are written on the current stream, as a collective that takes no time on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore, Store

c10d: Any = _distributed_c10d
BACKEND = "rehearsal"


def init_rehearsal(rank: int, world: int) -> None:
    """Make this process rank `rank` of `world`, alone; device meshes over CPU and CUDA then work as in a real job.

    Raises ValueError for a rank outside the world.
    """
    if not 0 <= rank < world:
        raise ValueError(f"cannot rehearse rank {rank} of {world} ranks")
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=HashStore())


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> RehearsalGroup:
    return RehearsalGroup(rank, size)


class RehearsalGroup(dist.ProcessGroup):
    """See the module. Method names are those torch calls: 2.11 the `_base` ones, newer versions the `_single` ones."""

    def __init__(self, rank: int, size: int) -> None:
        arguments: Any = (rank, size)  # the stubs of some versions know another constructor only
        super().__init__(*arguments)
        self._rank, self._size = rank, size
        self._done = _completed()
        """What every collective returns: nothing is ever left to wait for."""

    def getBackendName(self) -> str:
        """Name of the backend, as `dist.get_backend` shows it."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """Name torch gave this group."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Same as `pg_name`; functional collectives look groups up by it."""
        return self.pg_name

    # Signatures differ between versions and overloads; torch calls with positions: tensors first, options last.

    def _allgather_base(self, *call: Any, **options: Any) -> dist.Work:
        output, own = call[:2]
        slots = output.view(self._size, -1)
        # FSDP2 gathers in place: `own` may be our slot of `output`, and must not be copied onto itself.
        in_place = own.data_ptr() == slots[self._rank].data_ptr()
        parts = (slots[: self._rank], slots[self._rank + 1 :]) if in_place else (slots,)
        for part in parts:
            _fill(part, own.reshape(-1))
        return self._done

    def _reduce_scatter_base(self, *call: Any, **options: Any) -> dist.Work:
        output, whole = call[:2]
        own = whole.view(self._size, -1)[self._rank].view_as(output)
        torch.mul(own, self._factor(call[-1]), out=output)
        return self._done

    def alltoall_base(self, *call: Any, **options: Any) -> dist.Work:
        output, rows, receive, send = call[:4]
        _all_to_all(output, rows, self._splits(output, receive), self._splits(rows, send), self._rank)
        return self._done

    def all_gather_single(self, *call: Any, **options: Any) -> dist.Work:
        return self._allgather_base(*call)

    def reduce_scatter_single(self, *call: Any, **options: Any) -> dist.Work:
        return self._reduce_scatter_base(*call)

    def all_to_all_single(self, *call: Any, **options: Any) -> dist.Work:
        return self.alltoall_base(*call)

    def allgather(self, *call: Any, **options: Any) -> dist.Work:
        for slots, own in zip(*call[:2], strict=True):
            for slot in slots:
                slot.copy_(own)
        return self._done

    def allreduce(self, *call: Any, **options: Any) -> dist.Work:
        factor = self._factor(call[-1])
        for tensor in call[0]:
            if factor != 1:
                tensor.mul_(factor)
        return self._done

    def allreduce_coalesced(self, *call: Any, **options: Any) -> dist.Work:
        return self.allreduce(*call)

    def broadcast(self, *call: Any, **options: Any) -> dist.Work:
        return self._done

    def scatter(self, *call: Any, **options: Any) -> dist.Work:
        for output, slots in zip(*call[:2], strict=False):  # slots: only where this rank is the source
            output.copy_(slots[self._rank])
        return self._done

    def gather(self, *call: Any, **options: Any) -> dist.Work:
        return self.allgather(*call) if call[0] else self._done

    def barrier(self, *call: Any, **options: Any) -> dist.Work:
        return self._done

    def _splits(self, rows: Tensor, sizes: Sequence[int]) -> list[int]:
        return list(sizes) or [rows.shape[0] // self._size] * self._size

    def _factor(self, opts: Any) -> int:
        """What equal values of all ranks reduce to, as a multiple of one of them."""
        op = opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return self._size
        if any(op == same for same in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
            return 1  # `in` would compare the other way round, which these types do not support
        raise ValueError(f"a rehearsal cannot reduce with {op}; it knows SUM, AVG, MAX and MIN")


def _all_to_all(output: Tensor, rows: Tensor, receive: list[int], send: list[int], rank: int) -> None:
    """Fill every segment of `output` with our segment for ourselves, cut or repeated where sizes differ."""
    own = torch.split(rows, send)[rank]
    if set(receive) == {own.shape[0]}:
        _fill(output.view(len(receive), -1), own.reshape(-1))
        return
    for segment in torch.split(output, receive):
        _repeat(segment, own)


def _fill(slots: Tensor, own: Tensor) -> None:
    """Copy `own` [n] into every row of `slots` [ranks, n].

    A broadcast copy handles one element at a time: with 16-byte elements it is four times as fast as with bf16.
    """
    for wide in (torch.complex128, torch.int64, torch.int32):
        sizes = own.nbytes, own.storage_offset() * own.itemsize, slots.storage_offset() * slots.itemsize
        if slots.numel() and not any(size % wide.itemsize for size in sizes):
            slots, own = slots.view(wide), own.view(wide)
            break
    slots.copy_(own)


def _repeat(segment: Tensor, rows: Tensor) -> None:
    """Fill `segment` with `rows`, from the start again as often as needed; with zeros if there are none."""
    if not rows.shape[0]:
        segment.zero_()
        return
    for first in range(0, segment.shape[0], rows.shape[0]):
        part = segment[first : first + rows.shape[0]]
        part.copy_(rows[: part.shape[0]])


def _completed() -> dist.Work:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    work: dist.Work = c10d._create_work_from_future(future)
    return work
