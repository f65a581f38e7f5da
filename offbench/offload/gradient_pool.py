"""Sharded gradients in compute's pool of the caching allocator.

PyTorch's allocator keeps a pool a stream: what was freed on one stream serves that stream alone, until memory is out
and every pool's leftovers go back at once, for which the device must stand still. FSDP2 reduces gradients on a stream
of its own and makes them there. So what they leave when the optimizer has used them is closed to activations and the
loss of the next forward, what those leave is closed to the gradients of the next backward, and a process reserves the
most of the one plus the most of the other, though the two never come together. Made in compute's pool, either can
have what the other left.

Note [Who may still use a gradient's memory]
    A block of compute's pool may be handed out again as soon as it is freed, to whatever compute queues next.
    - Before: the reducing stream waits for compute once the memory is there. So nothing that compute had queued for an
      earlier owner can run beside the reduction, nor can what fills new memory where torch is to be deterministic.
    - After: compute waits for the reductions when the backward ends. But a gradient that is added to one of an
      earlier backward is freed at once, by the host, while the reducing stream has still to read it; with hybrid
      sharding the all-reducing stream has, and with a hook for that the hook's. All are named to the allocator
      (`record_stream`), which then holds a freed block back until they have passed. Whoever frees gradients that a
      stream of his own still reads has to name it, too, or make compute wait: FSDP2's own pool forgave that until the
      next reduction.

Note [How many of them]
    Gradients stay for long. Among activations they take holes in which short-lived memory of the same size would have
    found a place again, and compute's pool grows instead. So no more should lie there than activations leave free by
    then: those of the first layers, which are reduced last, when the least of the forward's activations is left.

What is freed while the reducing stream is behind cannot be had at once, so a host that runs a whole step ahead of the
device reserves as much as before. Only what FSDP2 itself takes for the result of a reduction is moved: where gradients
are reduced in another dtype than they are kept in, they are copies that stay with the reducing stream, and this moves
temporaries alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from offbench.offload.fsdp import UnknownFSDP, param_groups

_COMM = "_reduce_scatter_comm"
_STREAMS = ("reduce_scatter_stream", "all_reduce_stream")


class GradientPool:
    """From now on until `restore`, FSDP2 makes the sharded gradients of `model` in compute's pool.

    nbytes: no more than so many bytes of them, of those that are reduced last; `auto`: as many as compute's pool has
    free when the second backward reduces its last ones (on devices whose allocator tells, else all); None: all. A
    share begins with the third backward. What the reducing stream's pool no longer needs then stays reserved until the
    allocator's cache is given back, which is worth doing once, after the third step.

    Call it after `fully_shard`, on any module above or at what is sharded, and after whatever replaces FSDP2's own
    collectives: groups with others, which allocate as they see fit, stay as they are.

    Raises UnknownFSDP when this torch's FSDP2 lacks a private part that this needs.
    """

    def __init__(self, model: nn.Module, nbytes: int | Literal["auto"] | None = None) -> None:
        stock = [group for group in param_groups(model) if _is_stock(group)]
        self._share = _Share(nbytes)
        self._comms = [_Reduce(group, self._share) for group in stock]

    @property
    def groups(self) -> int:
        """Parameter groups whose gradients are made there, as far as that is known."""
        return sum(self._share.has(comm) for comm in self._comms)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients made there in the last backward, or so far in this one, once a group."""
        return sum(comm.nbytes for comm in self._comms if self._share.has(comm))

    @property
    def made(self) -> int:
        """Reduced gradients made there so far, one a group and reduction."""
        return sum(comm.made for comm in self._comms)

    def restore(self) -> None:
        """Give FSDP2 its own way back; gradients that are there stay where they are."""
        for comm in self._comms:
            comm.restore()
        self._comms = []


def _is_stock(group: Any) -> bool:
    comm = getattr(group, _COMM, None)
    if comm is None:
        raise UnknownFSDP(f"torch {torch.__version__}: FSDPParamGroup has no {_COMM}")
    return type(comm).__name__ == "DefaultReduceScatter"


