"""6 sharded blocks and a root, 1 MiB chunks, clipping, weight decay, a learning rate that changes every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from offbench.arms import find
from offbench.offload import OffloadedAdamW, Schedule
from offbench.offload.streams import Streams
from offbench.verify.trainees import Block, wrapped_mlp
from offbench.verify.trainees import Mlp as Model

__all__ = ["Block", "Model"]

WIDTH, STEPS = 256, 6
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def build(device: torch.device, prefetch: bool = True) -> Model:
    """The model under FSDP2 over the default group."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return wrapped_mlp(mesh, device, torch.bfloat16, 6, WIDTH, prefetch)


def schedule_of(arm: str, **options: Any) -> Schedule:
    """The arm's schedule, by default with 1 MiB chunks."""
    found, _ = find(arm)
    return found.schedule(found.resolve(**{"pieces": 1, "chunk_bytes": 1 << 20} | options))


def optimizer_of(arm: str, model: nn.Module, streams: Streams | None, **options: Any) -> OffloadedAdamW:
    """The arm's optimizer with 1 MiB chunks: one or two parameters each."""
    schedule = schedule_of(arm, **options)
    return OffloadedAdamW(model.parameters(), **OPTIONS, model=model, schedule=schedule, streams=streams)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    device: torch.device,
    between: Callable[[int], None] = lambda step: None,
    steps: range = range(STEPS),
) -> list[float]:
    """Losses of the steps. The learning rate is overwritten right after each step, while updates may be pending."""
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * (step + 1)
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(4, WIDTH, generator=generator).to(device)
        loss = model(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 1e3
        losses.append(loss.detach())
        between(step)
    return [float(loss) for loss in losses]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Local parameters and moments by name, on the CPU."""
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.drain()
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for kind, tensor in (("p", parameter), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
            found[f"{kind} {name}"] = tensor.to_local().detach().cpu().clone()
        found[f"step {name}"] = state["step"].detach().cpu().clone()
    return found


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values are not bitwise equal."""
    return [name for name in a if not torch.equal(a[name], b[name])]
