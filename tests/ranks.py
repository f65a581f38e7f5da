"""Run a function on a few ranks of a gloo group, each a forked process: a tenth of a second instead of a torchrun."""

from __future__ import annotations

import datetime
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported here, so that no child pays for it
import torch.distributed as dist
import torch.distributed.fsdp
import torch.multiprocessing as mp

from offbench.verify.ranks import yield_cores


def _child(rank: int, function: Callable[..., Any], world: int, folder: str, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # or a collection would write to, and thereby copy, all that this process shares with its parent
    torch.set_num_threads(1)
    yield_cores()
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    try:
        torch.save(function(rank, *arguments), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` on each of `world` ranks; their results in rank order.

    Never after CUDA was initialised in this process: a fork cannot use it again.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_child, (function, world, folder, arguments), nprocs=world, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
