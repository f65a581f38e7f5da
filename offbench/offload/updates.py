"""A step's gradients become works: one update a chunk, bound to what the optimizer is at that step.

A deferred update is queued while the trainer's own kernels wait to be launched, so what stays the same from step to
step is made once: every tensor made anew costs the host a microsecond or more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from offbench.errors import OffbenchError
from offbench.offload.chunks import Chunk
from offbench.offload.cuts import Cuts
from offbench.offload.engine import Work
from offbench.offload.gradients import own
from offbench.offload.hyper import Hyper
from offbench.offload.kernels import Call, Implementation, run_calls
from offbench.offload.layout import Member, gradient_of, laid_out
from offbench.offload.staged import Staged

Shard = tuple[torch.Tensor, torch.Tensor]
"""A local shard, and the same memory flat."""


class ChunkUpdates:
    """The updates of one chunk's parameters, or of a piece of one.

    AdamW is elementwise, so contiguous tensors are handed over flat. Those of a parameter in pieces are contiguous.
    """

    def __init__(self, chunk: Chunk, members: Sequence[Member], implementation: Implementation) -> None:
        self.members = tuple(members)
        self.parameters = tuple(member.parameter for member in members)
        self.chunk = chunk
        self._implementation = implementation
        self._groups = _by_group(self.members)
        self._laid_out = [laid_out(member.local) for member in self.members]
        self._flat: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        """By position: a member's local shard, its address, and its flat view, which goes when the shard does: where a
        trainer moves the model off the device, nothing here may hold on to its memory."""
        self._cuts: Cuts | None = None
        self.is_first = chunk.home == chunk.index
        """False: a later piece of a parameter."""
        self._slice: slice | None = None
        """A piece's elements of its parameter."""
        if chunk.piece is not None:
            dtype = self.members[0].local.dtype
            self._slice = slice(chunk.piece.start // dtype.itemsize, chunk.so_far // 2 // dtype.itemsize)

    @property
    def at_home(self) -> Sequence[Member]:
        """Members whose moments are in the memory that is kept with this chunk, as they lie there."""
        if (piece := self.chunk.piece) is None:
            return self.members
        return () if piece.start else [replace(self.members[0], moments=(0, piece.whole))]

    def piece_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Of its parameter's gradient, contiguous, what belongs to this piece."""
        return gradient.view(-1)[self._slice]

    def work(
        self, present: Mapping[int, Shard], gradients: list[torch.Tensor], hypers: Sequence[Hyper], in_place: bool
    ) -> Work:
        """The update with the gradients and hyperparameters (by param group) as they are now.

        present: `shard` of the members that have gradients, by position. gradients: theirs, flat, or shaped as the
        local shards. in_place: the state will be in host memory. Nothing in the work refers to the optimizer: dropping
        that must drain what is pending.
        """
        locals_ = [local for local, _ in present.values()]
        is_flat = all([tensor.is_contiguous() for tensor in (*locals_, *gradients)])  # noqa: C419 - a list is faster
        is_whole = len(present) == len(self.members)
        parameters = [flat for _, flat in present.values()] if is_flat else locals_
        members = self.members if is_whole else [self.members[position] for position in present]
        groups = self._groups if is_whole else _by_group(members)
        cuts = self._find_cuts(locals_) if is_flat and is_whole else None

        def calls(state: Staged) -> list[Call]:
            if cuts is not None and (cut := cuts.cut(state)) is not None:
                moments = cut
            elif is_flat:
                moments = [member.flat(state, flat) for member, flat in zip(members, parameters, strict=True)]
            else:
                moments = [member.views(state) for member in members]
            return [
                Call(
                    [parameters[i] for i in chosen],
                    [_shaped(gradients[i], parameters[i]) for i in chosen],
                    [moments[i][0] for i in chosen],
                    [moments[i][1] for i in chosen],
                    [members[i].step for i in chosen],
                    hypers[group],
                )
                for group, chosen in groups
            ]

        run_all = partial(run_calls, implementation=self._implementation, in_place=in_place)

        def update(state: Staged) -> None:
            run_all(calls(state))

        return Work(self.chunk, update, gradients, locals_, calls, run_all)

    def shard(self, position: int) -> Shard:
        """A member's local shard, and the same flat if it is contiguous; of a parameter in pieces, both are the piece.
        FSDP2 may re-lay the shard at the first forward, and users may swap its memory. Raises OffbenchError where its
        moments would no longer fit it."""
        local = self.members[position].local
        known = self._flat.get(position)
        if known is None or known[0]() is not local or known[1] != local.data_ptr():
            if (found := laid_out(local)) != (wanted := self._laid_out[position]):
                raise OffbenchError(
                    f"a parameter is {_described(found)} now and was {_described(wanted)} when its moments were laid "
                    "out; change it back before step(), or make a new optimizer"
                )
            flat = local.detach()  # a view of `local` itself would keep it
            if flat.dim() != 1 and flat.is_contiguous():
                flat = flat.view(-1)
            if self._slice is not None:
                flat = flat[self._slice]
            known = self._flat[position] = (self._ref(position, local), local.data_ptr(), flat)
        return (local if self._slice is None else known[2]), known[2]

    def _ref(self, position: int, local: torch.Tensor) -> weakref.ref[torch.Tensor]:
        """To the shard; the flat view goes with it."""
        this = weakref.ref(self)  # no cycle: parameters would wait for the garbage collector

        def gone(ref: weakref.ref[torch.Tensor]) -> None:
            if (me := this()) is not None and position in me._flat and me._flat[position][0] is ref:
                del me._flat[position]

        return weakref.ref(local, gone)

    def _find_cuts(self, locals_: Sequence[torch.Tensor]) -> Cuts | None:
        """How staged bytes are cut into all members' moments; None when these are of several dtypes."""
        if self._cuts is None:
            dtypes = {local.dtype for local in locals_}
            if len(dtypes) > 1:
                return None
            counts = [local.numel() for local in locals_]
            self._cuts = Cuts([member.moments for member in self.members], counts, dtypes.pop())
        return self._cuts


def updates_of(
    chunks: Sequence[Chunk],
    parameters: Sequence[tuple[nn.Parameter, int]],
    implementation: Implementation,
    device: torch.device,
) -> list[ChunkUpdates]:
    """By chunk, its updates. parameters: theirs, with their param group's index, in the order of their positions.
    device: where the counters are that the kernels read and count up; each piece has its own."""
    many = sum(len(chunk.members) for chunk in chunks)
    counters = iter(torch.zeros(many, dtype=torch.float32, device=device).unbind())
    first = min((chunk.members[0] for chunk in chunks), default=0)
    return [
        ChunkUpdates(
            chunk,
            [
                Member(*parameters[position - first], next(counters), offsets)
                for position, offsets in zip(chunk.members, chunk.offsets, strict=True)
            ],
            implementation,
        )
        for chunk in chunks
    ]


def have_gradients(updates: Sequence[ChunkUpdates], chunk: int) -> bool:
    """Whether each parameter of that chunk has a gradient by now."""
    for parameter in updates[chunk].parameters:  # noqa: SIM110 - a generator would take three times as long
        if parameter.grad is None:
            return False
    return True


def take_gradients(
    updates: Sequence[ChunkUpdates],
    state: Mapping[torch.Tensor, Any],
    hypers: Sequence[Hyper],
    deferred: bool,
    in_place: Callable[[Chunk], bool],
) -> tuple[list[Work], list[torch.Tensor], list[nn.Parameter]]:
    """A step's works, the counters (from `state`) of the parameters in them, those that have a gradient, and these.

    deferred: gradients become ours, and `p.grad` is None afterwards. in_place: whether a chunk's state will be in host
    memory. Raises OffbenchError for a sparse gradient, and for a parameter that its moments do not fit; no gradient is
    taken then.
    """
    found: list[tuple[ChunkUpdates, dict[int, Shard]]] = []
    parameters: list[nn.Parameter] = []
    gradients: list[torch.Tensor] = []
    for update in updates:
        present = {}
        is_first = update.is_first
        for position, parameter in enumerate(update.parameters):
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise OffbenchError(
                        f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, which AdamW does not "
                        "support; make it with sparse=False"
                    )
                present[position] = update.shard(position)
                if is_first:
                    parameters.append(parameter)
                    gradients.append(gradient_of(parameter, gradient))
        if present:
            if is_first and update.chunk.piece is not None:
                gradients[-1] = gradients[-1].contiguous()
            found.append((update, present))
    counters = [state[parameter]["step"] for parameter in parameters]
    if deferred:
        for parameter in parameters:
            parameter.grad = None
        gradients = own(gradients)
    works, taken = [], 0
    for update, present in found:
        if update.is_first:
            taken += len(present)
        mine = gradients[taken - len(present) : taken]
        if update.chunk.piece is not None:  # all pieces of a parameter have their part of one gradient
            mine = [update.piece_of(mine[0])]
        works.append(update.work(present, mine, hypers, in_place(update.chunk)))
    return works, counters, parameters


def _described(found: tuple[Any, ...]) -> str:
    shape, dtype, device, strides = found
    where = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
    return f"{where} with strides {strides}" if strides else where


def _by_group(members: Sequence[Member]) -> list[tuple[int, list[int]]]:
    """Param groups in order, and which of the members are in them."""
    return [
        (group, [i for i, member in enumerate(members) if member.group == group])
        for group in sorted({member.group for member in members})
    ]


def _shaped(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.shape == parameter.shape else gradient.view(parameter.shape)
