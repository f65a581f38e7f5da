"""What a simulated step is made of: link rates of one rank, compute times, and the chunks each layer reads.

Pure data and arithmetic, no torch. Rates are bytes/s, sizes bytes, times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from offbench.errors import UsageError
from offbench.offload.chunks import Chunk, plan_chunks
from offbench.offload.zerocopy import PROGRAMS
from offbench.units import GIB
from offbench.workload.presets import ModelShape

FP32 = 4
"""Bytes of one parameter, and of each of its two moments."""
PROGRAM_RATE = 56.9 / 4 * GIB
"""Bytes/s, both ways, of one such program where the link is no limit: 4 of them moved 56.9 GiB/s on an H200
(python -m offbench.offload.zerocopy, 2026-11-29)."""
IN_PLACE = 77.3 / 94.2
"""Share of the copy engines' rate both ways that enough programs reach; the same launch, 8 programs."""
MULTIPROCESSORS = 132
"""Of an H200 (datasheet). Each program is assumed to take one from the model while it runs; that is not measured."""


@dataclass(frozen=True)
class Links:
    """Rates of one rank while every rank copies alike: each way alone, and both ways at once, summed."""

    into: float
    out: float
    both: float

    def __post_init__(self) -> None:
        if not 0 < min(self.into, self.out) <= max(self.into, self.out) <= self.both < math.inf:
            raise UsageError(
                f"rates {self.into:.4g} in, {self.out:.4g} out, {self.both:.4g} both ways: each must be positive and "
                "one way no faster than both ways together"
            )

    @staticmethod
    def of(into: float, out: float, both: float | None = None) -> Links:
        """Rates from figures that may disagree: no way is faster than both ways; None: full duplex."""
        total = into + out if both is None else both
        return Links(min(into, total), min(out, total), total)

    def now(self, moving_in: bool, moving_out: bool) -> tuple[float, float]:
        """Rates in and out at this moment. Beside each other both slow down alike until they add up to `both`."""
        if moving_in and moving_out:
            share = min(1.0, self.both / (self.into + self.out))
            return self.into * share, self.out * share
        return self.into * moving_in, self.out * moving_out

    @property
    def in_place(self) -> float:
        """Rate of updates in host memory, both ways summed: what the link gives to a kernel, what its programs can ask
        for, and no more each way than that way alone, since each byte read is written. Measured on one link; on others
        inferred from it."""
        return min(IN_PLACE * self.both, PROGRAMS * PROGRAM_RATE, 2 * min(self.into, self.out))

    def scaled(self, share: float) -> Links:
        """Every rate times `share`."""
        return Links(share * self.into, share * self.out, share * self.both)

    def floor_s(self, nbytes: float) -> float:
        """Least seconds for so many bytes in and as many out (`offbench.floor`, for one rank's share)."""
        return max(nbytes / self.into, nbytes / self.out, 2 * nbytes / self.both)


@dataclass(frozen=True)
class Compute:
    """Seconds of one step's work on the GPU when no copy is in the way."""

    forward: float
    backward: float
    """Of all passes but the first forward, when gradients are accumulated."""
    update: float
    """AdamW over all parameters of the rank."""
    clip: float = 0.0
    loss: float = 0.0
    """Of the forward: the head and the loss. They come after the last layer, so all parameters must be new by then."""

    def __post_init__(self) -> None:
        if min(self.forward, self.backward, self.update, self.clip) < 0 or not 0 < self.total < math.inf:
            parts = f"forward {self.forward:g}, backward {self.backward:g}, update {self.update:g}"
            raise UsageError(f"compute times {parts}: give seconds, none negative, and not all zero")
        if not 0 <= self.loss <= self.forward:
            raise UsageError(f"head and loss {self.loss:g} s: a part of the forward, {self.forward:g} s")

    def with_loss(self, share: float) -> Compute:
        """The same with that share of the forward spent in head and loss."""
        return replace(self, loss=share * self.forward)

    @property
    def total(self) -> float:
        """The step of `none`."""
        return self.forward + self.backward + self.clip + self.update


Phase = Literal["forward", "loss", "backward", "step"]


