"""One training run of a case, under an arm or under torch's own AdamW, and the first place where two runs differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.gradient_pool import GradientPool
from offbench.offload.schedule import Schedule
from offbench.offload.streams import DeviceStreams, Streams, Why
from offbench.verify.cases import BROADCAST_EVERY, RESUME_AT, STEPS, Case, Pace, Variant
from offbench.verify.trainees import Trainee, build, forget
from offbench.workload.broadcast import Broadcaster

LR = 1e-2
OPTIONS: Mapping[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OTHERS: Mapping[str, Any] = {"lr": 7.0, "betas": (0.5, 0.5), "eps": 1e-2, "weight_decay": 0.9}
"""What a resumed optimizer is constructed with: all of it must come from the checkpoint."""
TOO_LATE = 1e3
"""Learning rate set right after each step(): an update that still reads it is far off."""

Snapshot = dict[str, dict[str, torch.Tensor]]
"""Local `parameter`, `exp_avg`, `exp_avg_sq` and `step` by parameter name, on the CPU, in the model's order; where a
replica is kept, on rank 0 also `replica`, whole."""


@dataclass(frozen=True)
class Difference:
    """The first bits that are not those of torch.optim.AdamW."""

    parameter: str
    """Its fully qualified name."""
    what: str
    """parameter, exp_avg, exp_avg_sq, step, replica, or `order`: values agree, but no wait orders two accesses."""
    index: tuple[int, ...] = ()
    """In the rank's local shard; of a replica in the whole tensor."""
    expected: float | None = None
    found: float | None = None
    rank: int = 0
    pace: str = ""
    note: str = ""

    def describe(self) -> str:
        """One line, without the case."""
        where = f"rank {self.rank}, {self.pace}"
        if self.what == "order":
            return f"nothing orders two accesses: {self.note} ({where})"
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.parameter}: {self.what}{at} is {self.found!r}, not {self.expected!r} ({where})"


class Trial:
    """Runs one case on this rank, as often as it is asked to."""

    def __init__(self, case: Case, rank: int, device: torch.device, drop: Why | None = None) -> None:
        self.case = case
        self.rank = rank
        self.device = device
        self.drop = drop
        """A wait the adversary leaves out: a planted fault."""

    def reference(self, resume: bool = False) -> Snapshot:
        """torch.optim.AdamW, uninterrupted unless asked otherwise; its replica gets all weights each time."""

        def make(model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
            fused = self.case.implementation == "fused"
            return torch.optim.AdamW(model.parameters(), **options, fused=fused, foreach=not fused)

        return self._run(make, resume, sparse=False)

    def differs(self, expected: Snapshot, variant: Variant, pace: Pace) -> Difference | None:
        """Run the variant; the first difference to the reference, None when every bit agrees."""
        used: list[Streams] = []

        def make(model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
            used.append(self._streams(pace))
            if self.case.pool:
                GradientPool(model)
            return OffloadedAdamW(
                model.parameters(),
                **options,
                model=model,
                schedule=self._schedule(variant),
                implementation=self.case.implementation,
                streams=used[-1],
                copy_repeat=pace.copy_repeat,
            )

        found = first_difference(expected, self._run(make, self.case.resume, sparse=True))
        if found is None:
            orders = (s.order.violations for s in used if isinstance(s, AdversarialStreams))
            found = next((Difference("", "order", note=lines[0]) for lines in orders if lines), None)
        return found and dataclasses.replace(found, rank=self.rank, pace=pace.name)

    def _schedule(self, variant: Variant) -> Schedule:
        schedule = variant.schedule(self.case.chunk_bytes)
        kept = self.case.kept * self.case.chunk_bytes if schedule.offloaded else 0
        return dataclasses.replace(schedule, resident_bytes=kept) if kept else schedule

    def _streams(self, pace: Pace) -> Streams:
        if pace.streams is None:
            return DeviceStreams(self.device)
        return AdversarialStreams(dict(pace.streams), pace.seed, self.drop)  # type: ignore[arg-type]

    def _run(self, make: Any, resume: bool, sparse: bool) -> Snapshot:
        trainee = build(self.case, self.rank, self.device)
        optimizer = make(trainee.model, OPTIONS)
        broadcaster = self._broadcaster(trainee, optimizer, sparse)
        train(trainee, optimizer, range(RESUME_AT), broadcaster)
        if resume:
            trainee, optimizer = self._rebuilt(trainee, optimizer, make)
            broadcaster = self._broadcaster(trainee, optimizer, sparse)
        train(trainee, optimizer, range(RESUME_AT, STEPS), broadcaster)
        replica = broadcaster.replica if broadcaster is not None else {}
        found = snapshot(trainee.model, optimizer)
        for name, weights in replica.items():
            found[name]["replica"] = weights.float()
        _end(optimizer)
        return found

    def _broadcaster(self, trainee: Trainee, optimizer: torch.optim.Optimizer, sparse: bool) -> Broadcaster | None:
        if not self.case.broadcast:
            return None
        group = dist.group.WORLD
        assert group is not None
        settled = optimizer.settled if isinstance(optimizer, OffloadedAdamW) else nullcontext
        return Broadcaster(trainee.model, group, settled, self.case.ep, sparse)

    def _rebuilt(self, trainee: Trainee, optimizer: torch.optim.Optimizer, make: Any) -> tuple[Trainee, Any]:
        """A new model and optimizer that know of the old ones only what a checkpoint holds."""
        weights, state = _copied(trainee.model.state_dict()), _copied(optimizer.state_dict())
        _end(optimizer)
        again = build(self.case, self.rank, self.device)
        forget(again.model.parameters())
        successor = make(again.model, OTHERS)
        again.model.load_state_dict(weights)
        successor.load_state_dict(state)
        return again, successor


def train(
    trainee: Trainee, optimizer: torch.optim.Optimizer, steps: range, broadcaster: Broadcaster | None = None
) -> None:
    """Those steps, as trainers write them; the learning rate is another one than in the step before."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = LR * (step % STEPS + 1)
        trainee.backward(step)
        trainee.clip()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = TOO_LATE
        if broadcaster is not None and (step + 1) % BROADCAST_EVERY == 0:
            broadcaster.broadcast()


def _end(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.detach()


def _copied(tree: Any) -> Any:
    """A state_dict with tensors of its own, as one that went through a file."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """What a run ended with."""
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.drain()
    found: Snapshot = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        values = {"parameter": parameter, **{key: state[key] for key in ("exp_avg", "exp_avg_sq", "step")}}
        found[name] = {key: _local(value).detach().cpu().clone() for key, value in values.items()}
    return found


def first_not_finite(found: Snapshot) -> str | None:
    """The first value that is infinite or no number, as in `parameter of head.weight`; None when there is none."""
    for name, values in found.items():
        for what, tensor in values.items():
            if not bool(tensor.isfinite().all()):
                return f"{what} of {name}"
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_difference(expected: Snapshot, found: Snapshot) -> Difference | None:
    """The first value whose bits differ, in the model's order; None when there is none."""
    for name, values in expected.items():
        for what, mine in values.items():
            theirs = found[name][what]
            # As integers: NaN then equals itself, and 0.0 is not -0.0.
            unequal = (mine.view(torch.int32) != theirs.view(torch.int32)).nonzero()
            if len(unequal):
                index = tuple(unequal[0].tolist())
                return Difference(name, what, index, float(mine[index]), float(theirs[index]))
    return None
