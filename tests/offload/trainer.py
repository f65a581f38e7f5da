"""A small trainer whose own work is queued too, so that the adversary can delay compute as well as copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from offbench.offload.chunks import plan_chunks
from offbench.offload.copies import Copier
from offbench.offload.engine import Engine, Work
from offbench.offload.engines import engine_of
from offbench.offload.hoststore import HostStore
from offbench.offload.schedule import Schedule
from offbench.offload.staged import Staged
from offbench.offload.streams import Streams, Why

SIZES = (96, 160, 64, 256, 128, 320, 64, 192)
STEPS = 4
CAP = 2048
"""Bytes: one or two parameters a chunk, so that slots are taken over several times a step."""


def stream(lead: int = 99, **options: object) -> Schedule:
    """Arm stream's, in such chunks."""
    return Schedule(
        "stream",
        offloaded=True,
        chunk_bytes=CAP,
        deferred=True,
        write_back="backward",
        lead=lead,
        **options,  # type: ignore[arg-type]
    )


@dataclass
class Result:
    """Where a run ended."""

    parameters: list[torch.Tensor]
    moments: list[torch.Tensor]

    def equals(self, other: Result) -> bool:
        """Bitwise."""
        pairs = zip(self.parameters + self.moments, other.parameters + other.moments, strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def _initial() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator) for n in SIZES]


def _gradient(parameter: torch.Tensor, step: int) -> torch.Tensor:
    return torch.sin(parameter * (step + 1)) + 0.1


def _clip(gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)


def _adamw(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    counters: list[torch.Tensor],
    step: int,
) -> None:
    adamw(
        parameters, gradients, first, second, [], counters, fused=True, amsgrad=False, maximize=False,
        beta1=0.9, beta2=0.999, lr=0.1 / (step + 1), weight_decay=0.1, eps=1e-8,
    )  # fmt: skip


def _buffers(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros for gradients, two of them in one buffer, as FSDP2 reduces a parameter group into one."""
    found = []
    for first, second in zip(parameters[::2], parameters[1::2], strict=True):
        buffer = torch.zeros(first.numel() + second.numel())
        found += buffer.split([first.numel(), second.numel()])
    return found


def plain(left_out: Mapping[int, int] | None = None) -> Result:
    """The reference: the same steps with everything in place. left_out: by step, a parameter that has no gradient."""
    parameters = _initial()
    first, second = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    counters = [torch.tensor(0.0) for _ in parameters]
    for step in range(STEPS):
        gradients = [_gradient(p, step) for p in parameters]
        for gradient in gradients:
            _clip(gradient)
        present = [i for i in range(len(parameters)) if i != (left_out or {}).get(step)]
        _adamw(*([some[i] for i in present] for some in (parameters, gradients, first, second, counters)), step)
    return Result(parameters, first + second)


def _state_of(chunk: Staged, offset: int, like: torch.Tensor) -> torch.Tensor:
    return chunk.bytes(offset, like.numel() * 4).view(torch.float32)


def run(
    schedule: Schedule,
    streams: Streams,
    tamper: Callable[[Engine], None] | None = None,
    passes: Sequence[int] = (),
    left_out: Mapping[int, int] | None = None,
    meanwhile: Callable[[Engine, int], None] | None = None,
) -> Result:
    """STEPS steps under `schedule`: forward and backward, clipping and reads are operations of the compute stream.

    passes: forwards and backwards of each step; one of each, unless they are given. left_out: by step, a chunk
    that has no gradient. meanwhile: called before each step().
    """
    parameters = _initial()
    chunks = plan_chunks([p.numel() * 4 for p in parameters], schedule.chunk_bytes)
    resident: dict[int, torch.Tensor] = {}
    for chunk in chunks:
        if sum(state.numel() for state in resident.values()) + chunk.nbytes <= schedule.resident_bytes:
            resident[chunk.index] = torch.zeros(chunk.nbytes, dtype=torch.uint8)
    store = HostStore([0 if chunk.index in resident else chunk.nbytes for chunk in chunks])
    engine = engine_of(schedule)(chunks, store, schedule, streams, Copier(), resident)
    if tamper is not None:
        tamper(engine)
    counters = [torch.tensor(0.0) for _ in parameters]
    compute, accesses = streams.compute(), streams.accesses

    there: set[int] = set()
    engine.has_gradients = there.__contains__

    def pass_through(step: int, gradients: list[torch.Tensor]) -> None:
        """Forward and backward."""
        for chunk in chunks:
            for event in engine.before_read([chunk.index]):
                compute.wait(event, Why.READ)
            for i in chunk.members:
                compute.run(
                    lambda i=i, step=step, gradients=gradients: gradients[i].copy_(_gradient(parameters[i], step)),
                    reads=accesses([parameters[i]]),
                    writes=accesses([gradients[i]]),
                )
        for chunk in reversed(chunks):  # the backward gathers the parameters once more
            engine.before_backward([chunk.index])
            for event in engine.before_read([chunk.index]):
                compute.wait(event, Why.READ)
            there.add(chunk.index)
        engine.after_backward()

    for step in range(STEPS):
        gradients = _buffers(parameters)
        for _ in range(passes[step] if passes else 1):
            pass_through(step, gradients)
        for gradient in gradients:
            compute.run(lambda gradient=gradient: _clip(gradient), writes=accesses([gradient]))

        works = []
        for chunk in chunks:

            def update(state: Staged, chunk=chunk, step=step, gradients=gradients) -> None:
                _adamw(
                    [parameters[i] for i in chunk.members],
                    [gradients[i] for i in chunk.members],
                    [
                        _state_of(state, o, parameters[i])
                        for i, (o, _) in zip(chunk.members, chunk.offsets, strict=True)
                    ],
                    [
                        _state_of(state, o, parameters[i])
                        for i, (_, o) in zip(chunk.members, chunk.offsets, strict=True)
                    ],
                    [counters[i] for i in chunk.members],
                    step,
                )

            members = chunk.members
            works.append(Work(chunk, update, [gradients[i] for i in members], [parameters[i] for i in members]))
        there.clear()
        if meanwhile is not None:
            meanwhile(engine, step)
        engine.step([work for work in works if work.chunk.index != (left_out or {}).get(step)])
    engine.drain()

    where = {i: (c.index, o) for c in chunks for i, o in zip(c.members, c.offsets, strict=True)}
    moments = [
        _state_of(Staged.whole(resident.get(where[i][0], store.chunk(where[i][0]))), where[i][1][which], parameters[i])
        for which in (0, 1)
        for i in range(len(parameters))
    ]
    return Result(parameters, moments)