@dataclass(frozen=True)
class Footprint:
    """GPU memory of one rank beside optimizer state, bytes, over the phases of a step."""

    parameters: float = 0.0
    gradients: float = 0.0
    """At the end of backward: they grow evenly through it, and go as updates run."""
    saved: float = 0.0
    """Activations kept for backward, at the loss: they grow evenly through forward and go through backward."""
    in_forward: float = 0.0
    """Temporaries while a unit's forward runs; the loss is taken to need as much: logits of some tokens, a gradient in
    fp32."""
    in_backward: float = 0.0
    """The same in backward, where a unit is computed again."""
    head: float = 0.0
    """At the loss, until backward has begun: the head's gathered weight, and its gradient, which the loss makes."""

    @property
    def left_at_loss(self) -> int | None:
        """Bytes of staging that raise no peak when the forward ends, as `offload.headroom` finds them: what step() has
        and the start of backward has not. None where memory is not counted."""
        if not self.gradients:
            return None
        sharded = min(self.gradients, self.parameters)  # micro batches are reduced when step() comes
        return max(0, round(sharded - self.saved - self.head))

    def now(self, phase: Phase, done: float, running: bool, fresh: float) -> float:
        """Bytes at a moment. done: share of the phase that has run; fresh: share of the gradients, complete at the
        last step, that still wait for their update."""
        if phase == "backward":
            grown = self.gradients * done + self.saved * (1 - done)
            return self.parameters + grown + self.in_backward * running
        if phase == "forward":
            return self.parameters + self.gradients * fresh + self.saved * done + self.in_forward * running
        if phase == "loss":
            return self.parameters + self.gradients * fresh + self.saved + self.head + self.in_forward * running
        return self.parameters + self.gradients * fresh

    @property
    def most(self) -> float:
        """The most without any state, all updates done before the forward."""
        ends = [self.now(phase, done, True, 0.0) for phase in ("forward", "backward") for done in (0.0, 1.0)]
        return max(*ends, self.now("loss", 1.0, True, 0.0), self.now("step", 1.0, False, 1.0))


@dataclass(frozen=True)
class Layout:
    """One rank's chunks, and the units of the forward that read them."""

    chunks: tuple[Chunk, ...]
    last_chunk: tuple[int, ...]
    """Per unit, in forward order: the last chunk that holds parameters of it."""
    shares: tuple[float, ...]
    """Per unit: its part of the forward's time up to the head and the loss; they add up to 1."""
    gradients: float = 0.5
    """Bytes of gradient per byte of state: 4 against 8 with two fp32 moments."""

    @property
    def nbytes(self) -> int:
        """Bytes that move each way in a step."""
        return sum(chunk.nbytes for chunk in self.chunks)


def of_model(
    shape: ModelShape,
    world: int,
    ep: int,
    layers: int,
    cap: int,
    moment: int = FP32,
    cut_above: int | None = None,
) -> Layout:
    """The layout of a preset: embedding, blocks, then norm and head. Every block takes the same time, the embedding
    none, and the head its `Compute.loss`.

    cap: bytes of a copy, `Schedule.chunk_bytes`: chunks that move in pieces are cut so already. moment: bytes of one
    moment of a parameter. cut_above: state of a parameter that does not move whole, `Schedule.cut_above`.
    """
    embedding, *rest = shape.other_tensors()
    units = [[embedding], *(list(shape.layer_tensors()) for _ in range(layers)), rest]
    sizes = [[moment * local_numel(*tensor, world, ep) for tensor in unit] for unit in units]
    return _layout(sizes, (0.0, *(1 / layers for _ in range(layers)), 0.0), cap, moment, cut_above)


def local_numel(name: str, shape: tuple[int, ...], world: int, ep: int) -> int:
    """Values rank 0 holds of a tensor: dim 0 over all ranks, or experts over `ep` and then over the rest."""
    rows, ways = (shape[0] // ep, world // ep) if name.startswith("experts.") else (shape[0], world)
    return -(-rows // ways) * math.prod(shape[1:])


def uniform(nbytes: int, layers: int, cap: int, moment: int = FP32) -> Layout:
    """So many bytes of state in equal layers, each cut into parameters that fit the cap of a copy."""
    per_layer = nbytes / layers / 2
    parts = max(1, math.ceil(2 * per_layer / cap))
    size = max(1, round(per_layer / parts))
    return _layout([[size] * parts for _ in range(layers)], (1 / layers,) * layers, cap, moment)


def equal_chunks(nbytes: float, count: int) -> Layout:
    """The layout of a closed-form model: equal chunks, each read by its own equal slice of the forward."""
    size = round(nbytes / count)
    chunks = tuple(Chunk(index, (index,), ((0, size // 2),), size) for index in range(count))
    return Layout(chunks, tuple(range(count)), (1 / count,) * count)


def _layout(
    units: list[list[int]], shares: tuple[float, ...], cap: int, moment: int, cut_above: int | None = None
) -> Layout:
    """units: bytes of one moment of each parameter, by unit, in the optimizer's order; moment: of one value."""
    chunks = plan_chunks([nbytes for unit in units for nbytes in unit], cap, cut_above=cut_above)
    last_of = {position: chunk.index for chunk in chunks for position in chunk.members}
    last = tuple(max(last_of[p] for p in positions) for positions in _positions(units))
    return Layout(chunks, last, shares, FP32 / (2 * moment))


def _positions(units: list[list[int]]) -> Iterator[range]:
    start = 0
    for unit in units:
        yield range(start, start + len(unit))
        start += len(unit)
