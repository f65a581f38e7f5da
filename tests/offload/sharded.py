"""6 sharded blocks and a root, 1 MiB chunks, clipping, weight decay, a learning rate that changes every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from offbench.arms import find
from offbench.offload import OffloadedAdamW, Schedule
from offbench.offload.streams import Streams

WIDTH, STEPS = 256, 6
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Block(nn.Module):
    """Residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks, then a norm and a head that the root itself owns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().mean()


def build(device: torch.device, prefetch: bool = True) -> Model:
    """The model under FSDP2 over the default group."""
    torch.manual_seed(7)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if prefetch:
        for this, following in zip(model.blocks, model.blocks[1:], strict=False):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
    return model


def schedule_of(arm: str, **options: Any) -> Schedule:
    """The arm's schedule with 1 MiB chunks."""
    found, _ = find(arm)
    return found.schedule(found.resolve(chunk_bytes=1 << 20, **options))


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
