"""What every engine does with a chunk: copy it in, update it, copy it out, and enter it in the books."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch

from offbench.errors import OffbenchError
from offbench.offload import meanwhile
from offbench.offload.chunks import Chunk
from offbench.offload.copies import Copier, Direction, Ledger
from offbench.offload.hoststore import HostStore
from offbench.offload.schedule import Schedule
from offbench.offload.staged import Staged
from offbench.offload.streams import Event, Stream, Streams, Why


@dataclass
class Work:
    """One chunk's update as captured by step(): later changes of the optimizer cannot reach it."""

    chunk: Chunk
    update: Callable[[Staged], None]
    """Runs AdamW on the chunk's parameters with its staged state."""
    gradients: list[torch.Tensor]
    """Kept alive until the update has run."""
    parameters: list[torch.Tensor]
    calls: Callable[[Staged], list[Any]] | None = None
    """The same update as calls of the kernel, which `run` makes, those of several works in one; None: alone only."""
    run: Callable[[Sequence[Any]], None] | None = None


class Engine(ABC):
    """Executes one Schedule over the chunks of one optimizer. Engines differ in the memory that state passes through
    and in the order of the work; what is done with a chunk is here."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        store: HostStore,
        schedule: Schedule,
        streams: Streams,
        copier: Copier,
        resident: Mapping[int, torch.Tensor] | None = None,
        debug: bool = False,
    ) -> None:
        self.chunks = chunks
        self.schedule = schedule
        self.debug = debug
        """Fill staged state with NaN once it is written back: whoever still reads it is found out."""
        self.ledger = Ledger()
        self.staging_peak = 0
        """Most staging memory held so far, bytes."""
        self._resident: Mapping[int, torch.Tensor] = {} if resident is None else resident
        """State that never moves, by the chunk that it is kept with: uint8 device tensors."""
        self._store = store
        self._streams = streams
        self._copier = copier
        self._updated: dict[int, Event] = {}
        self._written_back: dict[int, Event] = {}
        self.has_gradients: Callable[[int], bool] = lambda chunk: False
        """Whether all gradients of a chunk are there."""
        self._furthest = -1
        """Last chunk that this step's forward has asked for."""
        self._waits = {"step": meanwhile.waits(), "ahead": meanwhile.waits()}
        """Of the host, by who last looked whether there were any."""
        self._host_parts: dict[tuple[int, int, int], torch.Tensor] = {}
        self._always: dict[int, Staged] = {}
        """Resident state that was used, by chunk."""
        self.failed: BaseException | None = None
        """What an update raised: some of its parameters may be new, others old."""
        self._set_up()
        self._plan()

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Most staging memory a steady step holds."""

    @abstractmethod
    def step(self, works: Sequence[Work]) -> None:
        """Queue one optimizer step."""

    def before_read(self, chunks: Sequence[int], look_ahead: bool = True) -> list[Event]:
        """Called when the parameters of these chunks are about to be read: queue their updates and, if asked to, look
        ahead. Returns the events the reader must wait for."""
        last = max(chunks)
        self._furthest = max(self._furthest, last)
        self._queue(self._up_to(last))
        if look_ahead:
            self.look_ahead()
        return [self._updated[chunk] for chunk in chunks if chunk in self._updated]

    def look_ahead(self, at_leisure: bool = False) -> None:
        """Queue updates until `ahead` chunks are queued in front of what the forward has asked for. at_leisure: the
        host has time, for the device is busy with what was queued before."""
        if not self._has_waited("ahead"):
            self._queue(self._up_to(self._furthest + self.schedule.ahead))

    def _has_waited(self, who: Literal["step", "ahead"]) -> bool:
        """Whether the host has waited since `who` last asked: if so, updates are queued ahead in its waits."""
        before, self._waits[who] = self._waits[who], meanwhile.waits()
        return before != self._waits[who]

    def queue_more(self) -> bool:
        """The host waits for the device: queue one update of those that may be queued ahead, if there is one. Returns
        whether there was, even if its time had not come."""
        waiting = self._waiting()
        if not waiting or not self._is_near(waiting[0]):
            return False
        self._queue(1)
        return True

    def _is_near(self, work: Work) -> bool:
        """Whether an update may be queued ahead by now."""
        return work.chunk.index <= self._furthest + self.schedule.ahead

    def before_backward(self, chunks: Sequence[int]) -> None:  # noqa: B027 - most engines have nothing to do then
        """Called before the backward of the modules that these chunks' parameters belong to."""

    def after_backward(self) -> None:  # noqa: B027 - as above
        """Called when a backward is over."""

    @abstractmethod
    def drain(self) -> None:
        """Return when nothing is queued or in flight: parameters and host state are those of the last step."""

    @abstractmethod
    def _waiting(self) -> Sequence[Work]:
        """What the step still owes, in order."""

    @abstractmethod
    def _queue(self, count: int) -> None:
        """Queue the next `count` chunks, if there are as many."""

    def _set_up(self) -> None:  # noqa: B027 - most engines have nothing else
        """Make what an engine has beside this, once, before it is planned."""

    @abstractmethod
    def _plan(self) -> None:
        """Chunks, resident state or schedule have changed."""

    def extend(self, chunks: Sequence[Chunk], schedule: Schedule) -> None:
        """Take over a longer list of chunks (the store has them already), or other resident ones, and, maybe, another
        schedule."""
        self.drain()
        self.ledger.settle()
        self.chunks, self.schedule = chunks, schedule
        self._host_parts, self._always = {}, {}
        self._plan()

    def _count_step(self) -> None:
        self.ledger.step += 1
        self._furthest = -1

    def _up_to(self, chunk: int) -> int:
        """How many updates are owed up to and with this chunk."""
        count = 0
        for work in self._waiting():
            if work.chunk.index > chunk:
                break
            count += 1
        return count

    def move_in_early(self, chunk: Chunk, staged: Staged, ready: Event) -> Event:
        """Queue the copies into staging that compute hands over at `ready`, before step(): the previous step may still
        be writing the host's bytes. The event follows the last of them."""
        moves_in = self._streams.side("in")
        moves_in.wait(ready, Why.ARENA_READY)
        if chunk.index in self._written_back:
            moves_in.wait(self._written_back[chunk.index], Why.HOST_CURRENT)
        return self._move_in(moves_in, chunk, staged)

    def _move_in(self, stream: Stream, chunk: Chunk, staged: Staged) -> Event:
        """Queue the copies into staging; the event follows the last of them."""
        parts = staged.parted(chunk)
        return self._copy(stream, "in", [(part, self._host(chunk, at, part.numel())) for at, part in parts])

    def _move_out(self, stream: Stream, chunk: Chunk, staged: Staged) -> Event:
        """Queue the copies back to the host, and in debug runs the NaN behind them."""
        parts = staged.parted(chunk)
        end = self._copy(stream, "out", [(self._host(chunk, at, part.numel()), part) for at, part in parts])
        if not self.debug:
            return end

        def poison() -> None:
            for _, part in staged.parts:
                part.fill_(0xFF)  # four such bytes are a float32 NaN

        stream.run(poison, writes=self._streams.accesses(part for _, part in staged.parts))
        return stream.record()

    def _host(self, chunk: Chunk, at: int, nbytes: int) -> torch.Tensor:
        """Bytes of a chunk in host memory; made once, for every tensor made anew costs the host time."""
        key = (chunk.index, at, nbytes)
        if key not in self._host_parts:
            self._host_parts[key] = Staged.at_home(chunk, self._store.chunk(chunk.home)).bytes(at, nbytes)
        return self._host_parts[key]

    def _copy(self, stream: Stream, direction: Direction, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        def copy() -> None:
            copy_one = self._copier.copy
            for target, source in pairs:
                copy_one(target, source)

        accesses = self._streams.accesses
        begin = stream.record() if self.ledger.keep else None
        stream.run(copy, accesses(source for _, source in pairs), accesses(target for target, _ in pairs))
        end = stream.record()
        self.ledger.copied(direction, sum(target.numel() for target, _ in pairs), begin, end)
        return end

    def _update(self, stream: Stream, work: Work, staged: Staged) -> Event:
        return self._run_update(stream, lambda: work.update(staged), [(work, staged)])

    def _update_together(self, stream: Stream, works: Sequence[tuple[Work, Staged]]) -> Event:
        """Updates of chunks whose works have `calls`, in as few kernels as there are param groups among them."""

        def update() -> None:
            run = works[0][0].run
            assert run is not None
            run([call for work, staged in works if work.calls is not None for call in work.calls(staged)])

        return self._run_update(stream, update, works)

    def _run_update(self, stream: Stream, update: Callable[[], None], works: Sequence[tuple[Work, Staged]]) -> Event:
        accesses = self._streams.accesses
        parts = (part for _, staged in works for _, part in staged.parts)
        parameters = (parameter for work, _ in works for parameter in work.parameters)
        try:
            stream.run(
                update,
                reads=accesses(gradient for work, _ in works for gradient in work.gradients),
                writes=accesses(chain(parts, parameters)),
            )
        except BaseException as error:
            self.failed = error
            raise
        return stream.record()

    def check(self) -> None:
        """Raises OffbenchError once an update has failed in its middle: nothing may be made of what it left, neither
        another step nor a checkpoint."""
        if self.failed is not None:
            raise OffbenchError(
                f"an optimizer update failed before ({self.failed!r:.120}): parameters and moments are those of no "
                "step; make model and optimizer anew and load a checkpoint"
            ) from self.failed

    def end(self) -> None:
        """As `drain`, but what a failed update left is given up."""
        if self.failed is None:
            self.drain()
        else:
            self._wait_for_all()

    def _kept(self, chunk: Chunk) -> Staged:
        """Resident state, where it is. What was cut out of it stays valid from step to step."""
        if chunk.index not in self._always:
            self._always[chunk.index] = Staged.at_home(chunk, self._resident[chunk.home])
        return self._always[chunk.index]

    def _lead(self, works: Sequence[Work], there: Collection[int] = ()) -> int:
        """How many works step() queues: up to and with the `lead`-th that moves and is not `there` already."""
        chunks = [work.chunk.index for work in works]
        moving = [at for at, chunk in enumerate(chunks) if chunk not in self._resident and chunk not in there]
        return moving[self.schedule.lead - 1] + 1 if len(moving) >= self.schedule.lead else len(works)

    def _wait_for_all(self) -> None:
        """Hold the host until every update and write-back queued so far has ended. Resident state may move then."""
        self._always = {}
        for event in (*self._updated.values(), *self._written_back.values()):
            event.synchronize()


class InOrderEngine(Engine):
    """The engines that queue a chunk's whole work at once, chunk after chunk. Only one step can have work left: the
    next step() first queues whatever the forward never asked for."""

    def step(self, works: Sequence[Work]) -> None:
        """Queue one optimizer step. Synchronous schedules return when it is done, deferred ones after `lead`
        chunks."""
        self.check()
        self.queue_all()
        if works:
            self._count_step()
            self._begin_step(works)

    @abstractmethod
    def _begin_step(self, works: Sequence[Work]) -> None:
        """Queue what step() itself queues of this step's work; nothing is owed from the one before."""

    def queue_all(self) -> None:
        """Queue every update the forward has not asked for."""
        self._queue(len(self._waiting()))

    def drain(self) -> None:
        """Return when nothing is queued or in flight: parameters and host state are those of the last step."""
        self.check()
        self.queue_all()
        self._wait_for_all()
