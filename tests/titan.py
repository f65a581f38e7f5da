"""A stand-in for torchtitan's Trainer: the methods, names and order of its training step, around a small model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from offbench.offload import OffloadedAdamW
from tests.offload.sharded import schedule_of

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class OptimizersContainer(torch.optim.Optimizer):
    """One optimizer a model part, and, being an optimizer itself, step hooks around all of them."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.optimizers = [OffloadedAdamW(part.parameters(), schedule=schedule_of("chunked")) for part in model_parts]
        super().__init__([p for part in model_parts for p in part.parameters()], {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)


class Trainer:
    """config: training.steps, gradient_accumulation_steps, device."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config
        self.gradient_accumulation_steps = config.gradient_accumulation_steps
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).to(config.device)
        fully_shard(model)
        self.model_parts: list[nn.Module] = [model]
        self.optimizers = OptimizersContainer(self.model_parts)
        self.lr_schedulers = [torch.optim.lr_scheduler.ConstantLR(one) for one in self.optimizers]
        self.step = 0

    def batches(self) -> Iterator[Batch]:
        """Endless."""
        while True:
            yield {"input": torch.ones(8, 64, device=self.config.device)}, torch.zeros(8, 64)

    def forward_backward_step(self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one micro-batch; its loss."""
        pred = self.model_parts[0](input_dict["input"])
        loss: torch.Tensor = nn.functional.mse_loss(pred, labels.to(pred.device))
        del pred
        loss.backward()
        return loss

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Micro-batches, clip, step."""
        self.optimizers.zero_grad()
        for _ in range(self.gradient_accumulation_steps):
            self.forward_backward_step(*next(data_iterator))
        nn.utils.clip_grad_norm_([p for part in self.model_parts for p in part.parameters()], 1.0)
        self.optimizers.step()
        for scheduler in self.lr_schedulers:
            scheduler.step()

    def train(self) -> None:
        """`training.steps` steps."""
        data_iterator = self.batches()
        while self.step < self.config.training.steps:
            self.step += 1
            self.train_step(data_iterator)
