"""The matrix as data: which jobs are trained, under which variants of the arms, with which paces of the streams.

No torch here, so that the command line can refuse bad input before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from offbench.arms import ARMS, Arm, find
from offbench.errors import UsageError
from offbench.offload.schedule import Schedule
from offbench.units import count

STEPS = 6
RESUME_AT = 3
"""Steps before a resumed case saves, rebuilds and loads."""
BROADCAST_EVERY = 2
"""Steps between weight broadcasts: the updates of the steps in between run in the forward."""
WORLDS = (1, 2, 4)


@dataclass(frozen=True)
class Size:
    """How large the models of a case are."""

    blocks: int
    """Of the dense model (`Case.blocks`: some cases have more); the root owns a norm and a head besides."""
    width: int
    layers: int
    """Of the mixture of experts."""
    chunks: tuple[int, int]
    """State that the chunks of all ranks together hold at most, in bytes: dense, experts."""


SMALL_MODELS = Size(4, 64, 2, (128 << 10, 512 << 10))
"""Two matrices a chunk, so that a step has five chunks or more: what a CPU trains in a tenth of a second."""
LARGE_MODELS = Size(6, 256, 3, (2 << 20, 2 << 20))
"""Chunks of 1 MiB on two ranks: copies that take a device long enough to be overtaken. The mixture of experts has five
of them, and no more layers than that takes: launching its many small kernels is what a GPU run waits for."""


@dataclass(frozen=True)
class Case:
    """One training job; all arms must leave it with the same bits."""

    world: int
    model: Literal["mlp", "moe"] = "mlp"
    """mlp: dense blocks, gradients reduced in every backward. moe: the `tiny` preset, reduced in the last one."""
    ep: int = 1
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of forward and backward; parameters and state are fp32."""
    clip: bool = True
    accumulation: int = 1
    """Backward passes a step."""
    resume: bool = False
    """Save model and optimizer after RESUME_AT steps, while updates are pending, rebuild both, load, go on."""
    implementation: Literal["fused", "foreach"] = "fused"
    broadcast: bool = False
    """Right after every BROADCAST_EVERY-th step() a replica gets the weights, as deltas after the first time."""
    waits: bool = False
    """Of the dense model: the forward holds the host in every block, and updates are queued meanwhile."""
    kept: int = 0
    """Chunks whose state the arms leave on the device, the first ones."""
    pool: bool = False
    """The arms' gradients are made in compute's pool; those of torch's AdamW are not."""
    size: Size = SMALL_MODELS

    @property
    def name(self) -> str:
        """The case in words, as in `2 ranks, moe EP 2, bf16, clip, 4 backwards, resume`."""
        return ", ".join([count(self.world, "rank"), self.job])

    @property
    def job(self) -> str:
        """The case in words, without its ranks."""
        model = f"moe EP {self.ep}" if self.model == "moe" else self.model
        parts = [model, self.dtype, "clip" if self.clip else "no clip"]
        if self.accumulation > 1:
            parts.append(f"{self.accumulation} backwards")
        if self.resume:
            parts.append("resume")
        if self.broadcast:
            parts.append("broadcast")
        if self.waits:
            parts.append("waits")
        if self.kept:
            parts.append(f"{self.kept} chunks kept")
        if self.pool:
            parts.append("gradient pool")
        if self.implementation != "fused":
            parts.append(self.implementation)
        return ", ".join(parts)

    @property
    def not_applicable(self) -> str | None:
        """Why this case cannot exist; None when it can."""
        if self.world % self.ep:
            return f"EP {self.ep} on {count(self.world, 'rank')}"
        return None

    @property
    def blocks(self) -> int:
        """Of the dense model. step() and the first gathers queue what a few blocks need before the first wait: a model
        that waits has as many blocks again, or none of their updates would be left for its waits."""
        return self.size.blocks * (2 if self.waits else 1)

    @property
    def chunk_bytes(self) -> int:
        """Cap of one chunk of state on each rank."""
        return self.size.chunks[self.model == "moe"] // self.world

    @property
    def uninterrupted(self) -> Case:
        """The same job without a resume, which must end with the same bits."""
        return dataclasses.replace(self, resume=False)


@dataclass(frozen=True)
class Variant:
    """An arm with options under which a small job tries it hard."""

    arm: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The arm, marked when it has the options of WHOLE."""
        return f"{self.arm}/whole" if ("first_step", "whole") in self.options else self.arm

    def schedule(self, chunk_bytes: int) -> Schedule:
        """The arm's schedule with these options and chunks."""
        arm = ARMS[self.arm]
        return arm.schedule(arm.resolve(chunk_bytes=chunk_bytes, **dict(self.options)))


SMALL = {"pieces": 1, "slots": 2, "lead": 2, "ahead": 1}
"""Windows far below the number of chunks: slots are taken over, and most updates are queued by the forward."""
WHOLE = {"slots": 64, "lead": 3, "ahead": 2, "first_step": "whole"}
"""Every chunk has its own slot: only then does a move-in have the host bytes of the last step alone to wait for."""


def variants(arms: Sequence[str]) -> list[Variant]:
    """The variants of the named arms, or of every exact arm when none is named.

    Raises UsageError for an unknown arm and for one that is not exact.
    """
    chosen = dict.fromkeys(find(name)[0].name for name in arms)
    for name in chosen:
        if not ARMS[name].exact:
            raise UsageError(f"--arm {name}: it is not exact, so there is nothing to prove; see `offbench arms`")
    found = []
    for arm in ARMS.values():
        if arm.exact and (not chosen or arm.name in chosen):
            found += _variants(arm)
    return found


