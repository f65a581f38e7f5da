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
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
import torch._dynamo  # imported here, so that no forked rank pays for it
import torch.distributed as dist
import torch.distributed.fsdp  # likewise
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

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
    parts: int = 1
    """How many process groups share the cases, at the same time."""

    def part_of(self, row: int) -> int:
        """Which group trains that case. Neighbours stay together, since they share their reference; and every round
        begins with another group, or all cases with many backwards would meet in one."""
        turn, pair = divmod(row // 2, self.parts)
        return (pair + turn) % self.parts

    @property
    def rehearsed(self) -> bool:
        """Whether one process stands in for the ranks."""
        return self.processes < self.world


Found = list[tuple[list[Answer], str | None]]
"""Of each launch the ranks' answers, and what went wrong when a rank ended before its time."""


class Interrupted(Exception):
    """Somebody ended it; what had been answered by then is in `found`."""

    def __init__(self, found: Found) -> None:
        super().__init__("interrupted")
        self.found = found


def run(launches: Sequence[Launch], folder: Path) -> Found:
    """Train everything, all launches at the same time. Raises Interrupted in place of KeyboardInterrupt.

    folder: an empty one, for the ranks' files.
    """
    started: list[tuple[int, Path, ProcessContext]] = []
    try:
        for number, launch in enumerate(launches):
            if launch.device == "cuda":
                os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products; read when CUDA starts
            for part in range(launch.parts):
                where = folder / f"{number}.{part}"
                where.mkdir()
                started.append((number, where, _start(launch, part, where)))
        return _collect(launches, started)
    except BaseException as error:  # the ranks would train on to the end, and this process wait for them
        for process in (process for _, _, context in started for process in context.processes):
            process.kill()
            process.join()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(_collect(launches, [(number, where, None) for number, where, _ in started])) from error
        raise


def _collect(launches: Sequence[Launch], started: Sequence[tuple[int, Path, ProcessContext | None]]) -> Found:
    """Wait for the ranks, unless they have ended, and read what they found."""
    found: Found = [([], None) for _ in launches]
    for number, where, context in started:
        answers, failure = found[number]
        try:
            while context is not None and not context.join():
                pass
        except ProcessException as error:
            failure = failure or str(error).strip().splitlines()[-1]
        answers += _answers(launches[number], where)
        found[number] = answers, failure
    return found


def _answers(launch: Launch, where: Path) -> list[Answer]:
    return [answer for rank in range(launch.processes) for answer in _read(where, rank)]


def _start(launch: Launch, part: int, where: Path) -> ProcessContext:
    method = "spawn" if launch.device == "cuda" else "fork"
    context: ProcessContext | None = start_processes(  # type: ignore[no-untyped-call]
        _rank, (launch, part, str(where)), nprocs=launch.processes, join=False, start_method=method
    )
    assert context is not None
    return context


def _read(where: Path, rank: int) -> Iterator[Answer]:
    """A rank's answers, as far as it got; of a line that was cut short, nothing."""
    path = where / f"{rank}.jsonl"
    if path.exists():
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            case, arm, verdict, text, difference = json.loads(line)
            yield Answer(case, arm, rank, verdict, text, difference)


def _rank(rank: int, launch: Launch, part: int, folder: str) -> None:
    """A rank's process. Its file gets a line per cell, whole or not at all."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forked: the handler is that of the process that waits
    torch.set_num_threads(1)
    yield_cores()
    device = _join(rank, launch, folder)
    references: References = {}
    with open(Path(folder) / f"{rank}.jsonl", "w", buffering=1) as out:
        for row, case in enumerate(launch.cases):
            if launch.part_of(row) != part:
                continue
            began = time.perf_counter()
            line = _Line(Trial(case, rank, device, launch.drop), row, launch, out)
            _train(line, references)
            if rank == 0:  # so much is known of it if the whole is killed before the table
                where = f"{row + 1} of {len(launch.cases)}"
                took = f"{time.perf_counter() - began:.1f} s"
                print(f"{case.name} ({where}): {took}, rank 0: {line.in_words}", file=sys.stderr, flush=True)
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
        # It would write NaN into all new memory, with a kernel for each tensor: a third more for the host to launch.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
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


References = dict[Case, Snapshot]
"""What torch.optim.AdamW ends with, uninterrupted."""


def _reference(trial: Trial, references: References) -> Snapshot:
    """The case's reference. references: those of earlier cases, since a resumed case has that of its uninterrupted
    twin."""
    case = trial.case.uninterrupted
    if case not in references:
        references.clear()  # only neighbours share
        references[case] = trial.reference()
    return references[case]


def _train(line: _Line, references: References) -> None:
    """One row of the table."""
    trial, left = line.trial, dict(enumerate(line.launch.variants))
    if why := trial.case.not_applicable:
        line.answer_all("n/a", why)
        return
    expected = _reference(trial, references)
    unfit = _somewhere(_not_finite(expected), trial)
    if unfit is None:
        # A job that does not repeat itself proves nothing. An arm that has nothing to move is torch's kernel on the
        # same memory: ending with the reference's bits, it shows that the job does. Else the reference runs again.
        control = next((c for c, v in left.items() if not v.schedule(trial.case.chunk_bytes).offloaded), None)
        if control is None or _any(line.fails(control, left.pop(control), expected), trial):
            unfit = _somewhere(_unequal(expected, trial.reference(trial.case.resume)), trial)
    if unfit is not None:
        line.answer_all("not judgeable", unfit)
        return
    for column, variant in left.items():
        line.fails(column, variant, expected)


@dataclass(frozen=True)
class _Line:
    """What a rank writes down about one case."""

    trial: Trial
    row: int
    launch: Launch
    out: TextIO
    said: dict[str, str] = field(default_factory=dict)
    """The last word about each variant."""

    @property
    def in_words(self) -> str:
        """Its verdicts, as in `pass`, or `FAIL overlap, FAIL stream`."""
        others = [f"{word} {name}" for name, word in self.said.items() if word != "pass"]
        return ", ".join(others) if len(set(self.said.values())) > 1 else next(iter(self.said.values()))

    def answer(self, variant: Variant, verdict: str, text: str = "", difference: object = None) -> None:
        """A word about one cell; the last one counts."""
        self.said[variant.name] = verdict
        print(json.dumps([self.trial.case.name, variant.name, verdict, text, difference]), file=self.out)

    def answer_all(self, verdict: str, text: str) -> None:
        """The same for every cell."""
        for variant in self.launch.variants:
            self.answer(variant, verdict, text)

    def fails(self, column: int, variant: Variant, expected: Snapshot) -> bool:
        """Run one cell and say whether it fails on this rank."""
        self.answer(variant, "started")
        launch, case = self.launch, self.trial.case
        schedule = variant.schedule(case.chunk_bytes)
        # All paces on every rank, also after a difference: the other ranks may have found none, and go on.
        every = paces(launch.device, launch.world, schedule, self.row, column, launch.quick, case.waits)
        tried = [self.trial.differs(expected, variant, pace) for pace in every]
        found = next((difference for difference in tried if difference is not None), None)
        if found is None:
            self.answer(variant, "pass")
        else:
            self.answer(variant, "FAIL", found.describe(), dataclasses.asdict(found))
        return found is not None


def _not_finite(expected: Snapshot) -> str | None:
    broken = first_not_finite(expected)
    if broken is None:
        return None
    return f"torch.optim.AdamW ends with a {broken} that is not finite, and would equal any other such"


def _unequal(expected: Snapshot, again: Snapshot) -> str | None:
    unequal = first_difference(expected, again)
    return None if unequal is None else f"torch.optim.AdamW against itself: {unequal.describe()}"


def _somewhere(why: str | None, trial: Trial) -> str | None:
    """A reason that any rank has, on every rank: all go the same way, or some would wait for the others."""
    return why or ("see the other ranks" if _any(why is not None, trial) else None)


def _any(here: bool, trial: Trial) -> bool:
    """Whether it is so on any rank."""
    flag = torch.tensor(int(here), device=trial.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
