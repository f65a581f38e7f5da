"""The only file that touches FSDP2's internals: who reads which sharded parameter, and when.

Note [Readers of a sharded parameter]
    FSDP2 gathers a parameter group through `group.unshard()`, called by its own forward and backward hooks, by the
    prefetch lists of other modules, and by users; a hook on the module would come after a prefetch. So both methods
    are wrapped on the group *instance*, through which every caller goes:
    - on a mesh of several ranks the copy into the all-gather buffer reads the parameter, on the stream that
      `comm_ctx.get_all_gather_streams` names first: that stream waits, in `unshard`;
    - on a mesh of one rank nothing is read before `wait_for_unshard`, on the current stream: it waits there.
    `unshard` is also called when nothing is to be gathered; then nobody waits.

Checked on torch 2.11 and 2.15, where `_fsdp_param_group` became the list `_fsdp_param_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from offbench.offload.streams import Event, Stream, Streams, Why

BeforeRead = Callable[[Sequence[int]], list[Event]]
"""Chunks about to be gathered -> what the gather must wait for."""
BeforeBackward = Callable[[Sequence[int]], None]
"""Called before the backward of the modules whose parameters are in these chunks."""

_GUARDS = "_offbench_guards"
_GROUP = (
    "unshard",
    "wait_for_unshard",
    "fsdp_params",
    "mesh_info",
    "is_unsharded",
    "_all_gather_result",
    "_training_state",
)


class UnknownFSDP(Exception):
    """This torch's FSDP2 lacks a private part the overlap needs; the text names it."""


def param_groups(model: nn.Module) -> list[Any]:
    """FSDP2's parameter groups below `model`, the root's included, shared ones once.

    Raises UnknownFSDP when they do not look as they do in the versions this file was checked on.
    """
    groups: dict[Any, None] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            groups |= dict.fromkeys(state._fsdp_param_groups)
        elif hasattr(state, "_fsdp_param_group"):
            groups |= dict.fromkeys([state._fsdp_param_group] if state._fsdp_param_group else [])
        else:
            raise UnknownFSDP(f"torch {torch.__version__}: FSDPState has no parameter groups")
    for group in groups:
        missing = [name for name in _GROUP if not hasattr(group, name)]
        if missing:
            raise UnknownFSDP(f"torch {torch.__version__}: FSDPParamGroup has no {missing[0]}")
    return list(groups)


def managed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that some FSDP2 group gathers. Raises UnknownFSDP."""
    return {p.sharded_param for group in param_groups(model) for p in group.fsdp_params}


def meshes(model: nn.Module) -> list[DeviceMesh]:
    """The meshes its groups are sharded over, each once. Raises UnknownFSDP."""
    return list({id(group.mesh_info.mesh): group.mesh_info.mesh for group in param_groups(model)}.values())


class ReadGuard:
    """Makes every gather of a parameter wait until its chunk is updated, and `state_dict()` and `load_state_dict()`,
    of the model and of every FSDP2 module in it, until all are: a late update must not hit weights that were loaded.

    chunk_of: chunk index by sharded parameter. before_read: queues what is missing and returns the events to wait for.
    Neither may keep the optimizer alive: the model holds on to both until `restore`.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_of: Mapping[nn.Parameter, int],
        before_read: BeforeRead,
        drain: Callable[[], None],
        streams: Streams,
        before_backward: BeforeBackward = lambda chunks: None,
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        for group in param_groups(model):
            chunks = sorted({chunk_of[p.sharded_param] for p in group.fsdp_params if p.sharded_param in chunk_of})
            if chunks:
                self._undo.append(_wrap(group, _Guard(chunks, before_read, before_backward, streams)))
        for module in model.modules():
            if module is model or isinstance(module, FSDPModule):
                saving = module.register_state_dict_pre_hook(lambda *_: drain())  # type: ignore[no-untyped-call]
                loading = module.register_load_state_dict_pre_hook(lambda *_: drain())  # type: ignore[no-untyped-call]
                self._undo += [saving.remove, loading.remove]

    def restore(self) -> None:
        """Leave the model as it was."""
        for undo in self._undo:
            undo()
        self._undo = []


class _Guard(NamedTuple):
    """What one optimizer wants to know of one parameter group."""

    chunks: Sequence[int]
    before_read: BeforeRead
    before_backward: BeforeBackward
    streams: Streams

    def reads(self, stream: Stream) -> None:
        """The stream is about to read the parameters."""
        _wait_all(stream, self.before_read(self.chunks))


def _wrap(group: Any, guard: _Guard) -> Callable[[], None]:
    """Add a guard to the group, whose methods are wrapped once however many optimizers there are."""
    guards: list[_Guard] | None = group.__dict__.get(_GUARDS)
    if guards is None:
        guards = group.__dict__.setdefault(_GUARDS, [])
        _install(group, guards)
    guards.append(guard)

    def undo() -> None:
        guards[:] = [other for other in guards if other is not guard]
        if not guards:
            del group.unshard, group.wait_for_unshard
            del group.__dict__[_GUARDS]

    return undo


def _install(group: Any, guards: list[_Guard]) -> None:
    single = group.mesh_info.shard_mesh_size == 1
    unshard, wait_for_unshard = group.unshard, group.wait_for_unshard

    def unshard_after_update(async_op: bool = False) -> Any:
        if group._training_state.name == "PRE_BACKWARD":  # also when nothing was resharded after the forward
            for guard in guards:
                guard.before_backward(guard.chunks)
        if not single and group._all_gather_result is None and not group.is_unsharded:
            stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]
            for guard in guards:
                guard.reads(guard.streams.foreign(stream))
        return unshard(async_op)

    def wait_after_update() -> Any:
        if single and group._all_gather_result is not None:
            for guard in guards:
                guard.reads(guard.streams.compute())
        return wait_for_unshard()

    group.unshard, group.wait_for_unshard = unshard_after_update, wait_after_update


def _wait_all(stream: Any, events: Iterable[Event]) -> None:
    for event in events:
        stream.wait(event, Why.READ)