def _variants(arm: Arm) -> list[Variant]:
    sets = (SMALL, WHOLE) if "first_step" in arm.defaults else (SMALL,)
    return [Variant(arm.name, tuple((k, v) for k, v in options.items() if k in arm.defaults)) for options in sets]


def cases(world: int, quick: bool, size: Size = SMALL_MODELS) -> list[Case]:
    """The cases of one world size: all combinations, or, when `quick`, each condition at least once over WORLDS."""
    return [dataclasses.replace(case, size=size) for case in _cases(world, quick)]


def _cases(world: int, quick: bool) -> list[Case]:
    base = Case(world)
    if quick:
        return [dataclasses.replace(base, **change) for change in _QUICK[world]]  # type: ignore[arg-type]
    found = []
    for model, ep in (("mlp", 1), ("moe", 2)):
        if world % ep:
            found.append(Case(world, "moe", ep))  # one line that says why there are no more
            continue
        # Innermost the resume, so that two neighbours share the uninterrupted run both are compared with.
        for dtype, clip, accumulation, resume in itertools.product(
            ("bf16", "fp32"), (True, False), (1, 4), (False, True)
        ):
            found.append(Case(world, model, ep, dtype, clip, accumulation, resume))  # type: ignore[arg-type]
    found += [Case(world, "moe"), Case(world, implementation="foreach")]
    found += [Case(world, waits=True), Case(world, broadcast=True)]
    found += [Case(world, "moe", 2, resume=r, broadcast=True) for r in (False, True) if world % 2 == 0]
    return [*found, Case(world, waits=True, kept=5), Case(world, accumulation=4, pool=True)]


_EP: dict[str, object] = {"model": "moe", "ep": 2}
_QUICK: dict[int, list[dict[str, object]]] = {
    1: [
        {},
        {"model": "moe", "clip": False, "accumulation": 4},
        {"resume": True},
        {"waits": True},
        _EP,
        {"accumulation": 4, "pool": True},
        {"waits": True, "kept": 5},
    ],
    2: [
        {},
        {"clip": False, "accumulation": 4},
        {"resume": True, "dtype": "fp32"},
        {"implementation": "foreach"},
        _EP | {"dtype": "fp32"},
        _EP | {"resume": True},
        {"waits": True},
        {"broadcast": True},
        _EP | {"broadcast": True},
        {"accumulation": 4, "pool": True},
        {"waits": True, "kept": 5},
    ],
    4: [{"resume": True}, _EP],
}


@dataclass(frozen=True)
class Pace:
    """How the streams behave in one run."""

    name: str
    streams: tuple[tuple[str, str], ...] | None = None
    """Pace by stream for the adversary; None: the device's own streams."""
    seed: int = 0
    copy_repeat: float = 1.0
    """How often each byte is copied: slow copies are overtaken by anything that does not wait."""


_SIDES = ("in", "update", "out")


def _adversaries() -> list[Pace]:
    """Every stream as late or as early as it can be, and at random; neighbours in the list differ as much as they
    can."""
    fixed = []
    for choice in (0, 7, 1, 6, 2, 5, 3, 4):
        paces = tuple((side, "eager" if choice >> bit & 1 else "lazy") for bit, side in enumerate(_SIDES))
        fixed.append(Pace(", ".join(f"{side} {pace}" for side, pace in paces), paces))
    random = [Pace(f"random, seed {s}", tuple((side, "random") for side in _SIDES), seed=s) for s in (1, 2)]
    return [*fixed[:4], random[0], *fixed[4:], random[1]]


ADVERSARIES = tuple(_adversaries())
PLAIN = Pace("device streams")
ON_DEVICE = (PLAIN, Pace("device streams, copies 40 times as long", copy_repeat=40.0))


def paces(
    device: str, world: int, schedule: Schedule, row: int, column: int, quick: bool, waits: bool = False
) -> list[Pace]:
    """The paces of the cell in that row and column of its table. waits: its case does.

    On CPU the device's streams prove little, since everything runs when it is called: there a schedule with streams
    runs under the adversary, a pace or two a cell, the next row and the next world under the following ones.
    On CUDA every arm runs the first job at both paces, and the others at one of them: the parity of the row's binary
    digits says which, so that each condition (a digit of the row) meets both.
    A case that waits meets two paces everywhere: what is queued in waits depends on whether copies have ended by then,
    and of two paces that follow each other, at least one ends some of them.
    """
    if not schedule.offloaded:
        return [PLAIN]
    first = row == 0
    if device != "cpu":
        # One stream keeps its order however long copies take; where the update is the copy, none can be repeated.
        if not schedule.copy_streams or schedule.update == "host_memory":
            return [PLAIN]
        return list(ON_DEVICE) if first or waits else [ON_DEVICE[(row.bit_count() + column) % 2]]
    if not schedule.copy_streams:
        return [ADVERSARIES[0]]
    choice = ADVERSARIES if quick else (*ADVERSARIES, PLAIN)
    turn = 4 * world + row + column
    each = 2 if waits or (world <= 2 and (first or not quick)) else 1
    return [choice[(turn + i) % len(choice)] for i in range(each)]