class _Share:
    """Which groups' gradients go to compute's pool."""

    def __init__(self, most: int | Literal["auto"] | None) -> None:
        self._most = most
        self._order: dict[_Reduce, int] = {}
        """Bytes by group, in the order of the first backward."""
        self._again: set[_Reduce] = set()
        """Those that were reduced in the second one as well."""
        self._chosen: set[_Reduce] | None = None
        """None: not known yet."""

    def has(self, comm: _Reduce) -> bool:
        """Whether that group's do, as far as is known."""
        return self._most is None or (self._chosen is not None and comm in self._chosen)

    def reduced(self, comm: _Reduce, nbytes: int, free: Callable[[], int | None]) -> None:
        """A group is reduced to so many bytes; free: what compute's pool has left, None where nobody knows."""
        if self._most is None or self._chosen is not None:
            return
        if comm not in self._order:
            self._order[comm] = nbytes
            return
        self._again.add(comm)
        if len(self._again) == len(self._order):
            room = free() if self._most == "auto" else self._most
            self._chosen = set(self._last(sum(self._order.values()) if room is None else room))

    def _last(self, room: int) -> Iterator[_Reduce]:
        """Those that are reduced last, as far as they all fit."""
        for comm, nbytes in reversed(self._order.items()):
            room -= nbytes
            if room < 0:
                return
            yield comm


class _Reduce:
    """A group's reduce-scatter. FSDP2 asks it for the memory of the input, then, on the reducing stream, of the
    result, and calls it."""

    def __init__(self, group: Any, share: _Share) -> None:
        self._group = group
        self._share = share
        self._own = getattr(group, _COMM)
        self._compute: Any = None
        """The stream that the input was asked for on."""
        self.made = 0
        self.nbytes = 0
        """Of the last result."""
        setattr(group, _COMM, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the input or the result of a reduction: [size], dtype, uninitialised."""
        module = torch.get_device_module(device)
        current = module.current_stream()
        side = [self._stream(name) for name in _STREAMS]
        if (hook := getattr(self._group, "_all_reduce_hook_stream", None)) is not None:
            side.append(hook)
        if current != side[0]:
            self._compute = current
            return self._take(size, dtype, device)
        compute, self._compute = self._compute, None
        if compute is None:
            return self._take(size, dtype, device)
        self.nbytes = math.prod(size) * dtype.itemsize
        is_there = self._share.has(self)
        self._share.reduced(self, self.nbytes, lambda: _free(module, device, compute))
        if not is_there:
            return self._take(size, dtype, device)
        with module.stream(compute):
            result = self._take(size, dtype, device)
        side[0].wait_stream(compute)
        if device.type != "cpu":  # nothing is ever in flight there, and record_stream raises
            for stream in side:
                result.record_stream(stream)
        self.made += 1
        return result

    def restore(self) -> None:
        """Leave the group as it was, unless somebody replaced this one meanwhile."""
        if getattr(self._group, _COMM) is self:
            setattr(self._group, _COMM, self._own)

    def _take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory: torch.Tensor = self._own.allocate(size, dtype=dtype, device=device)
        return memory

    def _stream(self, name: str) -> Any:
        """Asked for at every reduction: FSDP2 makes its streams at the first forward, and then once."""
        stream = getattr(self._group.comm_ctx, name, None)
        if stream is None:
            raise UnknownFSDP(f"torch {torch.__version__}: FSDP2's communication context has no {name}")
        return stream


def _free(module: ModuleType, device: torch.device, compute: Any) -> int | None:
    """Bytes that compute's pool holds and nobody uses; None where the allocator does not tell."""
    snapshot = getattr(module, "memory_snapshot", None)
    if snapshot is None:
        return None
    own: list[dict[str, Any]] = [
        one
        for one in snapshot()
        if (one["device"], one["stream"]) == (device.index, compute.cuda_stream)
        and tuple(one.get("segment_pool_id", (0, 0))) == (0, 0)  # not a private pool
    ]
    return sum(int(one["total_size"]) - int(one["active_size"]) for one in own)
