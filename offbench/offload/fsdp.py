"""The only file that touches FSDP2's internals: who reads which sharded parameter, and when.

Note [Readers of a sharded parameter]
    FSDP2 gathers a parameter group through `group.unshard()`, called by its own forward and backward hooks, by the
    prefetch lists of other modules, and by users; a hook on the module would come after a prefetch. So both methods
    are wrapped on the group *instance*, through which every caller goes:
    - on a mesh of several ranks the copy into the all-gather buffer reads the parameter, on the stream that
      `comm_ctx.get_all_gather_streams` names first: that stream waits, in `unshard`;
    - on a mesh of one rank nothing is read before `wait_for_unshard`, on the current stream: it waits there.
    `unshard` is also called when nothing is to be gathered; then nobody waits.

Note [When the host has time]
    What a gather needs is queued at the gather. What comes after it can be queued later, and the moment matters where
    the host cannot run far ahead of the device: a trainer with expert parallelism reads the experts' counts back once
    a layer, and between that and the next layer's first kernel the device idles for as long as the host takes. The
    first group nested in a block (a router, the experts) starts its forward while the device still computes the
    attention, and before the host waits for the counts: its `wait_for_unshard` looks ahead at leisure; at a second one
    the device may have caught up. In a model without nested groups every gather looks ahead.

Checked on torch 2.11 and 2.15, where `_fsdp_param_group` became the list `_fsdp_param_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from offbench.offload.streams import Event, Stream, Streams, Why


class BeforeRead(Protocol):
    """Chunks about to be gathered -> what the gather must wait for; look_ahead: it may queue more than they need."""

    def __call__(self, chunks: Sequence[int], look_ahead: bool) -> list[Event]: ...


BeforeBackward = Callable[[Sequence[int]], None]
"""Called before the backward of the modules whose parameters are in these chunks."""

LookAhead = Callable[[bool], None]
"""Queue what comes next; True: the host has time."""

_GUARDS = "_offbench_guards"
_DRAINS = "_offbench_drains"
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
    groups = {
        group: None for module in model.modules() if isinstance(module, FSDPModule) for group in _groups_of(module)
    }
    for group in groups:
        missing = [name for name in _GROUP if not hasattr(group, name)]
        if missing:
            raise UnknownFSDP(f"torch {torch.__version__}: FSDPParamGroup has no {missing[0]}")
    return list(groups)


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    raise UnknownFSDP(f"torch {torch.__version__}: FSDPState has no parameter groups")


def gather_order(model: nn.Module) -> dict[nn.Parameter, int]:
    """By sharded parameter, which of the forward's gathers it belongs to, from 0: a module's group is gathered before
    those inside it, so the root's comes first. Raises UnknownFSDP."""
    return {p.sharded_param: at for at, group in enumerate(param_groups(model)) for p in group.fsdp_params}


def nested_groups(model: nn.Module) -> set[Any]:
    """Of each block, the parameter groups of the first FSDP2 module inside it. A block is the outermost FSDP2 module
    below the root of all, if there is one. Raises UnknownFSDP.
    """
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    outside = {name: [other for other in wrapped if other != name and _lies_in(name, other)] for name in wrapped}
    tops = [name for name in wrapped if not outside[name]]
    root = tops[0] if len(tops) == 1 else None
    first: dict[str, set[Any]] = {}
    for name, module in wrapped.items():
        block = next((other for other in outside[name] if other != root), None)
        groups = set(_groups_of(module))
        if block is not None and groups:
            first.setdefault(block, groups)
    return set().union(*first.values())


