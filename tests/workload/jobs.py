"""Small jobs for the tests: specs, steps of plain AdamW on what `build` makes of them, and rehearsals in a process
of their own."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here, so that no child pays for it
import torch.distributed as dist
import torch.distributed.fsdp
import torch.multiprocessing as mp

from offbench.config import Mode, RunSpec, Workload
from offbench.workload.parallel import Job, build
from offbench.workload.rehearsal import init_rehearsal

CPU = torch.device("cpu")


def spec(world: int, kind: str = "real", **workload: object) -> RunSpec:
    """A spec of `tiny` on the CPU, two layers, natural routing, no compile, unless told otherwise."""
    chosen = {"model": "tiny", "layers": 2, "seq_len": 32, "routing": "natural", "compile": False} | workload
    mode = Mode(kind=kind, device="cpu", world=world, nproc=world if kind == "real" else 1)
    return RunSpec(workload=Workload.model_validate(chosen), mode=mode)


def backward(job: Job, step: int = 0) -> torch.Tensor:
    """Forward and backward of one step; its mean loss on this rank."""
    total = torch.zeros((), device=job.device)
    for tokens, labels in job.micro_batches(step):
        loss = job.model(tokens, labels) / job.spec.workload.grad_accum
        loss.backward()
        total += loss.detach()
    return total


def gradients(job: Job) -> dict[str, torch.Tensor]:
    """This rank's part of every gradient, by parameter name."""
    return {name: p.grad.to_local().clone() for name, p in job.model.named_parameters()}


def loss_and_gradients(rank: int, chosen: RunSpec, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One forward and backward of the job, for `ranks.on_ranks` or `rehearsed`."""
    job = build(chosen, rank, CPU, param_dtype=dtype)
    return backward(job), gradients(job)


def train(rank: int, chosen: RunSpec, steps: int = 3, device: torch.device = CPU) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of AdamW."""
    job = build(chosen, rank, device)
    optimizer = torch.optim.AdamW(job.params, lr=1e-2, fused=True)
    seen = []
    for step in range(steps):
        loss = backward(job, step)
        norm, _ = job.clip()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss), float(norm)))
    return seen


def _child(_: int, function: Callable[..., Any], rank: int, world: int, file: str, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # as in tests.ranks
    torch.set_num_threads(1)
    init_rehearsal(rank, world)
    torch.save(function(rank, *arguments), file)
    dist.destroy_process_group()


def rehearsed(rank: int, world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(rank, *arguments)` in a forked process that rehearses one rank.

    One process, one job: torch caches sharding decisions, and with them the process groups of an earlier job.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "result.pt")
        mp.start_processes(_child, (function, rank, world, file, arguments), nprocs=1, start_method="fork")
        return torch.load(file, weights_only=False)
