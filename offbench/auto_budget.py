"""`--state-budget auto`: the least state on the GPU that should hide all copies, as far as there is room for it.

An update needs all gradients, and a layer's next forward its updated parameters, so all of them are needed before
head and loss. With f seconds of clip and the forward up to there, S bytes of state, B of them resident, and r bytes/s
host to device, at least max(0, (S - B) / r - f) are exposed (docs/hiding-copies.md): nothing from B = S - r f on. r
is less while state leaves at the same time: so does whatever may not stay on the device until the backward. Chunks
stay whole, so one more is kept.

Measured in the warm-up, since only the job itself knows: f in its second step, which starts drained, so that no copy
is part of it, less the share of FLOPs of head and loss (nor is AdamW, which runs inside the forward where updates are
deferred: B comes out larger by that); its peak in those after it. Two more steps then settle with the budget in
force. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbench.config import RunSpec
from offbench.estimate import FRAGMENTATION
from offbench.offload.schedule import Schedule
from offbench.record import Link
from offbench.units import gib
from offbench.workload import presets

if TYPE_CHECKING:
    from offbench.device import Device, Stamp
    from offbench.offload import OffloadedAdamW
    from offbench.window import WindowRecorder

TIMED = 1
"""Index of the warm-up step that is timed: the first one compiles."""
SETTLING = 2
"""Warm-up steps that follow with the budget in force."""
LEAST_WARMUP = TIMED + 2 + SETTLING
"""One more for the peak with this arm's own staging, which the timed step does not hold in its forward."""

Tell = Callable[[str], list[str]]
"""Says a text to all processes of the launch; returns what each of them said."""


@dataclass(frozen=True)
class Times:
    """Seconds of one step without copies."""

    arrive: float
    """Clip and the first forward up to head and loss: state must have come in."""
    leave: float
    """From there to the end of the last backward: with `stream` it leaves meanwhile."""


def wanted(
    schedule: Schedule, nbytes: int, chunk_bytes: int, link: Link, times: Times, staged: int | None = None
) -> int:
    """Bytes of state to keep so that, by the bound, no copy of the rest is exposed; at most all `nbytes`.

    chunk_bytes: most state that stays as one, a chunk or a parameter in pieces. staged: what may be staged when the
    forward ends; None: all. With `stream` so much has the link to itself on its way in, if it can leave in the
    backward; the rest comes in while as much leaves, as all of it does with other deferred schedules. Synchronous ones
    hide nothing, so all state is wanted.
    """
    into, out, both = link.in_bytes_per_s or 0.0, link.out_bytes_per_s or 0.0, link.both_bytes_per_s or 0.0
    together = min(into, out, both / 2)
    if not schedule.deferred or not into:
        hidden = 0.0
    elif schedule.write_back == "backward":
        alone = min(into * times.arrive, out * times.leave, nbytes if staged is None else staged)
        hidden = alone + together * (times.arrive - alone / into)
    else:
        hidden = together * times.arrive
    return min(nbytes, max(0, nbytes - int(hidden)) + chunk_bytes)


def spare(limit: int, peak: int) -> int:
    """Bytes that may stay on the device beside a workload that held `peak`, of `limit` that its allocator may hold."""
    return max(0, int(limit * (1 - FRAGMENTATION)) - peak)


@dataclass
class AutoBudget:
    """Measures and sets the budget of one rank. Call `before` ahead of every step."""

    optimizer: OffloadedAdamW
    recorder: WindowRecorder
    device: Device
    link: Link
    tell: Tell
    chosen: int | None = None
    """Bytes that stay on the device."""
    warnings: list[str] = field(default_factory=list)
    loss: float = 0.0
    """Part of the forward that head and loss take."""
    _start: Stamp | None = None

    @staticmethod
    def asked(
        spec: RunSpec, optimizer: OffloadedAdamW, recorder: WindowRecorder, device: Device, link: Link, tell: Tell
    ) -> AutoBudget | None:
        """None unless the spec says auto. Where nobody counts memory, as on a CPU, nothing is kept."""
        if spec.arm.state_budget != "auto":
            return None
        w = spec.workload
        made = AutoBudget(optimizer, recorder, device, link, tell)
        made.loss = presets.find(w.model).loss_share(w.seq_len, w.layers)
        if device.limit() is None:
            made.chosen = 0
            made.warnings.append(f"--state-budget auto: nobody counts memory on a {device.name}, so none is kept")
        return made

    def before(self, step: int) -> None:
        """Step `step` (from 0) is about to begin."""
        if self.chosen is not None:
            return
        if step == TIMED:
            self.optimizer.drain()
            self._start = self.device.stamp()
        elif step == TIMED + 1:  # from here on the peak counts, without what compiling and tuning left behind
            self.optimizer.drain()
            self.device.trim()
            self.device.reset_peaks()
        elif step == self.recorder.warmup - SETTLING:
            self._choose()

    def _choose(self) -> None:
        """All ranks keep as much: what the neediest wants, as far as the fullest has room."""
        self.optimizer.drain()
        sizes = [chunk.home_bytes for chunk in self.optimizer.chunks]
        limit, peak = self.device.limit(), self.device.peak_reserved()
        assert limit is not None
        assert peak is not None
        staged = self.optimizer.staging_bytes
        want = wanted(self.optimizer.schedule, sum(sizes), max(sizes), self.link, self._times(), staged)
        told = [text.split() for text in self.tell(f"{want} {spare(limit, peak)}")]
        want, room = max(int(want) for want, _ in told), min(int(room) for _, room in told)
        self.chosen = min(want, room)
        if room < want:
            self.warnings.append(
                f"--state-budget auto keeps {gib(self.chosen)} GiB of state, all that the GPU has room for; "
                f"{gib(want)} should hide all copies"
            )
        self.device.trim()  # what stays gets memory of its own, instead of holes in what activations will need
        self.optimizer.set_state_budget(self.chosen)

    def _times(self) -> Times:
        marks, seconds = self.recorder.marks(TIMED), self.device.seconds
        assert self._start is not None
        forward = next(stamp for name, stamp in marks if name == "forward")
        backward = [stamp for name, stamp in marks if name == "backward"][-1]
        clip = next(stamp for name, stamp in marks if name == "clip")
        arrive = (1 - self.loss) * seconds(self._start, forward) + seconds(backward, clip)
        return Times(arrive, self.loss * seconds(self._start, forward) + seconds(forward, backward))
