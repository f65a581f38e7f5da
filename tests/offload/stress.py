"""What stress tests do to a training job on real streams: random delays, and memory of NaN that comes and goes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offbench.offload import OffloadedAdamW
from offbench.offload.streams import Access, DeviceStream, DeviceStreams
from offbench.verify.cases import LARGE_MODELS, Case, Variant
from offbench.verify.trainees import Trainee
from offbench.verify.trial import OPTIONS, train
from tests.offload.alone import WORLD

MIB = 1 << 20
CASE = Case(WORLD, size=LARGE_MODELS)
"""Six sharded blocks and a root, chunks of 1 MiB, clipping, weight decay, a learning rate that changes every step."""
FEWER = Case(WORLD, size=dataclasses.replace(LARGE_MODELS, blocks=4))
"""The same for hundreds of steps in every arm: five chunks for two slots."""
CYCLES = 400_000
"""Longest delay: a fifth of a millisecond of an H200."""


def delay(device: torch.device, chance: random.Random) -> None:
    """Hold the current stream up, in one of three cases."""
    if device.type == "cuda" and chance.random() < 0.3:
        torch.cuda._sleep(chance.randrange(CYCLES))


class Hesitant(DeviceStream):
    """A side stream that starts its copies and updates late, at random."""

    chance: random.Random
    device: torch.device

    def run(self, do: Callable[[], None], reads: Sequence[Access] = (), writes: Sequence[Access] = ()) -> None:
        super().run(lambda: delay(self.device, self.chance))
        super().run(do, reads, writes)


class HesitantStreams(DeviceStreams):
    """The device's streams, each side stream hesitant."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device)
        self._chance = random.Random(seed)

    def side(self, name: str) -> DeviceStream:
        if name not in self._side:
            plain = super().side(name)
            hesitant = Hesitant(name, plain._module, plain._raw, plain._timing)
            hesitant.chance, hesitant.device = self._chance, self.device
            self._side[name] = hesitant
        return self._side[name]


class Disturbance:
    """Called inside forward and backward: delays compute, and with a budget holds and drops memory full of NaN."""

    def __init__(self, device: torch.device, seed: int, budget: int) -> None:
        self._device, self._budget = device, budget
        self._chance = random.Random(seed)
        self._held: list[torch.Tensor] = []

    def __call__(self, *_: object) -> None:
        delay(self._device, self._chance)
        self._chance.shuffle(self._held)
        del self._held[: len(self._held) // 2]
        free = self._budget - sum(tensor.nbytes for tensor in self._held)
        with contextlib.suppress(torch.OutOfMemoryError):
            while (nbytes := self._chance.randrange(4096, 8 * MIB)) < free:
                self._held.append(torch.full((nbytes // 4,), torch.nan, device=self._device))
                free -= nbytes

    def settle_in(self, model: nn.Module) -> None:
        """Be called before the first product of each block, forward and backward."""
        for block in model.blocks:  # type: ignore[union-attr]
            block.up.register_forward_pre_hook(self)
            block.down.register_full_backward_pre_hook(self)


def plain(trainee: Trainee, **changed: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainee.model.parameters(), **{**OPTIONS, **changed}, fused=True)


def offloaded(trainee: Trainee, variant: Variant, device: torch.device, seed: int) -> OffloadedAdamW:
    return OffloadedAdamW(
        trainee.model.parameters(),
        **OPTIONS,
        model=trainee.model,
        schedule=variant.schedule(CASE.chunk_bytes),
        streams=HesitantStreams(device, seed),
    )


def steps_of(trainee: Trainee, optimizer: torch.optim.Optimizer, device: torch.device, steps: range) -> list[int]:
    """Bytes the allocator holds after each step. The host waits for compute now and then, as trainers do."""
    reserved = []
    for step in steps:
        train(trainee, optimizer, range(step, step + 1))
        if device.type == "cuda":
            if step % 4 == 3:
                torch.cuda.current_stream().synchronize()
            reserved.append(torch.cuda.memory_reserved())
    return reserved
