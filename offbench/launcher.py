"""Start one launch under torchrun, watch it, and leave no process behind whatever happens.

Note [Nothing is left behind]: torchrun puts each rank into a process group of its own, and a compiler may start
helpers that outlive their rank. Every process of a launch inherits OFFBENCH_OUT with the run folder's path, so at the
end all processes that carry it are ended, whoever their parent has become. Should this process be killed outright,
the kernel tells torchrun (parent-death signal), which ends its ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from offbench.config import RunSpec
from offbench.extras import USUAL, Extras
from offbench.failure import signal_with_parent
from offbench.progress import Progress, ProgressTail

POLL_S = 0.1
GRACE_S = 5.0
"""From the polite signal to the one that cannot be refused."""
END_S = 5.0
"""Most time the latter may take to end all that is left."""
DUMP_S = 30.0
"""Most time one stack dump may take."""


@dataclass(frozen=True)
class Exit:
    """How a launch ended, before anyone has read what it wrote."""

    code: int | None
    """torchrun's exit code; None when it was ended from outside."""
    timed_out: bool = False
    interrupted: bool = False
    stacks: dict[str, str] = field(default_factory=dict)
    """On a timeout: `rank r` -> its stacks."""


class Launcher(Protocol):
    """Runs one spec in a folder. The worker's files in that folder are the result."""

    extras: Extras
    """What each launch does after its window."""

    def command(self, spec: RunSpec, folder: Path) -> list[str]:
        """The command line that `launch` runs."""

    def launch(self, spec: RunSpec, folder: Path, timeout_s: float, on_progress: Callable[[Progress], None]) -> Exit:
        """Run it to its end. An interrupt ends the launch and is reported in the Exit, not raised."""


class TorchrunLauncher:
    """One process a rank through `torch.distributed.run`; per-rank logs in the folder."""

    def __init__(self, worker: str = "offbench.worker", env: Mapping[str, str] | None = None) -> None:
        self.worker = worker
        self.env = dict(os.environ if env is None else env)
        self.extras = USUAL

    def command(self, spec: RunSpec, folder: Path) -> list[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = ["--nproc-per-node", str(spec.mode.nproc)]
        logs = ["--log-dir", str(folder / "logs"), "--redirects", "3"]
        return [*launch, *ranks, *logs, "-m", self.worker]

    def launch(self, spec: RunSpec, folder: Path, timeout_s: float, on_progress: Callable[[Progress], None]) -> Exit:
        (folder / "logs").mkdir()
        (folder / "spec.json").write_text(spec.canonical())
        with (folder / "torchrun.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(spec, folder),
                env=launch_env(spec, folder, self.env, self.extras),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - this program has no threads of its own
            )
        try:
            return _watch(process, folder, timeout_s, on_progress)
        except KeyboardInterrupt:
            return Exit(code=None, interrupted=True)
        finally:
            with interrupts_ignored():
                end_all(process, folder)


def launch_env(spec: RunSpec, folder: Path, base: Mapping[str, str], extras: Extras = USUAL) -> dict[str, str]:
    """The launch's environment. OMP_NUM_THREADS is always set, because torchrun sets it for some rank counts only."""
    env = {**base, "OFFBENCH_SPEC": str(folder / "spec.json"), "OFFBENCH_OUT": str(folder)}
    env |= extras.variables(spec.mode.device)
    share = max(1, len(os.sched_getaffinity(0)) // spec.mode.nproc)
    env.setdefault("OMP_NUM_THREADS", str(min(8, share)))
    if spec.mode.device == "cuda":
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the newer and the older name of one setting
        chosen = next((env[name] for name in names if name in env), "expandable_segments:True")
        env |= dict.fromkeys(names, chosen)
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    else:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def _end_with_parent() -> None:
    signal_with_parent(signal.SIGTERM)


def _watch(
    process: subprocess.Popen[bytes], folder: Path, timeout_s: float, on_progress: Callable[[Progress], None]
) -> Exit:
    tail, deadline = ProgressTail(folder / "progress.jsonl"), time.monotonic() + timeout_s
    while True:
        code = process.poll()
        for progress in tail.read():
            on_progress(progress)
        if code is not None:
            return Exit(code=code)
        if time.monotonic() > deadline:
            return Exit(code=None, timed_out=True, stacks=dump_stacks(process.pid, folder))
        time.sleep(POLL_S)


def dump_stacks(torchrun: int, folder: Path) -> dict[str, str]:
    """Stacks of all threads, idle ones too, of every rank that has said its pid; of torchrun when none has."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    pids = {f"rank {rank['rank']}": int(rank["pid"]) for rank in ranks} or {"torchrun": torchrun}
    return {name: _dump(pid) for name, pid in pids.items()}


def _dump(pid: int) -> str:
    tool = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if tool is None:
        return "py-spy is not installed beside this Python"
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"py-spy gave no answer within {DUMP_S:.0f} s"
    return done.stdout if done.returncode == 0 else f"py-spy failed: {done.stderr.strip()}"


def members(folder: Path) -> list[psutil.Process]:
    """Every living process of the launch in that folder, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OFFBENCH_OUT") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End torchrun and everything the launch started: SIGTERM to torchrun, then SIGKILL to whatever is left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    deadline = time.monotonic() + END_S
    while (left := members(folder)) and time.monotonic() < deadline:
        for member in left:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=0.5)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """A second Ctrl-C must not stop the ending of processes half way."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.signal(name, signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
