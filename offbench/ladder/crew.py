"""One process per GPU for the measurement ladder, started bound, told what to copy through files in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from offbench.errors import OffbenchError
from offbench.failure import write_json
from offbench.ladder.plan import SETTLE_S, Rung, Sample
from offbench.topology.model import Gpu, Machine, NumaNode, PageBytes

REGION_BYTES = 2 << 30
"""Host memory per direction and GPU: a smaller region is copied faster than a long stream ever is (caches)."""
PIECE_BYTES = 256 << 20
LEAD_S = 0.1
"""From writing a rung's file to its start: every process has read it by then."""
START_TIMEOUT_S = 300.0
RUNG_TIMEOUT_S = 120.0


def region_bytes(available: int, gpus: int, remote: bool, piece_bytes: int = PIECE_BYTES, nodes: int = 0) -> int:
    """Bytes per direction and GPU: 2 GiB, or less where the buffers would take over half of the available memory.

    nodes: how many nodes one GPU has buffers on, beside its own. Always whole pieces. Raises OffbenchError when not
    even one piece fits.
    """
    buffers = gpus * (4 if remote else 2) + 2 * max(0, nodes - 1)
    size = min(REGION_BYTES, available // 2 // buffers) // piece_bytes * piece_bytes
    if size < piece_bytes:
        raise OffbenchError(
            f"measuring needs {buffers} buffers of {piece_bytes >> 20} MiB and as much again to spare; "
            f"{available >> 20} MiB of host memory are available"
        )
    return size


def remote_node(machine: Machine, gpu: Gpu) -> NumaNode | None:
    """The node for a GPU's remote buffers: the first usable one on another package, else on another node."""
    usable = [node for node in machine.nodes if node.kind == "cpu" and node.cpus_allowed and node.id != gpu.numa.value]
    return min(usable, key=lambda node: (node.package == gpu.package, node.id), default=None)


def task_of(
    machine: Machine, device: Literal["cuda", "cpu"], region: int, piece: int, remote: bool, nodes: Sequence[int] = ()
) -> dict[str, Any]:
    """What the processes must know, as they read it from task.json. nodes: those of the `node` rungs of the first
    GPU."""
    cpus = {node.id: list(node.cpus_allowed) for node in machine.nodes}
    gpus = {}
    for gpu in machine.gpus:
        other = remote_node(machine, gpu) if remote else None
        gpus[str(gpu.index)] = {
            "bdf": gpu.bdf,
            "mig_parent": gpu.mig_parent,
            "node": gpu.numa.value,
            "remote_node": other.id if other else None,
            "remote_cpus": list(other.cpus_allowed) if other else [],
            "others": [[node, cpus[node]] for node in nodes] if gpu is machine.gpus[0] else [],
        }
    return {"device": device, "region_bytes": region, "piece_bytes": piece, "gpus": gpus}


def worker_env(gpu: Gpu, base: Mapping[str, str]) -> dict[str, str]:
    """The process sees its own GPU only, named by UUID where that is known, so that no ordinal can be mistaken."""
    env = {**base, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    env.setdefault("OMP_NUM_THREADS", "1")
    if gpu.uuid is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu.uuid
    elif gpu.cuda_ordinal is not None:
        listed = [item for item in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
        env["CUDA_VISIBLE_DEVICES"] = listed[gpu.cuda_ordinal] if listed else str(gpu.cuda_ordinal)
        env["CUDA_DEVICE_ORDER"] = base.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    else:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu.index)
    return env


class ProcessCrew:
    """Starts the processes on entry and ends them on exit, whatever happened in between."""

    def __init__(self, machine: Machine, folder: Path, task: dict[str, Any]) -> None:
        self._machine, self._folder, self._task = machine, folder, task
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._number = 0
        self.warnings: list[str] = []

    def __enter__(self) -> ProcessCrew:
        write_json(self._folder / "task.json", self._task)
        try:
            for gpu in self._machine.gpus:
                with (self._folder / f"log-{gpu.index}.txt").open("wb") as log:
                    self._processes[gpu.index] = subprocess.Popen(
                        [sys.executable, "-m", "offbench.ladder.worker", str(self._folder), str(gpu.index)],
                        env=worker_env(gpu, os.environ),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
            for gpu in self._machine.gpus:
                self._note_start(gpu, self._wait(f"ready-{gpu.index}.json", gpu.index, START_TIMEOUT_S))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, rung: Rung) -> list[Sample]:
        """One repeat of a rung. Raises OffbenchError when a process ended or gives no answer in time."""
        number, self._number = self._number, self._number + 1
        order = {
            "gpus": rung.gpus,
            "ways": ["in", "out"] if rung.direction == "both" else [rung.direction],
            "buffers": rung.buffers,
            "window_s": rung.window_s,
            "each_way_bytes": rung.each_way_bytes,
            "start": time.monotonic() + LEAD_S,
        }
        write_json(self._folder / f"rung-{number}.json", order)
        limit = LEAD_S + SETTLE_S + rung.window_s + RUNG_TIMEOUT_S
        answers = {gpu: self._wait(f"done-{number}-{gpu}.json", gpu, limit) for gpu in rung.gpus}
        return [Sample(gpu, **answer) for gpu, answer in answers.items()]

    def _wait(self, name: str, gpu: int, timeout_s: float) -> dict[str, Any]:
        """The content of a file that the process of that GPU writes."""
        path, deadline = self._folder / name, time.monotonic() + timeout_s
        while not path.exists():
            for other, process in self._processes.items():
                if process.poll() is not None:
                    raise OffbenchError(f"the copy process of GPU {other} ended: {self._last_words(other)}")
            if time.monotonic() > deadline:
                raise OffbenchError(f"the copy process of GPU {gpu} gave no answer within {timeout_s:.0f} s")
            time.sleep(2e-3)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _last_words(self, gpu: int) -> str:
        lines = (self._folder / f"log-{gpu}.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._processes[gpu].returncode}, and it said nothing"

    def _note_start(self, gpu: Gpu, ready: dict[str, Any]) -> None:
        if ready["numa"].startswith("refused"):
            self.warnings.append(f"GPU {gpu.index}: not bound to its NUMA node ({ready['numa'].partition(': ')[2]})")
        for buffers in ("local", "remote"):
            place = ready["placement"].get(buffers)
            found = PageBytes() if place is None else PageBytes(**place)
            seen = found.total - found.unknown_bytes
            there = found.local_bytes if buffers == "local" else seen - found.local_bytes
            if seen and there < 0.99 * seen:
                where = "its own" if buffers == "local" else "the other"
                text = f"GPU {gpu.index}: only {there / seen:.0%} of its {buffers} buffers are on {where} NUMA node"
                self.warnings.append(text)

    def _end(self) -> None:
        (self._folder / "stop").touch()
        for process in self._processes.values():
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
