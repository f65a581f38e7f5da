"""What a trainer does between steps, in random order, with updates pending: still the bits of torch's AdamW."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from offbench.offload import OffloadedAdamW
from offbench.offload.adversary import AdversarialStreams
from offbench.verify.trainees import wrapped_mlp
from tests.offload import sharded
from tests.ranks import on_ranks

CPU, WIDTH = torch.device("cpu"), 32
SEEDS = (0, 1, 7, 9)
"""Of the first two dozen, those in which every missing drain shows."""
SIDES = ("in", "update", "out")


class Trainer:
    """A model of three blocks, the last of which joins the optimizer late, and what can be done to it."""

    def __init__(self, arm: str | None, seed: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = wrapped_mlp(mesh, CPU, torch.bfloat16, 3, WIDTH, prefetch=seed % 2 == 0)
        self.named = list(self.model.named_parameters())  # later some may be registered gathered
        self.late = [parameter for name, parameter in self.named if name.startswith("blocks.2.")]
        self.arm, self.options = arm, random.Random(seed)
        self.added = False
        self.saved: dict[str, Any] = {}
        self.seen: list[float] = []
        """Losses and norms."""
        self.build()

    def build(self) -> None:
        """An optimizer over all that joined so far."""
        given = [parameter for _, parameter in self.named if self.added or all(parameter is not p for p in self.late)]
        if self.arm is None:
            self.optimizer: Any = torch.optim.AdamW(given, **sharded.OPTIONS, fused=True)
            return
        draw = self.options.choice
        options: dict[str, Any] = {"chunk_bytes": 8 << 10, "state_budget": draw([0, 20 << 10])}
        options |= {"lead": 1, "ahead": 0}  # so that most is pending
        options |= {"slots": draw([1, 2])} if self.arm == "overlap" else {}
        streams = AdversarialStreams({side: draw(["lazy", "lazy", "eager"]) for side in SIDES})
        schedule = sharded.schedule_of(self.arm, **options)
        self.optimizer = OffloadedAdamW(
            given, **sharded.OPTIONS, model=self.model, schedule=schedule, streams=streams, debug=draw([False, True])
        )

    def train(self, draw: random.Random) -> None:
        for _ in range(draw.choice([1, 2])):
            loss = self.model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(draw.randrange(1000))))
            loss.backward()
            self.seen.append(float(loss.detach()))
        self.seen.append(float(nn.utils.clip_grad_norm_([p for _, p in self.named], 0.05).full_tensor()))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)

    def evaluate(self, draw: random.Random) -> None:
        with torch.inference_mode() if draw.random() < 0.5 else torch.no_grad():
            self.seen.append(float(self.model(torch.ones(4, WIDTH))))

    def save(self, draw: random.Random) -> None:
        for what in draw.sample(["model", "optimizer"], 2):  # the first one drains
            self.saved[what] = copy.deepcopy(getattr(self, what).state_dict())

    def load(self, draw: random.Random) -> None:
        if self.saved and len(self.saved["optimizer"]["param_groups"]) == len(self.optimizer.param_groups):
            saved = copy.deepcopy(self.saved)
            if draw.random() < 0.5:
                self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def join(self, draw: random.Random) -> None:
        if not self.added:
            self.optimizer.add_param_group({"params": self.late, "weight_decay": 0.3})
        self.added = True

    def freeze(self, draw: random.Random) -> None:
        self.model.blocks[draw.randrange(2)].requires_grad_(draw.random() < 0.6)

    def move_state(self, draw: random.Random) -> None:
        if self.arm is not None:
            self.optimizer.set_state_budget(draw.choice([0, 30 << 10, 1 << 30]))

    def move_model(self, draw: random.Random) -> None:
        self.model._apply(torch.clone)

    def write(self, draw: random.Random) -> None:
        with self.optimizer.settled() if self.arm is not None else nullcontext(), torch.no_grad():
            self.named[draw.randrange(len(self.named))][1].mul_(0.9)

    def throw_away(self, draw: random.Random) -> None:
        self.model(torch.ones(4, WIDTH)).backward()
        self.optimizer.zero_grad()

    def end(self) -> dict[str, torch.Tensor]:
        """Parameters, and the state of those that had a step."""
        if self.arm is not None:
            self.optimizer.drain()
        found = {name: parameter.to_local().detach().clone() for name, parameter in self.named}
        for name, parameter in self.named:
            state = self.optimizer.state.get(parameter)
            if state and float(state["step"]):
                found |= {f"{key} {name}": getattr(x, "_local_tensor", x).clone() for key, x in state.items()}
        return found


DEEDS: list[Callable[[Trainer, random.Random], None]] = [
    Trainer.evaluate, Trainer.save, Trainer.load, Trainer.load, Trainer.join, Trainer.freeze, Trainer.move_state,
    Trainer.move_model, Trainer.write, Trainer.throw_away,
]  # fmt: skip


def mixed(rank: int) -> list[str]:
    """What differs, with the deeds that led there."""
    wrong = []
    for seed in SEEDS:
        deeds = [Trainer.train, *random.Random(seed).choices(DEEDS + 4 * [Trainer.train], k=20)]
        trainers = [Trainer(arm, seed) for arm in (None, "overlap", "stream")]
        for trainer in trainers:
            for number, deed in enumerate(deeds):
                deed(trainer, random.Random(100 * seed + number))
        expected, *others = [trainer.end() for trainer in trainers]
        for trainer, found in zip(trainers[1:], others, strict=True):
            differ = [name for name in expected if not torch.equal(expected[name], found.get(name, torch.ones(0)))]
            if differ or trainer.seen != trainers[0].seen:
                wrong.append(f"{trainer.arm} {seed}: {differ[:3]} after {[deed.__name__ for deed in deeds]}")
    return wrong


def test_no_mixture_of_what_trainers_do_changes_a_bit() -> None:
    assert on_ranks(1, mixed) == [[]]
