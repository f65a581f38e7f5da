"""A process that is rank 0 of two, alone: it rehearses the job, on the CPU (forked) or on a CUDA device (spawned)."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch._dynamo  # imported here, so that no forked child pays for it
import torch.distributed as dist
import torch.distributed.fsdp
import torch.multiprocessing as mp

from offbench.workload.rehearsal import init_rehearsal

WORLD = 2
"""On a mesh of several ranks FSDP2 reads parameters on streams of its own."""


class Alone:
    """Runs functions of a device, one after the other, in one process: starting CUDA costs more than most of them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        context: Any = mp.get_context("fork" if kind == "cpu" else "spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, kind), daemon=True)
        self._process.start()
        there.close()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(device, *arguments)`; what it raises fails the test."""
        self._here.send((function, arguments))
        result, failure = self._here.recv()
        if failure is not None:
            pytest.fail(failure)
        return result

    def close(self) -> None:
        """End the process."""
        self._here.send(None)
        self._process.join()


def _serve(there: Connection, kind: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind)
    if kind == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products; read when CUDA starts
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    init_rehearsal(0, WORLD)
    while (request := there.recv()) is not None:
        function, arguments = request
        try:
            answer = function(device, *arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        there.send(answer)
    dist.destroy_process_group()
