"""Measure your own trainer: a few lines in its loop write the same record as `offbench run`.

    recorder = StepRecorder("results/mine.jsonl", arm="overlap", job={"model": "mine-8b"}, tokens_per_step=131072,
                            optimizer=optimizer)
    for batch in loader:
        recorder.begin()
        loss = model(batch)
        recorder.mark("forward")
        loss.backward()
        recorder.mark("backward")
        norm = clip_grad_norm_(model.parameters(), 1.0)
        recorder.mark("clip")
        recorder.report(loss, norm)
        with recorder.optimizer_step():
            optimizer.step()
        optimizer.zero_grad()
        if recorder.end():
            break
    recorder.finish()

Only begin, report, optimizer_step and end are needed; marks name the phases. `report` belongs before the optimizer's
step, so that its small copy does not queue behind state on its way out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from offbench import bandwidth, environment
from offbench.config import MIB, ArmSpec, Mode, RunSpec, Window
from offbench.device import Device
from offbench.errors import OffbenchError
from offbench.floor import of_launch
from offbench.measure_input import StepOrder, check_settings
from offbench.offload.adamw import OffloadedAdamW
from offbench.offload.hoststore import HostStore
from offbench.offload.layout import local_of
from offbench.planner.ideal import set_ideal
from offbench.record import Host, Link, Moved, RunRecord, SmallCopies, StateAt
from offbench.results_file import ResultsFile
from offbench.small_watch import SmallCopyWatch, worst
from offbench.stats import largest
from offbench.topo import cache as topo_cache
from offbench.topo.shared import shared_machine
from offbench.traffic import TrafficLog, summed
from offbench.window import PhaseName, RankResult, Traffic, WindowRecorder, first_non_finite, gather, window_valid

JobValue = str | int | float | bool | None
PROBE_BYTES = 512 * MIB
"""Half of it is read, half written."""
WATCHED = 2
"""Which step before the window has its small copies watched: not the last, so that the window starts undisturbed, nor
the first, which compiles and has no copies of a step before beside it."""


@dataclass
class _Report:
    """What one rank tells rank 0."""

    result: RankResult
    local_params: int
    link: Link
    traffic: list[Traffic]
    largest_chunk: int
    moved: Moved
    small_copies: SmallCopies | None
    state: StateAt
    state_at_backward_end: int | None
    host: Host
    staging_bytes: int | None
    warnings: list[str]


class StepRecorder:
    """Records one run of a trainer that offbench did not launch.

    results: JSONL file, opened for append on rank 0 at once. arm: what this run is called in tables; `none` makes it
    the baseline of others with the same job. job: whatever describes the job (model, parallelism, batch); runs with
    equal jobs, hardware and versions share a table; `offbench plan --record` reads `layers` and `grad_accum` of it.
    tokens_per_step: of all ranks. optimizer: the optimizer, or all of them; the bytes of each OffloadedAdamW are
    counted and checked, any other is timed only. probe_bytes: host memory pinned after the window, and GPU memory
    taken, to measure what the link carries, which the floor is computed from; 0: no probe, and no floor. Ranks are
    those of the default group. Small copies are counted where the warm-up has three steps or more.
    Raises RecordError when `results` cannot be written, UsageError for what no record can hold and for calls out of
    order.
    """

    def __init__(
        self,
        results: str | os.PathLike[str],
        *,
        arm: str,
        job: Mapping[str, JobValue],
        tokens_per_step: int,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        device: torch.device | None = None,
        warmup: int = 5,
        steps: int = 15,
        probe_bytes: int = PROBE_BYTES,
    ) -> None:
        check_settings(job, tokens_per_step, warmup, steps)
        self._order = StepOrder()
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        self._device = Device.of(device or _current_device())
        self._file = ResultsFile(Path(results)) if self.rank == 0 else None
        self._job = dict(job)
        self._tokens = tokens_per_step
        self._began = datetime.now(UTC)
        self._steps = WindowRecorder(self._device, warmup, steps)
        self._all = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._offloaded = [one for one in self._all if isinstance(one, OffloadedAdamW)]
        self._watch = SmallCopyWatch(self._device) if warmup > WATCHED else None
        self._logs = [TrafficLog(one, self._device) for one in self._offloaded]
        self._probe_bytes = probe_bytes
        kind = self._device.torch_device.type
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))  # torchrun's; without it one host is all there is
        mode = Mode(kind="real", device="cuda" if kind == "cuda" else "cpu", world=self.world, nproc=here)
        self._spec = RunSpec(arm=ArmSpec(name=arm), window=Window(warmup=warmup, steps=steps), mode=mode)
        self._env: dict[str, Any] = {}

    def begin(self) -> None:
        """Start a step."""
        if self._watch is not None and self._steps.done == self._steps.warmup - WATCHED:
            self._watch.open()
        if self._order.begin():
            self._steps.begin()

    def mark(self, phase: PhaseName) -> None:
        """End a phase: `forward`, `backward` or `clip`. Under gradient accumulation each pass marks its own. Outside a
        step, as in an evaluation, it marks nothing."""
        if self._order.mark(phase):
            self._steps.mark(phase)

    def report(self, loss: Tensor, grad_norm: Tensor | None = None, clip_factor: Tensor | None = None) -> None:
        """This step's one-element tensors, still on the device; `end` waits for them, as a trainer that logs does."""
        self._order.report(loss=loss, grad_norm=grad_norm, clip_factor=clip_factor)
        self._steps.report(loss, grad_norm, clip_factor)

    def optimizer_step(self) -> AbstractContextManager[None]:
        """Around optimizer.step(): its host time, and the phase `step`."""
        return self._steps.optimizer_step()

    def end(self) -> bool:
        """End a step; True when the window is complete and `finish` should follow."""
        self._order.end()
        self._steps.end()
        done = self._steps.done
        if self._watch is not None and done == self._steps.warmup - WATCHED + 1:
            self._watch.close()
        if done in (self._steps.warmup, self._steps.total):
            for log in self._logs:
                log.note(done, self._steps.boundary)
        if done == self._steps.warmup:
            self._env = environment.capture(self._device.pci_bus_id)
        return done == self._steps.total

    def finish(self) -> RunRecord | None:
        """Drain, probe the link, gather all ranks' figures (collectives), append the record. Returns it on rank 0,
        else None. Raises UsageError before the window is over."""
        self._order.finish(self._steps.done, self._steps.total)
        self._steps.close(self._drain)
        link, warnings = self._probe()
        reports = self._told(self._report(link, warnings))
        if self._file is None:
            return None
        record = self._record(reports)
        set_ideal(record, self._file.path)
        self._file.append(record)
        self._file.close()
        return record

    def _drain(self) -> None:
        for optimizer in self._offloaded:
            optimizer.drain()

    def _probe(self) -> tuple[Link, list[str]]:
        """What the link carries while all ranks copy; where some rank has no room for that, a line that says so."""
        device = self._device.torch_device
        if device.type == "cpu" or not self._probe_bytes:
            return Link(), []
        store, problem = None, None
        try:
            store = HostStore([self._probe_bytes], pin_for=device)
            torch.empty(self._probe_bytes, dtype=torch.uint8, device=device)  # the probe finds it in the allocator
        except (OffbenchError, torch.OutOfMemoryError) as error:  # the run itself went well: its record must not go
            problem = str(error).splitlines()[0]
        short = [line for line in self._told(problem) if line is not None]
        if store is None or short:
            return Link(), [f"no copy rates, and no floor: {short[0]}"]
        return bandwidth.probe(device, store.chunk(0), together=self._meet), []

    def _told(self, mine: Any) -> list[Any]:
        """What every rank has to say, in rank order."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine)
        return everyone

    def _meet(self) -> None:
        self._told(None)

    def _report(self, link: Link, warnings: list[str]) -> _Report:
        offloaded, logs = self._offloaded, self._logs
        params = [p for one in self._all for group in one.param_groups for p in group["params"] if p.requires_grad]
        places = [one.where() for one in offloaded]
        ends = self._steps.phase_ends("backward")
        at_end = [log.state_at(ends) for log in logs]
        state = {f"{at}_bytes": sum(found.get(at, 0) for found in places) for at in ("device", "host")}
        return _Report(
            result=self._steps.result(),
            local_params=sum(local_of(p).numel() for p in params),
            link=link,
            traffic=[way for log in logs for way in log.traffic()],
            largest_chunk=max((chunk.nbytes for one in offloaded for chunk in one.chunks), default=0),
            moved=summed(
                [log.moved(self._steps.steps, one.copy_repeat) for one, log in zip(offloaded, logs, strict=True)]
            ),
            small_copies=self._watch.figures() if self._watch is not None else None,
            state=StateAt(**state) if offloaded else StateAt(),
            state_at_backward_end=None if None in at_end or not at_end else sum(nbytes or 0 for nbytes in at_end),
            host=Host(
                pinned_requested_bytes=sum(one.store.requested_bytes for one in offloaded) if offloaded else None,
                pinned_locked_bytes=sum(one.store.locked_bytes for one in offloaded) if offloaded else None,
                pin_s=sum(one.store.seconds for one in offloaded) if offloaded else None,
                rss_bytes=psutil.Process().memory_info().rss,
            ),
            staging_bytes=sum(one.staging_peak for one in offloaded) if offloaded else None,
            warnings=warnings,
        )

    def _record(self, reports: list[_Report]) -> RunRecord:
        figures = gather([report.result for report in reports], self._tokens)
        first, bad = reports[0], self._invalid(reports)
        seen = [report.small_copies for report in reports if report.small_copies is not None]
        peak = figures.peak.model_copy(
            update={
                "state_at_backward_end_bytes": largest(report.state_at_backward_end for report in reports),
                "staging_bytes": largest(report.staging_bytes for report in reports),
            }
        )
        link, chunk = bandwidth.worst([report.link for report in reports]), max(r.largest_chunk for r in reports)
        machine = shared_machine(self._spec.mode)
        tree = topo_cache.launch_tree(machine, self._spec.mode.nproc) if machine is not None else None
        return RunRecord(
            run_id=self._spec.run_id,
            started_at=self._began.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - self._began).total_seconds(),
            status="invalid" if bad else "ok",
            reason=bad,
            spec=self._spec,
            job=self._job,
            schedule=asdict(self._offloaded[0].schedule) if len(self._offloaded) == len(self._all) == 1 else None,
            tokens_per_step=self._tokens,
            **{**vars(figures), "peak": peak},
            moved=first.moved,
            small_copies=worst(seen) if seen else None,
            state=first.state,
            host=Host(
                **{
                    name: largest(getattr(report.host, name) for report in reports)
                    for name in ("pinned_requested_bytes", "pinned_locked_bytes", "pin_s", "rss_bytes")
                }
            ),
            link=link,
            floor=of_launch(first.moved, link, tree, chunk or None),
            adamw=self._offloaded[0].implementation if self._offloaded else None,
            local_params=max(report.local_params for report in reports),
            chunks=sum(len(one.chunks) for one in self._offloaded) if self._offloaded else None,
            warnings=sorted({warning for report in reports for warning in report.warnings}),
            env=self._env | {"machine": topo_cache.identity(machine) if machine is not None else None},
        )

    def _invalid(self, reports: list[_Report]) -> str | None:
        if found := first_non_finite([report.result for report in reports]):
            return f"finite: {found}"
        for rank, report in enumerate(reports):
            chunk = report.largest_chunk
            if found := window_valid(report.traffic, self._steps.steps, chunk, in_flight_slack=chunk):
                return f"window: rank {rank}: {found}"
        return None


def _current_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
