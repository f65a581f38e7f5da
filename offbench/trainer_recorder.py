"""Measure your own trainer: a few lines in its loop write the same record as `offbench run`.

    recorder = TrainerRecorder("results/mine.jsonl", arm="overlap", job={"model": "mine-8b"}, tokens_per_step=131072,
                               optimizer=optimizer)
    for batch in loader:
        recorder.begin()
        loss = model(batch)
        recorder.mark("forward")
        loss.backward()
        recorder.mark("backward")
        norm = clip_grad_norm_(model.parameters(), 1.0)
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
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from offbench import environment
from offbench.config import ArmSpec, Mode, RunSpec, Window
from offbench.device import Device
from offbench.measure import PhaseName, RankResult, StepRecorder, Traffic, first_non_finite, gather, window_valid
from offbench.offload.adamw import OffloadedAdamW
from offbench.record import Host, Moved, RunRecord, StateAt
from offbench.results_file import ResultsFile
from offbench.traffic import TrafficLog

JobValue = str | int | float | bool | None


class TrainerRecorder:
    """Records one run of a trainer that offbench did not launch.

    results: JSONL file, opened for append on rank 0 at once. arm: what this run is called in tables; `none` makes it
    the baseline of others with the same job. job: whatever describes the job (model, parallelism, batch); runs with
    equal jobs, hardware and versions share a table. tokens_per_step: of all ranks. optimizer: an OffloadedAdamW, whose
    bytes are then counted and checked; any other optimizer is timed only. Ranks are those of the default group.
    Raises RecordError when `results` cannot be written.
    """

    def __init__(
        self,
        results: str | os.PathLike[str],
        *,
        arm: str,
        job: Mapping[str, JobValue],
        tokens_per_step: int,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        warmup: int = 5,
        steps: int = 15,
    ) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        self._device = Device.of(device or _current_device())
        self._file = ResultsFile(Path(results)) if self.rank == 0 else None
        self._job = dict(job)
        self._tokens = tokens_per_step
        self._began = datetime.now(UTC)
        self._steps = StepRecorder(self._device, warmup, steps)
        offloaded = optimizer if isinstance(optimizer, OffloadedAdamW) else None
        self._optimizer = offloaded
        self._log = TrafficLog(offloaded, self._device) if offloaded is not None else None
        kind = self._device.torch_device.type
        mode = Mode(kind="real", device="cuda" if kind == "cuda" else "cpu", world=self.world, nproc=self.world)
        self._spec = RunSpec(arm=ArmSpec(name=arm), window=Window(warmup=warmup, steps=steps), mode=mode)
        self._env: dict[str, Any] = {}

    def begin(self) -> None:
        """Start a step."""
        self._steps.begin()

    def mark(self, phase: PhaseName) -> None:
        """End a phase: `forward`, `backward` or `clip`."""
        self._steps.mark(phase)

    def report(self, loss: Tensor, grad_norm: Tensor | None = None, clip_factor: Tensor | None = None) -> None:
        """This step's one-element tensors, still on the device; `end` waits for them, as a trainer that logs does."""
        self._steps.report(loss, grad_norm, clip_factor)

    def optimizer_step(self) -> AbstractContextManager[None]:
        """Around optimizer.step(): its host time, and the phase `step`."""
        return self._steps.optimizer_step()

    def end(self) -> bool:
        """End a step; True when the window is complete and `finish` should follow."""
        self._steps.end()
        done = self._steps.done
        if self._log is not None and done in (self._steps.warmup, self._steps.total):
            self._log.note(done, self._steps.boundary)
        if done == self._steps.warmup:
            self._env = environment.capture(self._device.pci_bus_id)
        return done == self._steps.total

    def finish(self) -> RunRecord | None:
        """Drain, gather all ranks' figures (a collective), append the record. Returns it on rank 0, else None."""
        self._steps.close(self._optimizer.drain if self._optimizer is not None else lambda: None)
        mine = self._report()
        reports: list[Any] = [mine]
        if self.world > 1:
            reports = [None] * self.world
            dist.all_gather_object(reports, mine)
        if self._file is None:
            return None
        record = self._record(reports)
        self._file.append(record)
        self._file.close()
        return record

    def _report(self) -> dict[str, Any]:
        optimizer, log = self._optimizer, self._log
        found: dict[str, Any] = {
            "result": self._steps.result(),
            "rss": psutil.Process().memory_info().rss,
            "traffic": [],
            "largest_chunk": 0,
            "moved": None,
            "state_at_backward_end": None,
        }
        if optimizer is not None and log is not None:
            found |= {
                "traffic": log.traffic(),
                "largest_chunk": max(chunk.nbytes for chunk in optimizer.chunks),
                "moved": log.moved(self._steps.steps, optimizer.copy_repeat),
                "state_at_backward_end": log.state_at(self._steps.phase_ends("backward")),
                "state": StateAt(**{f"{place}_bytes": nbytes for place, nbytes in optimizer.where().items()}),
                "pinned": optimizer.store.requested_bytes,
                "locked": optimizer.store.locked_bytes,
                "pin_s": optimizer.store.seconds,
                "staging": optimizer.staging_peak,
            }
        return found

    def _record(self, reports: list[dict[str, Any]]) -> RunRecord:
        results: list[RankResult] = [report["result"] for report in reports]
        figures = gather(results, self._tokens)
        first = reports[0]
        bad = self._invalid(reports, results)
        peak = figures.peak.model_copy(
            update={
                "state_at_backward_end_bytes": first["state_at_backward_end"],
                "staging_bytes": first.get("staging"),
            }
        )
        return RunRecord(
            run_id=self._spec.run_id,
            started_at=self._began.isoformat(timespec="seconds"),
            duration_s=(datetime.now(UTC) - self._began).total_seconds(),
            status="invalid" if bad else "ok",
            reason=bad,
            spec=self._spec,
            job=self._job,
            tokens_per_step=self._tokens,
            **{**vars(figures), "peak": peak},
            moved=first["moved"] or Moved(),
            state=first.get("state", StateAt()),
            host=Host(
                rss_bytes=max(report["rss"] for report in reports),
                pinned_requested_bytes=first.get("pinned"),
                pinned_locked_bytes=first.get("locked"),
                pin_s=first.get("pin_s"),
            ),
            adamw=self._optimizer.implementation if self._optimizer is not None else None,
            chunks=len(self._optimizer.chunks) if self._optimizer is not None else None,
            env=self._env,
        )

    def _invalid(self, reports: list[dict[str, Any]], results: list[RankResult]) -> str | None:
        if found := first_non_finite(results):
            return f"finite: {found}"
        for rank, report in enumerate(reports):
            traffic: list[Traffic] = report["traffic"]
            chunk: int = report["largest_chunk"]
            if found := window_valid(traffic, self._steps.steps, chunk, in_flight_slack=chunk):
                return f"window: rank {rank}: {found}"
        return None


def _current_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