def _lies_in(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


def managed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that some FSDP2 group gathers. Raises UnknownFSDP."""
    return {p.sharded_param for group in param_groups(model) for p in group.fsdp_params}


def meshes(model: nn.Module) -> list[DeviceMesh]:
    """The meshes its groups are sharded over, each once. Raises UnknownFSDP."""
    return list({id(group.mesh_info.mesh): group.mesh_info.mesh for group in param_groups(model)}.values())


class ReadGuard:
    """Makes every gather of a parameter wait until its chunk is updated, and `state_dict()`, `load_state_dict()` and
    what moves or converts parameters (`to()`, `cpu()`, `to_empty()`), of the model and of every FSDP2 module in it,
    until all are: a late update must not hit weights that were loaded, nor memory that parameters have left.

    chunk_of: by sharded parameter, index of the chunk that updates the last of it. before_read: queues what is missing
    and returns the events to wait for. before_backward, after_backward: a module's backward is about to begin; all of
    the model's is over. look_ahead: the host may queue more. None of them may keep the optimizer alive: the model
    holds on to them until `restore`.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_of: Mapping[nn.Parameter, int],
        before_read: BeforeRead,
        drain: Callable[[], None],
        streams: Streams,
        before_backward: BeforeBackward = lambda chunks: None,
        look_ahead: LookAhead = lambda at_leisure: None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        nested = nested_groups(model)
        backward = _Backward(before_backward, after_backward)
        for group in param_groups(model):
            chunks = sorted({chunk_of[p.sharded_param] for p in group.fsdp_params if p.sharded_param in chunk_of})
            if chunks:
                inner = look_ahead if group in nested else None
                guard = _Guard(chunks, before_read, backward, streams, inner, not nested)
                self._undo.append(_wrap(group, guard))
        for module in model.modules():
            if module is model or isinstance(module, FSDPModule):
                saving = module.register_state_dict_pre_hook(lambda *_: drain())  # type: ignore[no-untyped-call]
                loading = module.register_load_state_dict_pre_hook(lambda *_: drain())  # type: ignore[no-untyped-call]
                self._undo += [saving.remove, loading.remove, _before_apply(module, drain)]

    def restore(self) -> None:
        """Leave the model as it was."""
        for undo in self._undo:
            undo()
        self._undo = []


class _Backward:
    """What one optimizer wants to know of a backward."""

    def __init__(self, before: BeforeBackward, after: Callable[[], None]) -> None:
        self._before = before
        self._after = after
        self._known: int | None = None
        """The run of autograd's engine whose end will be told."""

    def begins(self, chunks: Sequence[int]) -> None:
        """The backward of the modules whose parameters are in these chunks."""
        current = getattr(torch._C, "_current_graph_task_id", None)  # private: without it no end is told
        run = current() if current is not None else -1  # -1: autograd does not run
        if run not in (-1, self._known):
            self._known = run
            # As FSDP2 does for its own last reduction, whose callback comes before this one.
            torch.autograd.Variable._execution_engine.queue_callback(self._after)
        self._before(chunks)


class _Guard(NamedTuple):
    """What one optimizer wants to know of one parameter group."""

    chunks: Sequence[int]
    before_read: BeforeRead
    backward: _Backward
    streams: Streams
    inner: LookAhead | None
    """Of a nested group: called when its forward begins."""
    looks_ahead: bool
    """No group is nested: each gather looks ahead."""

    def reads(self, stream: Stream) -> None:
        """The stream is about to read the parameters."""
        _wait_all(stream, self.before_read(self.chunks, self.looks_ahead))


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
    single = getattr(group.mesh_info, "shard_mesh_size", 1) == 1  # `replicate` shards nothing
    unshard, wait_for_unshard = group.unshard, group.wait_for_unshard

    def unshard_after_update(async_op: bool = False) -> Any:
        if group._training_state.name == "PRE_BACKWARD":  # also when nothing was resharded after the forward
            for guard in guards:
                guard.backward.begins(guard.chunks)
        if not single and group._all_gather_result is None and not group.is_unsharded:
            stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]
            for guard in guards:
                guard.reads(guard.streams.foreign(stream))
        return unshard(async_op)

    def wait_after_update() -> Any:
        if single and group._all_gather_result is not None:
            for guard in guards:
                guard.reads(guard.streams.compute())
        for guard in guards:
            if guard.inner is not None:
                guard.inner(True)
        return wait_for_unshard()

    group.unshard, group.wait_for_unshard = unshard_after_update, wait_after_update


def _before_apply(module: nn.Module, drain: Callable[[], None]) -> Callable[[], None]:
    """Drain before `module._apply`, which has no hooks and through which all conversions go. It is wrapped once,
    however many optimizers there are."""
    drains: list[Callable[[], None]] | None = module.__dict__.get(_DRAINS)
    if drains is None:
        drains = module.__dict__.setdefault(_DRAINS, [])
        apply: Callable[..., Any] = module._apply
        before = drains

        def apply_drained(*args: Any, **kwargs: Any) -> Any:
            for each in before:
                each()
            return apply(*args, **kwargs)

        module.__dict__["_apply"] = apply_drained
    drains.append(drain)

    def undo() -> None:
        drains.remove(drain)
        if not drains:
            del module.__dict__["_apply"], module.__dict__[_DRAINS]

    return undo


def _wait_all(stream: Any, events: Iterable[Event]) -> None:
    for event in events:
        stream.wait(event, Why.READ)
