"""The two models a case trains: dense blocks wrapped the plain way, and the `tiny` mixture of experts as `run` builds
it. Small, but with what makes FSDP2 jobs differ: prefetch lists, a root that owns parameters, two meshes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from offbench.config import Mode, RunSpec, Workload
from offbench.offload import meanwhile
from offbench.verify.cases import STEPS, Case
from offbench.workload.parallel import Job, Meshes, as_fsdp
from offbench.workload.parallel import build as build_job

SAMPLES = 4
"""Inputs of the dense model in each backward pass."""
MAX_NORM = 0.05
"""Far below the norms of both models, so that clipping always scales."""
LOOKS = 4
"""How often the CPU's host finds, in one wait, that it must wait on: one look may be spent on making room."""
SLEEP_CYCLES = 2_000_000
"""How long it waits for another device: a millisecond of an H200, enough to queue a few updates and for a chunk to be
copied, and below a tenth of a second a run."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Trainee:
    """A model on its mesh and the two things a step does to it before the optimizer's turn."""

    model: nn.Module
    backward: Callable[[int], None]
    """All forward and backward passes of the step of that number."""
    clip: Callable[[], object]
    """Clip by the global norm, if the case clips."""


def build(case: Case, rank: int, device: torch.device) -> Trainee:
    """The case's model, freshly initialised, the same at every call. The default process group must exist."""
    return _mlp(case, rank, device) if case.model == "mlp" else _moe(case, rank, device)


@functools.cache
def _meshes(device_type: str, world: int, ep: int) -> Meshes:
    """One set for all cases of a process: each set has process groups of its own, and torch keeps them."""
    return Meshes.of(device_type, world, ep)


class Block(nn.Module):
    """Residual MLP [..., width] -> [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x plus what the block makes of it."""
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Blocks, then a norm and a head that the root itself owns; [samples, width] -> a loss."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the head's output."""
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().mean()  # type: ignore[no-any-return]


def wrapped_mlp(
    mesh: DeviceMesh, device: torch.device, dtype: torch.dtype, blocks: int, width: int, prefetch: bool = True
) -> Mlp:
    """The dense model under FSDP2: a group a block, one for the rest. prefetch: each block is gathered ahead of its
    turn, in forward and backward."""
    torch.manual_seed(7)
    model = Mlp(blocks, width).to(device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    units = [as_fsdp(block) for block in model.blocks] if prefetch else []
    for this, following in itertools.pairwise(units):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    return model


class _NotYet:
    """An event that has passed when it is asked once more than LOOKS times. A real one of the CPU is never late, so a
    host that waited for it would ask nobody for updates; and as many looks as these are the same in every run."""

    def __init__(self) -> None:
        self._left = LOOKS

    def query(self) -> bool:
        """Whether it has been asked that often."""
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        """What it stands for is done already."""


def hold_host(device: torch.device) -> None:
    """Hold the host in the middle of a forward, as a model does that reads something back."""
    if device.type == "cpu":
        meanwhile.wait(_NotYet())
        return
    module = torch.get_device_module(device)
    # Products as small as these are over before the host asks, and a wait that is none queues nothing. Enough of them
    # would take the host as long as the device; this takes it one launch. Of torch's devices CUDA's alone can sleep.
    module._sleep(SLEEP_CYCLES)
    event = module.Event()
    event.record()
    meanwhile.wait(event)


def _mlp(case: Case, rank: int, device: torch.device) -> Trainee:
    width = case.size.width
    model = wrapped_mlp(_meshes(device.type, case.world, 1).dp, device, DTYPES[case.dtype], case.blocks, width)
    if case.waits:
        for block in model.blocks:
            assert isinstance(block, Block)
            # Behind its first product, on the thread that runs the forward; a backward runs no such hook.
            block.up.register_forward_hook(lambda *_: hold_host(device))

    def backward(step: int) -> None:
        for micro in range(case.accumulation):  # reduced each time: sharded gradients add up in p.grad
            x = _input(width, 1000 * step + 100 * micro + rank, device)
            (model(x) / case.accumulation).backward()

    def clip() -> None:
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    return Trainee(model, backward, clip)


@functools.lru_cache(maxsize=4 * STEPS)
def _input(width: int, seed: int, device: torch.device) -> Tensor:
    """[SAMPLES, width] on the device. One run makes them, the others find them there: the host waits for a copy of
    pageable memory, and with it for whatever a step has left to do."""
    return torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(seed)).to(device)


def _moe(case: Case, rank: int, device: torch.device) -> Trainee:
    job: Job = build_job(
        _spec(case, device),
        rank,
        device,
        param_dtype=DTYPES[case.dtype],
        meshes=_meshes(device.type, case.world, case.ep),
    )

    def backward(step: int) -> None:
        for tokens, labels in job.micro_batches(step):  # reduced in the last one only
            (job.model(tokens, labels) / case.accumulation).backward()

    return Trainee(job.model, backward, job.clip)


def _spec(case: Case, device: torch.device) -> RunSpec:
    workload = Workload(
        model="tiny",
        layers=case.size.layers,
        seq_len=16,
        grad_accum=case.accumulation,
        ep=case.ep,
        ac="none",
        compile=False,
        routing="natural",
        max_norm=MAX_NORM if case.clip else None,
    )
    return RunSpec(
        workload=workload, mode=Mode(device="cuda" if device.type == "cuda" else "cpu", world=case.world, nproc=1)
    )


@torch.no_grad()
def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Make every parameter NaN, so that only what is loaded afterwards can give finite values."""
    for parameter in parameters:
        parameter.fill_(float("nan"))
