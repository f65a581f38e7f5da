"""The measured window of one rank, and the figures of a launch from the results of its ranks.

Time is taken between stamps on the compute stream. The boundary after step k is the boundary before step k + 1, so
the per-step seconds add up to the window and nothing between two steps is lost. The host waits for the loss of every
step at the end of that step, as trainers do, and never for the whole device.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from offbench.device import Device, ScalarReader, Stamp
from offbench.offload.readback import Way
from offbench.record import Peak, Phases, StepRow
from offbench.stats import largest, mean_of_last, median

if TYPE_CHECKING:
    from torch import Tensor

PhaseName = Literal["forward", "backward", "clip", "step"]


@dataclass(frozen=True)
class Scalars:
    """What one step reported; None where the step has no such figure."""

    loss: float | None
    grad_norm: float | None
    """Global norm before clipping."""
    clip_factor: float | None


@dataclass(frozen=True)
class RankResult:
    """What one rank measured. Times are seconds on the compute stream unless said otherwise."""

    warmup: int
    step_s: list[float]
    """Each window step, from boundary to boundary."""
    window_s: float
    """From the boundary before the first window step to the one after the last."""
    drained_s: float
    """From the boundary before the first window step, where copies may be in flight, since a drain there would
    disturb the arm, to the end of the closing drain."""
    tail_s: float
    """From the boundary after the last step to the end of the closing drain."""
    first_step_s: float
    """The first step of all, compilation included."""
    phase_s: dict[str, float]
    """Mean over the window steps, per phase."""
    host_in_step_s: float | None
    """Host clock inside optimizer.step(), mean over the window steps."""
    scalars: list[Scalars]
    """Every step, warm-up first."""
    peak: Peak
    """Bytes on this rank; fields that this module does not measure are None."""


class WindowRecorder:
    """Records `warmup` + `steps` steps. In each, in order: begin, mark("forward"), mark("backward"), mark("clip"),
    report, optimizer_step, end. Under gradient accumulation the first two marks alternate and each phase adds up.
    After the last step: close(drain), then result()."""

    def __init__(self, device: Device, warmup: int, steps: int, readbacks: Way = "copy") -> None:
        self.device = device
        self.warmup = warmup
        self.steps = steps
        self.done = 0
        """Steps ended so far."""
        self._reader = ScalarReader(device, most=3, way=readbacks)
        self._reported: tuple[bool, ...] = ()
        self._boundaries: list[Stamp] = []
        self._marks: list[list[tuple[PhaseName, Stamp]]] = []
        self._losses: list[tuple[int, Stamp]] = []
        """When the last part of a forward began: the step, from 0, and the stamp."""
        self._host_in_step_s: list[float] = []
        self._scalars: list[Scalars] = []
        self._first_peaks: dict[str, int | None] = {}
        self._steady_peaks: dict[str, int | None] = {}
        self._used: int | None = None
        self._retries: int | None = None
        """Of the allocator: before the window those so far, after it those in it."""
        self._drained: Stamp | None = None

    @property
    def total(self) -> int:
        """Steps to run, warm-up included."""
        return self.warmup + self.steps

    @property
    def at_window_start(self) -> bool:
        """Between the last warm-up step and the first window step: the time to read counters."""
        return self.done == self.warmup and len(self._marks) == self.done

    @property
    def boundary(self) -> Stamp:
        """The stamp after the last ended step."""
        return self._boundaries[-1]

    def phase_ends(self, phase: PhaseName) -> list[Stamp]:
        """The stamps that end `phase` in the window, in order; under gradient accumulation several a step."""
        return [stamp for marks in self._marks[self.warmup :] for name, stamp in marks if name == phase]

    def marks(self, step: int) -> list[tuple[PhaseName, Stamp]]:
        """Phases of that step (from 0, warm-up counted) with the stamps that end them."""
        return self._marks[step]

    def finished_step_s(self) -> float | None:
        """Seconds of the last step that is surely over, without a wait: for a progress display."""
        if self.done < 2:
            return None
        return self.device.seconds(self._boundaries[-3], self._boundaries[-2])

    def begin(self) -> None:
        """Start a step. The first call sets the first boundary; later steps start where the last one ended."""
        if not self._boundaries:
            self._boundaries.append(self.device.stamp())
        self._marks.append([])

    def mark(self, phase: PhaseName) -> None:
        """End `phase`: what the compute stream did since the last mark, or since the boundary, belongs to it."""
        self._marks[-1].append((phase, self.device.stamp()))

    def loss_begins(self) -> None:
        """Behind the last layer, before the head: what follows up to mark("forward") is told on its own, too."""
        self._losses.append((len(self._marks) - 1, self.device.stamp()))

    def report(self, loss: Tensor, grad_norm: Tensor | None, clip_factor: Tensor | None) -> None:
        """Queue the step's scalars (one-element tensors on the device) for `end` to read.

        Call it after clipping and before optimizer.step(): the small copy then goes ahead of an arm's bulk
        write-back instead of queueing behind it on the same copy engine.
        """
        values = (loss, grad_norm, clip_factor)
        self._reported = tuple(value is not None for value in values)
        self._reader.send([value for value in values if value is not None])

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Around optimizer.step(): take the host's time inside it and mark the phase `step`."""
        start = time.perf_counter()
        yield
        self._host_in_step_s.append(time.perf_counter() - start)
        self.mark("step")

    def end(self) -> Scalars:
        """Set the boundary after this step, wait for the step's scalars and return them.

        The wait keeps the host less than one step ahead of the device. Peaks are read after the first and the last
        step, and reset after the first and where the window starts.
        """
        self._boundaries.append(self.device.stamp())
        values = iter(self._reader.read())
        scalars = Scalars(*(next(values) if sent else None for sent in self._reported))
        self._scalars.append(scalars)
        self.done += 1
        if self.done == 1:
            self._first_peaks = self._peaks("first_step")
        if self.done in (1, self.warmup):
            self.device.reset_peaks()
        if self.done == self.warmup:
            self._retries = self.device.alloc_retries()
        if self.done == self.total:
            self._steady_peaks = self._peaks("steady")
            self._used = self.device.used()
            after = self.device.alloc_retries()
            self._retries = None if after is None or self._retries is None else after - self._retries
        return scalars

    def close(self, drain: Callable[[], None]) -> None:
        """Right after the last step: run `drain`, which leaves nothing of the optimizer in flight, and time it. The
        device-wide wait, outside the window, lets the tail count what `drain` only queued."""
        if self.done != self.total:
            raise RuntimeError(f"the window is not over: {self.done} of {self.total} steps")
        drain()
        self.device.synchronize()
        self._drained = self.device.stamp()

    def result(self) -> RankResult:
        """This rank's figures; call it after `close`."""
        if self._drained is None:
            raise RuntimeError("close the recorder before asking for its result")
        window, host = self._boundaries[self.warmup :], self._host_in_step_s[-self.steps :]
        first, last, seconds = window[0], window[-1], self.device.seconds
        return RankResult(
            warmup=self.warmup,
            step_s=[seconds(a, b) for a, b in pairwise(window)],
            window_s=seconds(first, last),
            drained_s=seconds(first, self._drained),
            tail_s=seconds(last, self._drained),
            first_step_s=seconds(self._boundaries[0], self._boundaries[1]),
            phase_s=self._phase_means(),
            host_in_step_s=statistics.fmean(host) if host else None,
            scalars=self._scalars,
            peak=Peak(
                **self._first_peaks,
                **self._steady_peaks,
                device_used_bytes=self._used,
                alloc_retries=self._retries,
            ),
        )

    def _peaks(self, when: str) -> dict[str, int | None]:
        allocated, reserved = self.device.peak_allocated(), self.device.peak_reserved()
        return {f"{when}_allocated_bytes": allocated, f"{when}_reserved_bytes": reserved}

    def _phase_means(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for step in range(self.warmup, self.total):
            before = self._boundaries[step]
            for phase, stamp in self._marks[step]:
                total[phase] += self.device.seconds(before, stamp)
                before = stamp
        return {phase: seconds / self.steps for phase, seconds in (total | self._loss()).items()}

    def _loss(self) -> dict[str, float]:
        """All of it in the window, where every forward told when it began; it is a part of the forward."""
        ends, begins = self.phase_ends("forward"), [stamp for step, stamp in self._losses if step >= self.warmup]
        if not begins or len(begins) != len(ends):
            return {}
        return {"loss": sum(self.device.seconds(one, other) for one, other in zip(begins, ends, strict=True))}


@dataclass(frozen=True)
class Figures:
    """The launch's figures: field for field the timing part of `offbench.record.RunRecord`, so `**vars(figures)`."""

    step_s: float
    median_step_s: float | None
    last10_step_s: float | None
    drained_step_s: float
    tail_s: float
    tok_s: float
    """Tokens of all ranks per second."""
    first_step_s: float
    warmup_steps: list[StepRow]
    steps: list[StepRow]
    phases_s: Phases
    peak: Peak


def gather(results: Sequence[RankResult], tokens_per_step: int) -> Figures:
    """Figures of a launch from its ranks (at least one, the same window on all); seconds and bytes.

    Times and peaks are the largest over ranks: `step_s` of the ranks' whole windows, per-step values step by step;
    median and mean of the last 10 are those of the per-step values. The loss is the mean over ranks, which hold
    equally many tokens; norm and clip factor are the first rank's, being global.
    """
    steps = len(results[0].step_s)
    step_s = max(result.window_s for result in results) / steps
    per_step = [max(times) for times in zip(*(result.step_s for result in results), strict=True)]
    return Figures(
        step_s=step_s,
        median_step_s=median(per_step),
        last10_step_s=mean_of_last(per_step),
        drained_step_s=max(result.drained_s for result in results) / steps,
        tail_s=max(result.tail_s for result in results),
        tok_s=tokens_per_step / step_s,
        first_step_s=max(result.first_step_s for result in results),
        warmup_steps=[_step_row(results, i, None) for i in range(results[0].warmup)],
        steps=[_step_row(results, results[0].warmup + i, seconds) for i, seconds in enumerate(per_step)],
        phases_s=Phases(
            **{phase: largest(r.phase_s.get(phase) for r in results) for phase in Phases.model_fields}
            | {"host_in_step": largest(r.host_in_step_s for r in results)}
        ),
        peak=Peak(**{field: largest(getattr(r.peak, field) for r in results) for field in Peak.model_fields}),
    )


def _step_row(results: Sequence[RankResult], index: int, seconds: float | None) -> StepRow:
    """The step of that index, warm-up counted."""
    of_rank = [result.scalars[index] for result in results]
    losses = [scalars.loss for scalars in of_rank if scalars.loss is not None]
    return StepRow(
        step_s=seconds,
        loss=statistics.fmean(losses) if losses else None,
        grad_norm=of_rank[0].grad_norm,
        clip_factor=of_rank[0].clip_factor,
    )


def first_non_finite(results: Sequence[RankResult]) -> str | None:
    """Where a loss or gradient norm first was not finite, warm-up included; None when all were."""
    for step in range(len(results[0].scalars)):
        for rank, result in enumerate(results):
            for name in ("loss", "grad_norm"):
                value = getattr(result.scalars[step], name)
                if value is not None and not math.isfinite(value):
                    return f"{name} is {value} in step {step + 1} (warm-up counted) on rank {rank}"
    return None


@dataclass(frozen=True)
class Traffic:
    """Bytes of one direction as the engine counted them at the window's two ends; payload, without repeats."""

    direction: Literal["in", "out"]
    completed_at_start: int
    completed_at_end: int
    in_flight_at_start: int
    """Queued, not yet completed."""
    in_flight_at_end: int
    planned_per_step: int


def window_valid(traffic: Iterable[Traffic], steps: int, chunk_bytes: int, in_flight_slack: int = 0) -> str | None:
    """Whether the window saw all the copies of its steps: None when it did, else what is wrong, in one line.

    Per direction the bytes completed inside the window must equal `steps` x plan within one chunk (`chunk_bytes`,
    the largest chunk), and no more than `in_flight_slack` bytes above those in flight at its start may be in flight
    at its end: an arm must not look fast by leaving its copies for later. The other way round, what was in flight at
    the start and no longer is at the end was one more thing to do in the window, and is allowed.
    """
    for way in traffic:
        moved, planned = way.completed_at_end - way.completed_at_start, steps * way.planned_per_step
        caught_up = max(0, way.in_flight_at_start - way.in_flight_at_end)
        if not -chunk_bytes <= moved - planned <= chunk_bytes + caught_up:
            return (
                f"{way.direction}: {moved} bytes completed in the window, planned {planned} "
                f"({steps} steps x {way.planned_per_step}), off by more than a chunk of {chunk_bytes}"
            )
        if way.in_flight_at_end > way.in_flight_at_start + in_flight_slack:
            at_end, at_start = way.in_flight_at_end, way.in_flight_at_start
            return f"{way.direction}: {at_end} bytes in flight at the end of the window, {at_start} at its start"
    return None
