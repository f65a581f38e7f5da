"""Debug mode: parameters are NaN until their deferred update, so that a reader which nobody made wait is found out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from offbench.offload.engine import Engine, Work
from offbench.offload.staged import Staged
from offbench.offload.streams import Streams, Why


def step(engine: Engine, works: Sequence[Work], streams: Streams) -> None:
    """`engine.step(works)` with all their parameters hidden. Updates that no forward has asked for yet come first, for
    they change parameters, too. A step that fails before it is queued changes none."""
    compute = streams.compute()
    for event in engine.before_read(range(len(engine.chunks)), look_ahead=False):
        compute.wait(event, Why.READ)
    hidden = Hidden(streams)
    try:
        engine.step([hidden.hide(work) for work in works])
    except BaseException:
        hidden.put_back()
        raise


class Hidden:
    """The parameters of one step, put away and NaN until each one's update runs, which puts it back first."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._away: list[tuple[Work, list[torch.Tensor]]] = []

    def hide(self, work: Work) -> Work:
        """The same work, its parameters hidden until it runs.

        Call it on the compute stream before the step is queued: every update waits for what compute has done by then.
        Takes as much device memory as the parameters, until the update has run.
        """
        kept = [torch.empty_like(parameter) for parameter in work.parameters]
        away = (work, kept)

        @torch.no_grad()
        def put_away() -> None:
            for copy, parameter in zip(kept, work.parameters, strict=True):
                copy.copy_(parameter)
                parameter.fill_(torch.nan)

        @torch.no_grad()
        def update(state: Staged) -> None:
            self._away = [other for other in self._away if other is not away]
            _put_back(work, kept)
            work.update(state)

        self._away.append(away)
        self._streams.compute().run(put_away, writes=self._streams.accesses((*kept, *work.parameters)))
        # With the gradients, since those are kept until the update has run.
        return dataclasses.replace(work, update=update, gradients=[*work.gradients, *kept], calls=None)

    def put_back(self) -> None:
        """The step failed before it was queued: parameters are what they were."""
        for work, kept in self._away:
            accesses = self._streams.accesses
            put_back = partial(_put_back, work, kept)
            self._streams.compute().run(put_back, reads=accesses(kept), writes=accesses(work.parameters))
        self._away = []


@torch.no_grad()
def _put_back(work: Work, kept: Sequence[torch.Tensor]) -> None:
    for copy, parameter in zip(kept, work.parameters, strict=True):
        parameter.copy_(copy)
