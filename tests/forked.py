"""Launches without torchrun: ranks forked from this process, which has loaded torch already: a second, not seven."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

import offbench.rank  # noqa: F401 - imported here, so that no rank pays for it
from offbench import worker
from offbench.config import RunSpec
from offbench.launcher import Exit, TorchrunLauncher, launch_env
from offbench.progress import Progress, ProgressTail
from offbench.verify.ranks import yield_cores


class ForkedLauncher(TorchrunLauncher):
    """The worker with the files and variables that `TorchrunLauncher` and torchrun give it. The first rank that fails
    ends the others, and none outlives `launch`."""

    def __init__(self, sabotage: Callable[[], None] | None = None) -> None:
        """sabotage: what each rank does first, to break the launch from inside."""
        super().__init__()
        self.sabotage = sabotage

    def launch(self, spec: RunSpec, folder: Path, timeout_s: float, on_progress: Callable[[Progress], None]) -> Exit:
        (folder / "logs").mkdir()
        (folder / "spec.json").write_text(spec.canonical())
        env = launch_env(spec, folder, self.env, self.extras)
        port = socket.create_server(("localhost", 0))
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port.getsockname()[1])}
        env |= {"WORLD_SIZE": str(spec.mode.nproc), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        start = mp.get_context("fork").Process
        ranks = [start(target=_rank, args=(rank, env, folder, self.sabotage)) for rank in range(spec.mode.nproc)]
        deadline = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                rank.start()
            # After the forks, which its thread would not survive: as torchrun's, it outlives every rank.
            store = TCPStore(*port.getsockname(), is_master=True, master_listen_fd=port.detach())
            while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
                assert time.monotonic() < deadline, f"not done after {timeout_s} s"
                time.sleep(0.02)
            del store
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        for progress in ProgressTail(folder / "progress.jsonl").read():
            on_progress(progress)
        return Exit(code=1 if any(rank.exitcode for rank in ranks) else 0)


def _rank(rank: int, env: Mapping[str, str], folder: Path, sabotage: Callable[[], None] | None) -> None:
    gc.freeze()  # or a collection would write to, and thereby copy, all that this process shares with its parent
    with (folder / "logs" / f"{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    warnings.resetwarnings()  # they are errors in tests
    yield_cores()
    if sabotage is not None:
        sabotage()
    sys.exit(worker.main())
