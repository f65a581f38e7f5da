"""OffloadedAdamW: torch's AdamW with its moments in pinned host memory, bitwise equal to the same implementation.

The moments live in `self.state` as views of the host store, so `state_dict`, checkpoints and schedulers see an
ordinary AdamW; the engine stages them on the device chunk by chunk, in the order the Schedule says.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from offbench.errors import OffbenchError
from offbench.offload import fsdp
from offbench.offload.chunks import Chunk, plan_chunks
from offbench.offload.copies import Copier, Ledger
from offbench.offload.engine import Engine, Work
from offbench.offload.hoststore import HostStore
from offbench.offload.schedule import Schedule
from offbench.offload.streams import DeviceStreams, Streams

Implementation = Literal["fused", "foreach"]

_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
_OURS = ("params", "param_names", "fused", "foreach", "capturable")
"""Group keys a checkpoint does not overwrite: they say how this process runs, not what it trains."""


@dataclasses.dataclass(frozen=True)
class _Hyper:
    """A param group's values as step() found them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclasses.dataclass(frozen=True)
class _Member:
    """One parameter: where it is, and where its moments sit in its chunk."""

    parameter: nn.Parameter
    group: int
    step: torch.Tensor
    """0-dim step counter the kernel reads; on the parameter's device for `fused`, else on the CPU."""
    moments: tuple[int, int]
    """Byte offsets of exp_avg and exp_avg_sq in the chunk."""

    @property
    def local(self) -> torch.Tensor:
        """The local shard, updated in place; asked for each time, since FSDP2 may re-lay it at the first forward."""
        return _local(self.parameter)

    def views(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """exp_avg and exp_avg_sq, shaped as the local shard, out of a chunk's bytes."""
        local = self.local
        nbytes = local.numel() * local.element_size()
        first, second = (chunk[start : start + nbytes].view(local.dtype).view(local.shape) for start in self.moments)
        return first, second


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments are in host memory between steps.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW. model: the FSDP2 model whose gathers wait for deferred
    updates; needed by deferred schedules. schedule: what moves when (`offbench.arms`). implementation: torch's `fused`
    or `foreach` kernel; bits are equal only within one of them. streams, copy_repeat: for tests and emulated links.

    Under a deferred schedule step() takes the gradients (`p.grad` is None afterwards), and parameters are up to date
    only for the model's own forward and backward; call `drain()` before reading them anywhere else.
    Raises OffbenchError for options that would not be exact (amsgrad, maximize, capturable, differentiable, closures).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        schedule: Schedule,
        model: nn.Module | None = None,
        implementation: Implementation = "fused",
        streams: Streams | None = None,
        copy_repeat: float = 1.0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, fused=implementation == "fused", foreach=implementation == "foreach"
        )
        for group in self.param_groups:
            _refuse(group)
        everything = [(p, g) for g, group in enumerate(self.param_groups) for p in group["params"] if p.requires_grad]
        if not everything:
            raise OffbenchError("no parameter requires a gradient: there is no optimizer state to keep")
        self.device = _local(everything[0][0]).device
        self.implementation: Implementation = implementation
        self.schedule = schedule
        streams = streams or DeviceStreams(self.device)
        if schedule.deferred:
            self.schedule = _deferrable(schedule, model, [p for p, _ in everything])

        sizes = [_local(p).numel() * _local(p).element_size() for p, _ in everything]
        self.chunks: tuple[Chunk, ...] = plan_chunks(sizes, schedule.chunk_bytes)
        stored = [chunk.nbytes for chunk in self.chunks]
        self.store = HostStore(stored if schedule.offloaded else [], pin_for=self.device)
        self._resident = [] if schedule.offloaded else [self._zeros(nbytes) for nbytes in stored]
        self._members = self._lay_out(everything)
        self._engine: Engine | None = None
        self._undo: Callable[[], None] | None = None
        if schedule.offloaded:
            self._engine = Engine(self.chunks, self.store, self.schedule, streams, Copier(copy_repeat))
        if self.schedule.deferred:
            assert model is not None
            assert self._engine is not None
            chunk_of = {m.parameter: chunk.index for chunk in self.chunks for m in self._members[chunk.index]}
            self._undo = fsdp.wait_before_reads(model, chunk_of, self._engine.before_read, streams)
            model.register_state_dict_pre_hook(lambda *_: self.drain())  # type: ignore[no-untyped-call]

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def _lay_out(self, everything: list[tuple[nn.Parameter, int]]) -> list[list[_Member]]:
        """Members of each chunk; their moments are entered into `self.state`."""
        counters = torch.zeros(len(everything), device=self.device if self.implementation == "fused" else "cpu")
        self._counters = counters
        by_chunk = []
        for chunk in self.chunks:
            home = self.store.chunk(chunk.index) if self.schedule.offloaded else self._resident[chunk.index]
            members = []
            for position, moments in zip(chunk.members, chunk.offsets, strict=True):
                parameter, group = everything[position]
                member = _Member(parameter, group, counters[position], moments)
                first, second = member.views(home)
                self.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": _like(parameter, first),
                    "exp_avg_sq": _like(parameter, second),
                }
                members.append(member)
            by_chunk.append(members)
        return by_chunk

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One AdamW step with the gradients and hyperparameters as they are now.

        Raises OffbenchError for a closure: it would have to run while state is in flight.
        """
        if closure is not None:
            raise OffbenchError("OffloadedAdamW takes no closure; run forward and backward before step()")
        hypers = [_capture(group) for group in self.param_groups]
        works = []
        counters = []
        for chunk in self.chunks:
            members = [m for m in self._members[chunk.index] if m.parameter.grad is not None]
            if not members:
                continue
            gradients = [_local(m.parameter.grad) for m in members]
            counters += [self.state[m.parameter]["step"] for m in members]
            works.append(self._work(chunk, members, gradients, hypers))
            if self.schedule.deferred:
                for member in members:
                    member.parameter.grad = None
        if counters:
            torch._foreach_add_(counters, 1)
        if self._engine is not None:
            self._engine.step(works)
        else:
            for work in works:
                work.update(self._resident[work.chunk.index])

    def _work(self, chunk: Chunk, members: list[_Member], gradients: list[torch.Tensor], hypers: list[_Hyper]) -> Work:
        def update(state: torch.Tensor) -> None:
            for group in sorted({member.group for member in members}):
                chosen = [(m, g) for m, g in zip(members, gradients, strict=True) if m.group == group]
                self._adamw([m for m, _ in chosen], [g for _, g in chosen], state, hypers[group])

        return Work(chunk, update, gradients, [member.local for member in members])

    @torch.no_grad()
    def _adamw(
        self, members: list[_Member], gradients: list[torch.Tensor], state: torch.Tensor, hyper: _Hyper
    ) -> None:
        moments = [member.views(state) for member in members]
        adamw(
            [member.local for member in members],
            gradients,
            [first for first, _ in moments],
            [second for _, second in moments],
            [],
            [member.step for member in members],
            foreach=self.implementation == "foreach",
            fused=self.implementation == "fused",
            amsgrad=False,
            maximize=False,
            **dataclasses.asdict(hyper),
        )

    def drain(self) -> None:
        """Return when no update is queued or in flight: parameters and `state` are those of the last step."""
        if self._engine is not None:
            self._engine.drain()

    def detach(self) -> None:
        """Drain, and stop making the model's gathers wait."""
        self.drain()
        if self._undo is not None:
            self._undo()
            self._undo = None

    @property
    def ledger(self) -> Ledger | None:
        """Books of what moved; None when nothing is offloaded."""
        return None if self._engine is None else self._engine.ledger

    @property
    def bytes_per_step(self) -> int:
        """Payload one step moves in each direction when every parameter has a gradient."""
        return 0 if self._engine is None else sum(chunk.nbytes for chunk in self.chunks)

    @property
    def staging_peak(self) -> int:
        """Largest staging memory held on the device so far, bytes."""
        return 0 if self._engine is None else self._engine.staging_peak

    def where(self) -> dict[str, int]:
        """Bytes of the moments by the type of device that holds them between steps."""
        places: dict[str, int] = {}
        for state in self.state.values():
            for moment in (_local(state["exp_avg"]), _local(state["exp_avg_sq"])):
                place = "device" if moment.device.type != "cpu" else "host"
                places[place] = places.get(place, 0) + moment.numel() * moment.element_size()
        return places

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, while the optimizer is being constructed; later the state is already laid out."""
        if hasattr(self, "_members"):
            raise OffbenchError(
                "OffloadedAdamW lays out its state at construction; pass every group to the constructor"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, drained first; the moments are the host tensors themselves, not copies."""
        self.drain()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state_dict of this class or of torch.optim.AdamW into the host store, in place.

        Raises OffbenchError when the groups or shapes do not fit this optimizer's.
        """
        self.drain()
        saved_groups = state_dict["param_groups"]
        if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in self.param_groups]:
            raise OffbenchError("the saved param groups have other numbers of parameters than this optimizer's")
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in _OURS})
            _refuse(group)
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if parameter in self.state:
                    self._load(self.state[parameter], state_dict["state"].get(key), key)
        for members in self._members:
            for member in members:
                member.step.copy_(self.state[member.parameter]["step"])

    @staticmethod
    def _load(mine: dict[str, torch.Tensor], saved: dict[str, Any] | None, key: object) -> None:
        if saved is None:  # a parameter that had no step yet
            for tensor in mine.values():
                _local(tensor).zero_()
            return
        for name in ("exp_avg", "exp_avg_sq"):
            source, target = _local(saved[name]), _local(mine[name])
            if source.shape != target.shape:
                raise OffbenchError(
                    f"saved {name} of parameter {key} is {tuple(source.shape)}, this rank's is {tuple(target.shape)}"
                )
            target.copy_(source)
        mine["step"].fill_(float(saved["step"]))


def _local(tensor: Any) -> torch.Tensor:
    """The local shard of a DTensor, sharing its memory; a plain tensor itself."""
    found = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    assert isinstance(found, torch.Tensor)
    return found


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """`local` as a DTensor placed as the parameter is; it stays where it is, which `from_local` would not grant.

    Without this a checkpoint would take each rank's shard for the whole tensor.
    """
    if isinstance(parameter, DTensor):
        return DTensor(local, parameter._spec, requires_grad=False)
    return local


def _capture(group: dict[str, Any]) -> _Hyper:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        raise OffbenchError("lr is a tensor on the device: reading it would stop the host every step; pass a float")
    beta1, beta2 = group["betas"]
    return _Hyper(float(lr), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))


def _refuse(group: dict[str, Any]) -> None:
    for option in _REFUSED:
        if group.get(option):
            raise OffbenchError(f"OffloadedAdamW does not support {option}=True")


def _deferrable(schedule: Schedule, model: nn.Module | None, parameters: list[nn.Parameter]) -> Schedule:
    """The schedule itself, or, when a reader of some parameter could not be made to wait, its synchronous form."""
    try:
        managed = fsdp.managed_parameters(model) if model is not None else set()
        unmanaged = [p for p in parameters if p not in managed]
        if not unmanaged:
            return schedule
        names = {p: name for name, p in model.named_parameters()} if model is not None else {}
        found = names.get(unmanaged[0], f"of shape {tuple(unmanaged[0].shape)}")
        why = f"no FSDP2 group manages parameter {found}" + (
            f" and {len(unmanaged) - 1} more" if len(unmanaged) > 1 else ""
        )
    except fsdp.UnknownFSDP as unknown:
        why = str(unknown)
    warnings.warn(f"{schedule.name}: {why}; updates run synchronously inside step()", UserWarning, stacklevel=3)
    return dataclasses.replace(schedule, deferred=False)
