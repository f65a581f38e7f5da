"""The weight broadcast of an RL loop: bf16 weights, parameter by parameter, from all ranks to a replica on rank 0.

Note [A reader outside the forward]
    FSDP's own gathers wait for deferred updates; this one reads the sharded parameters itself, so it runs inside the
    optimizer's `settled()`. It reads the sharded parameters that the optimizer updates, never what the model has
    registered at the moment: an evaluation forward leaves the root's and the head's parameters gathered, and those
    copies are as old as that forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from offbench.errors import OffbenchError
from offbench.offload.hoststore import HostStore
from offbench.offload.layout import local_of
from offbench.workload import deltas

ALIGNED = 512
"""Host memory of each parameter starts at a multiple of so many bytes."""


@dataclass(frozen=True)
class Sent:
    """One broadcast. Bytes are what the ranks send for it, padding to equal sizes left out."""

    whole: bool
    """Every parameter went whole; else only what changed, where that is less."""
    nbytes: int
    changed: int | None
    """Elements that differ from those of the broadcast before, over all ranks; None for the first."""
    drain_s: float
    """Host time until the optimizer had nothing in flight."""
    seconds: float
    """Host time of the broadcast, the drain included."""


@dataclass(frozen=True)
class _Part:
    """One parameter and who holds which of its rows."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Of the whole, all experts included."""
    rows: tuple[range, ...]
    """Each rank's, of dimension 0."""

    @property
    def row(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def room(self) -> int:
        """Elements of the largest shard: what each rank sends, so that all send the same."""
        return max(map(len, self.rows)) * self.row

    def current(self) -> Tensor:
        """This rank's shard in bf16 [elements], on the device; a copy."""
        return local_of(self.parameter).flatten().to(torch.bfloat16, copy=True)

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's elements of the whole tensor, as a view [elements]."""
        rows = self.rows[rank]
        return whole.view(-1)[rows.start * self.row : rows.stop * self.row]


class Broadcaster:
    """Keeps a replica of a sharded model's weights up to date.

    model: under FSDP2 on one-dimensional meshes; its gathered parameters are resharded. group: all its ranks; rank 0
    holds the replica. ep: ranks that share one set of experts (parameters named `*.experts.*`): rank r holds the
    experts of r mod ep. settled: the optimizer's `settled`. sparse: after the first broadcast send only what changed,
    for which each rank keeps its shard of the last one in host memory.

    Raises OffbenchError for a parameter that is not sharded this way.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        settled: Callable[[], AbstractContextManager[None]],
        ep: int = 1,
        sparse: bool = True,
    ) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._group, self._settled = group, settled
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._root = dist.get_global_rank(group, 0)
        self._parts = [_part(name, p, self._world, ep) for name, p in model.named_parameters()]
        self._whole_next = True
        self._sparse = sparse
        sizes = [-(-local_of(part.parameter).numel() * 2 // ALIGNED) * ALIGNED for part in self._parts]
        self._last = HostStore(sizes if sparse else [], pin_for=local_of(self._parts[0].parameter).device)
        self.replica: dict[str, Tensor] = {}
        """bf16 weights by parameter name, whole, on the CPU; NaN until the first broadcast; empty but on rank 0."""
        if self._rank == 0:
            self.replica = {
                p.name: torch.full(p.shape, math.nan, dtype=torch.bfloat16, device="cpu") for p in self._parts
            }

    @property
    def whole_bytes(self) -> int:
        """The whole model in bf16."""
        return sum(math.prod(part.shape) for part in self._parts) * deltas.WHOLE_BYTES

    @property
    def pinned_bytes(self) -> tuple[int, int]:
        """Host memory of this rank that is requested for, and locked by, the last broadcast's shards."""
        return self._last.requested_bytes, self._last.locked_bytes

    @torch.no_grad()
    def broadcast(self) -> Sent:
        """Bring the replica up to date. Every rank must call it; at any time the device holds the shards and the whole
        of one parameter at most."""
        began = time.perf_counter()
        whole = self._whole_next or not self._sparse
        with self._settled():
            drained = time.perf_counter()
            sent = [self._send(index, whole) for index in range(len(self._parts))]
        self._whole_next = False
        return Sent(
            whole=whole,
            nbytes=sum(nbytes for nbytes, _ in sent),
            changed=None if whole else sum(changed for _, changed in sent),
            drain_s=drained - began,
            seconds=time.perf_counter() - began,
        )

    @torch.no_grad()
    def differences(self) -> list[str]:
        """Parameters whose replica is not the trainer's weight in bf16, bit for bit, by a whole gather; on rank 0.

        Every rank must call it.
        """
        with self._settled():
            return [part.name for part in self._parts if not self._is_current(part)]

    def _is_current(self, part: _Part) -> bool:
        """Whether the replica's tensor is the trainer's; True but on rank 0."""
        for rank, piece in enumerate(self._gather_whole(part, part.current()) or []):
            mine = part.of(self.replica[part.name], rank)
            if not torch.equal(deltas.bits(mine), deltas.bits(piece[: mine.numel()].cpu())):
                return False
        return True

    def _send(self, index: int, whole: bool) -> tuple[int, int]:
        """One parameter; bytes sent and elements changed, over all ranks."""
        part, current = self._parts[index], self._parts[index].current()
        elements = math.prod(part.shape)
        if not self._sparse:
            self._send_whole(part, current)
            return elements * deltas.WHOLE_BYTES, elements
        last = self._last.chunk(index)[: current.nbytes].view(torch.bfloat16)
        if whole:
            self._send_whole(part, current)
            last.copy_(current)
            return elements * deltas.WHOLE_BYTES, elements
        positions = deltas.changed(current, last.to(current.device))
        counts = self._counts(positions)
        last.copy_(current)
        # All ranks know all counts, so they choose alike.
        nbytes = sum(counts) * deltas.ELEMENT_BYTES
        if nbytes >= elements * deltas.WHOLE_BYTES:
            self._send_whole(part, current)
            return elements * deltas.WHOLE_BYTES, sum(counts)
        if max(counts):
            self._send_delta(part, current, positions, counts)
        return nbytes, sum(counts)

    def _send_whole(self, part: _Part, current: Tensor) -> None:
        pieces = self._gather_whole(part, current)
        for rank, piece in enumerate(pieces or []):
            mine = part.of(self.replica[part.name], rank)
            mine.copy_(piece[: mine.numel()])

    def _send_delta(self, part: _Part, current: Tensor, positions: Tensor, counts: list[int]) -> None:
        payloads = self._gather(deltas.pack(current, positions, max(counts)))
        for rank, payload in enumerate(payloads or []):
            where, values = deltas.unpack(payload.cpu(), counts[rank])
            deltas.apply(part.of(self.replica[part.name], rank), where, values)

    def _gather_whole(self, part: _Part, current: Tensor) -> list[Tensor] | None:
        """Every rank's shard in bf16 [part.room], padded; None but on rank 0."""
        if len(current) < part.room:
            current = torch.cat((current, current.new_zeros(part.room - len(current))))
        gathered = self._gather(current.view(torch.uint8))
        return None if gathered is None else [piece.view(torch.bfloat16) for piece in gathered]

    def _gather(self, payload: Tensor) -> list[Tensor] | None:
        """Every rank's bytes, all as many; None but on rank 0."""
        into = [torch.empty_like(payload) for _ in range(self._world)] if self._rank == 0 else None
        dist.gather(payload, into, dst=self._root, group=self._group)
        return into

    def _counts(self, positions: Tensor) -> list[int]:
        """How many elements changed on each rank."""
        counts = torch.empty(self._world, dtype=torch.int64, device=positions.device)
        dist.all_gather_into_tensor(counts, counts.new_tensor([len(positions)]), group=self._group)
        return [int(n) for n in counts.tolist()]


def _part(name: str, parameter: nn.Parameter, world: int, ep: int) -> _Part:
    shares = ep if ".experts." in name else 1
    ways = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 0
    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),) or ways * shares != world:
        raise OffbenchError(
            f"cannot broadcast {name}: it is not split by rows over {world} ranks, once; shard it with fully_shard "
            "over a mesh of all of them (experts: over those with the same experts)"
        )
    own, *rest = parameter.shape
    per_rank = -(-own // ways)
    held = []
    for rank in range(world):
        at, share = divmod(rank, shares)
        start, stop = (share * own + min(place * per_rank, own) for place in (at, at + 1))
        held.append(range(start, stop))
    return _Part(name, parameter, (own * shares, *rest), tuple(held))
