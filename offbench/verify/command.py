"""`offbench verify`: check the request, launch every world size, print, and say by the exit code whether it holds."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offbench.errors import UsageError
from offbench.hardware import visible_gpus
from offbench.verify import table
from offbench.verify.cases import LARGE_MODELS, SMALL_MODELS, WORLDS, cases, variants

INTERRUPTED = 130

if TYPE_CHECKING:
    from offbench.offload.streams import Why


@dataclass(frozen=True)
class VerifyFlags:
    """What to prove, and where."""

    arms: tuple[str, ...] = ()
    nproc: int | None = None
    quick: bool = False
    device: str = "auto"
    format: str = "table"
    drop_wait: str | None = None
    """Name of a `streams.Why`: a fault planted to see that it is found."""


def verify_command(flags: VerifyFlags) -> int:
    """Run the matrix; 0 when everything that could be judged is equal, 1 otherwise, 130 when interrupted: the table
    then has what was found by then.

    Raises UsageError before anything starts for a request that makes no sense.
    """
    chosen = variants(flags.arms)
    if flags.format not in ("table", "json"):
        raise UsageError(f"--format {flags.format}: choose table or json")
    device, gpus = _device(flags.device)
    worlds = _worlds(flags.nproc, gpus)

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: ranks share the host's few cores
    import torch

    from offbench.runner import terminations_interrupt
    from offbench.verify.ranks import Found, Interrupted, Launch, run

    drop = _drop(flags.drop_wait, device)
    began = time.perf_counter()
    launches = []
    for world in worlds:
        jobs = tuple(cases(world, flags.quick, LARGE_MODELS if device == "cuda" else SMALL_MODELS))
        processes = 1 if device == "cuda" and world > gpus else world
        parts = _parts(len(jobs), processes, device)
        launches.append(Launch(world, processes, device, jobs, tuple(chosen), flags.quick, drop, parts))
    cells: list[table.Cell] = []
    interrupted = False
    # One GPU waits for the host most of the time, and has room for several processes that do not talk to each other.
    alone = device == "cuda" and all(launch.processes == 1 for launch in launches)
    for together in [launches] if alone else [[launch] for launch in launches]:
        found: Found = [([], None) for _ in together]
        if not interrupted:
            try:
                with terminations_interrupt(), tempfile.TemporaryDirectory() as folder:
                    found = run(together, Path(folder))
            except Interrupted as early:
                found, interrupted = early.found, True
        for launch, (answers, failure) in zip(together, found, strict=True):
            cells += table.judge(launch.cases, chosen, answers, launch.rehearsed, failure, interrupted)
    if flags.format == "json":
        print(table.to_json(cells, device, torch.__version__))
    else:
        print("\n".join(table.to_table(cells)))
    print(f"{device}, torch {torch.__version__}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return INTERRUPTED if interrupted else table.exit_code(cells)


def _device(asked: str) -> tuple[str, int]:
    """The device to train on, and how many GPUs there are."""
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {asked}: choose auto, cuda or cpu")
    if asked == "cpu":
        return "cpu", 0
    gpus, why = visible_gpus(os.environ)
    if asked == "cuda" and not gpus:
        raise UsageError(f"--device cuda: no GPU to use ({why}); use --device cpu")
    return ("cuda", len(gpus)) if gpus else ("cpu", 0)


def _worlds(nproc: int | None, gpus: int) -> Sequence[int]:
    """World sizes to try: all of them on the CPU; on CUDA what the GPUs allow, and at least a rehearsal of two."""
    if nproc is None:
        return WORLDS if not gpus else [world for world in WORLDS if world <= max(2, gpus)]
    if nproc not in WORLDS:
        raise UsageError(f"--nproc {nproc}: choose {', '.join(map(str, WORLDS[:-1]))} or {WORLDS[-1]}")
    return [nproc]


def _parts(jobs: int, processes: int, device: str) -> int:
    """Into how many process groups to part one process's jobs: four jobs or more each, which repay its start, and a
    core each (on CUDA two, and four groups at most: they share a device). Ranks that talk to each other get all cores.
    """
    cores = len(os.sched_getaffinity(0))
    most = min(4, cores // 4) if device == "cuda" else cores
    return max(1, min(most, jobs // 4)) if processes == 1 else 1


def _drop(name: str | None, device: str) -> Why | None:
    """The kind of wait to leave out."""
    from offbench.offload.streams import Why

    if name is None:
        return None
    if device != "cpu":
        raise UsageError("--drop-wait: only the CPU's streams can leave out a wait; add --device cpu")
    if name.upper() not in Why.__members__:
        raise UsageError(f"--drop-wait {name}: choose {', '.join(Why.__members__)}")
    return Why[name.upper()]
