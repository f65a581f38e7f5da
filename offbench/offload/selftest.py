"""Does this torch's FSDP2 wait for deferred updates? Asked once, by value, on versions nobody has checked.

A small module is sharded over the model's own mesh. Its parameter is wrong until an update, queued late on a slow side
stream from inside the gather, makes it right; the forward then shows whether the gather waited. All ranks of the mesh
must take part, as they do when all of them construct the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from offbench.offload.fsdp import ReadGuard, UnknownFSDP
from offbench.offload.layout import local_of
from offbench.offload.streams import Event, Streams, Why

CHECKED = ("2.11.", "2.15.")
"""torch versions on which the test suite runs."""
_WIDTH, _DELAY = 512, 64


def is_checked(version: str) -> bool:
    """Whether the tests ran on this torch version."""
    return version.startswith(CHECKED)


@torch.no_grad()
def gathers_wait(mesh: DeviceMesh, device: torch.device, streams: Streams) -> str | None:
    """None when a forward sees the update that its gather must wait for, else what went wrong."""
    try:
        module = nn.Linear(_WIDTH, _WIDTH, bias=False, device=device)
        fully_shard(module, mesh=mesh)
        parameter = next(module.parameters())
        local_of(parameter).zero_()
        busy = torch.ones(_WIDTH, _WIDTH, device=device)
        side = streams.side("update")

        def update() -> None:
            for _ in range(_DELAY):  # long enough for a gather that does not wait to have read zeros
                busy.copy_(busy @ busy).clamp_(max=1)
            local_of(parameter).fill_(1)

        asked: list[int] = []

        def before_read(chunks: Sequence[int], look_ahead: bool) -> list[Event]:
            asked.extend(chunks)
            side.run(update)
            return [side.record()]

        side.wait(streams.compute().record(), Why.ARENA_READY)
        guard = ReadGuard(module, {parameter: 0}, before_read, lambda: None, streams)
        seen = float(module(torch.ones(1, _WIDTH, device=device)).min())
        guard.restore()
    except (UnknownFSDP, AttributeError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if not asked:
        return "a gather did not ask for its updates"
    return None if seen == _WIDTH else f"a gather read parameters before their update ({seen} instead of {_WIDTH})"
