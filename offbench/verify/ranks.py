"""Process groups: one launch per world size trains every case of that size, each rank writing down what it finds.

Ranks are processes started with torch.multiprocessing: forked on the CPU, where nothing needs a start of its own,
spawned on CUDA, which no fork survives. With fewer GPUs than ranks one process rehearses the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch._dynamo  # imported here, so that no forked rank pays for it
import torch.distributed as dist
import torch.distributed.fsdp  # likewise
from torch.multiprocessing.spawn import ProcessException, start_processes

from offbench.offload.streams import Why
from offbench.verify.cases import Case, Variant, paces
from offbench.verify.table import Answer
from offbench.verify.trial import Snapshot, Trial, first_difference, first_not_finite
from offbench.workload.rehearsal import init_rehearsal

TIMEOUT = datetime.timedelta(seconds=120)
"""How long a collective may wait for a rank."""


@dataclass(frozen=True)
class Launch:
    """All cases of one world size on this host."""

    world: int
    processes: int
    """1 below a larger world: a rehearsal of rank 0."""
    device: str
    cases: tuple[Case, ...]
    variants: tuple[Variant, ...]
    quick: bool
    drop: Why | None = None

    @property
    def rehearsed(self) -> bool:
        """Whether one process stands in for the ranks."""
        return self.processes < self.world


def run(launch: Launch, folder: Path) -> tuple[list[Answer], str | None]:
    """Train everything; the ranks' answers, and what went wrong when a rank ended before its time.

    folder: an empty one, for the ranks' files.
    """
    if launch.device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products; read when CUDA starts
    method = "spawn" if launch.device == "cuda" else "fork"
    failure = None
    try:
        start_processes(  # type: ignore[no-untyped-call]
            _rank, (launch, str(folder)), nprocs=launch.processes, start_method=method
        )
    except ProcessException as error:
        failure = str(error).strip().splitlines()[-1]
    answers = [answer for rank in range(launch.processes) for answer in _read(folder / f"{rank}.jsonl", rank)]
    return answers, failure


def _read(path: Path, rank: int) -> Iterator[Answer]:
    """A rank's answers, as far as it got."""
    if path.exists():
        for line in path.read_text().splitlines():
            case, arm, verdict, text, difference = json.loads(line)
            yield Answer(case, arm, rank, verdict, text, difference)


def _rank(rank: int, launch: Launch, folder: str) -> None:
    """A rank's process. Its file gets a line per cell, whole or not at all."""
    torch.set_num_threads(1)
    yield_cores()
    device = _join(rank, launch, folder)
    references: References = {}
    with open(Path(folder) / f"{rank}.jsonl", "w", buffering=1) as out:
        for number, case in enumerate(launch.cases):
            began = time.perf_counter()
            _train(Trial(case, rank, device, launch.drop), number, launch, references, out)
            if rank == 0:
                where = f"{number + 1} of {len(launch.cases)}"
                print(f"{case.name} ({where}): {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def yield_cores() -> None:
    """Make this process and the threads it will start yield their cores to others that have work.

    gloo's threads poll their sockets. As batch threads they do not take the core from a rank that computes: with 4
    ranks on 2 cores a reduce-scatter of 8 KiB took 1.1 ms instead of 5.6. Where there is no such class of threads, or
    a container refuses it, everything is as right and slower.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _join(rank: int, launch: Launch, folder: str) -> torch.device:
    """The default process group, and the device this rank trains on."""
    if launch.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        # While that is only warned about, attention's fused kernels go on adding up in any order: products remain.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        device = torch.device("cpu")
    if launch.rehearsed:
        init_rehearsal(rank, launch.world)
        return device
    backend, bound = ("cpu:gloo,cuda:nccl", device) if launch.device == "cuda" else ("gloo", None)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=launch.world,
        timeout=TIMEOUT,
        device_id=bound,
    )
    return device


References = dict[Case, tuple[Snapshot, str | None]]
"""What torch.optim.AdamW ends with uninterrupted, and why that can prove nothing; None when it can."""


def _reference(trial: Trial, references: References) -> tuple[Snapshot, str | None]:
    """The case's reference. It runs twice: a job that does not repeat itself proves nothing.

    references: those of earlier cases, since a resumed case has the one of its uninterrupted twin.
    """
    case = trial.case.uninterrupted
    if case not in references:
        references.clear()  # only neighbours share
        expected = trial.reference()
        references[case] = expected, _unfit(expected, trial.reference())
    expected, unfit = references[case]
    if trial.case.resume and unfit is None:
        unfit = _unfit(expected, trial.reference(resume=True))
    return expected, unfit


def _unfit(expected: Snapshot, again: Snapshot) -> str | None:
    if unequal := first_difference(expected, again):
        return f"torch.optim.AdamW against itself: {unequal.describe()}"
    if broken := first_not_finite(expected):
        return f"torch.optim.AdamW ends with a {broken} that is not finite, and would equal any other such"
    return None


def _train(trial: Trial, number: int, launch: Launch, references: References, out: TextIO) -> None:
    """One row of the table."""

    def answer(variant: Variant, verdict: str, text: str = "", difference: object = None) -> None:
        print(json.dumps([trial.case.name, variant.name, verdict, text, difference]), file=out)

    if why := trial.case.not_applicable:
        for variant in launch.variants:
            answer(variant, "n/a", why)
        return
    expected, unfit = _reference(trial, references)
    for column, variant in enumerate(launch.variants):
        if unfit is not None:
            answer(variant, "not judgeable", unfit)
            continue
        answer(variant, "started")
        schedule, cell = variant.schedule(trial.case.chunk_bytes), number * len(launch.variants) + column
        # All paces on every rank, also after a difference: the other ranks may have found none, and go on.
        tried = [
            trial.differs(expected, variant, pace)
            for pace in paces(launch.device, launch.world, schedule, cell, launch.quick)
        ]
        found = next((difference for difference in tried if difference is not None), None)
        if found is not None:
            answer(variant, "FAIL", found.describe(), dataclasses.asdict(found))
        else:
            answer(variant, "pass")
