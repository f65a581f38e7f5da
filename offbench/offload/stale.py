"""Debug mode: parameters are NaN until their deferred update, so that a reader which nobody made wait is found out."""

from __future__ import annotations

import dataclasses

import torch

from offbench.offload.engine import Work
from offbench.offload.staged import Staged
from offbench.offload.streams import Streams


def hidden(work: Work, streams: Streams) -> Work:
    """The same work, its parameters put away and NaN until it runs, which puts them back first.

    Call it on the compute stream before the step is queued: every update waits for what compute has done by then.
    Takes as much device memory as the parameters, until the update has run.
    """
    kept = [torch.empty_like(parameter) for parameter in work.parameters]

    @torch.no_grad()
    def put_away() -> None:
        for copy, parameter in zip(kept, work.parameters, strict=True):
            copy.copy_(parameter)
            parameter.fill_(torch.nan)

    @torch.no_grad()
    def update(state: Staged) -> None:
        for copy, parameter in zip(kept, work.parameters, strict=True):
            parameter.copy_(copy)
        work.update(state)

    streams.compute().run(put_away, writes=streams.accesses((*kept, *work.parameters)))
    # With the gradients, since those are kept until the update has run.
    return dataclasses.replace(work, update=update, gradients=[*work.gradients, *kept], calls=None)
