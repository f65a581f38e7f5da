"""OffloadedAdamW: torch's AdamW with its moments in pinned host memory, bitwise equal to the same implementation.

The moments live in `self.state` as views of the host store, so `state_dict`, checkpoints and schedulers see an
ordinary AdamW; the engine stages them on the device chunk by chunk, in the order the Schedule says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from offbench.errors import OffbenchError
from offbench.offload import fsdp, meanwhile, stale
from offbench.offload.budget import leading, relocate
from offbench.offload.chunks import Chunk, plan_chunks
from offbench.offload.copies import Ledger
from offbench.offload.counters import StepCounters
from offbench.offload.deferral import deferrable, in_gather_order
from offbench.offload.engine import Engine
from offbench.offload.engines import engine_for
from offbench.offload.hoststore import HostStore, require_room
from offbench.offload.hyper import capture, refuse, refuse_options
from offbench.offload.kernels import Implementation
from offbench.offload.layout import local_of, moments_in
from offbench.offload.lifetime import end, held
from offbench.offload.misplaced import misplaced
from offbench.offload.schedule import Schedule
from offbench.offload.staged import Staged
from offbench.offload.state import check_own, check_saved, load_groups, load_moments, places
from offbench.offload.streams import DeviceStreams, Streams
from offbench.offload.updates import ChunkUpdates, have_gradients, take_gradients, updates_of
from offbench.offload.zerocopy.support import in_host_memory


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments are in host memory between steps.

    params, lr, betas, eps, weight_decay: as torch.optim.AdamW. model: the FSDP2 model whose gathers wait for deferred
    updates; needed by deferred schedules. schedule: what moves when (`offbench.arms`). implementation: torch's `fused`
    or `foreach` kernel; bits are equal only within one of them. debug: staged state becomes NaN once it is written
    back, and parameters are NaN until their deferred update. huge_pages: ask for the host memory in 2 MiB pages.
    streams, copy_repeat: for tests and emulated links.

    Under a deferred schedule step() takes the gradients (`p.grad` is None afterwards), and parameters are up to date
    only for the model's own forward and backward; call `drain()` before reading them anywhere else.
    Raises OffbenchError for options that would not be exact (amsgrad, maximize, capturable, differentiable, closures),
    and for shards whose process group has no backend for their device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        schedule: Schedule,
        model: nn.Module | None = None,
        implementation: Implementation = "fused",
        streams: Streams | None = None,
        copy_repeat: float = 1.0,
        debug: bool = False,
        huge_pages: bool = True,
        **others: Any,
    ) -> None:
        self._settled = 0
        self._laid_out: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        """Parameters that have a chunk, and the moments in it. `state` cannot tell: whoever reads it for a frozen one
        leaves an entry, and trainers may replace its tensors."""
        refuse_options(others, implementation)
        super().__init__(
            params, lr, betas, eps, weight_decay, fused=implementation == "fused", foreach=implementation == "foreach"
        )
        self._step_supports_amp_scaling = False  # step() knows no grad_scale: a GradScaler must unscale itself
        for group in self.param_groups:
            refuse(group, implementation)
        trained = self._without_state(lambda p: p.requires_grad)
        if not trained:
            raise OffbenchError("no parameter requires a gradient: there is no optimizer state to keep")
        if why := misplaced(p for p, _ in trained):
            raise OffbenchError(why)
        self.device = local_of(trained[0][0]).device
        self.implementation: Implementation = implementation
        self.schedule = schedule
        self.copy_repeat = copy_repeat
        self.chunks: tuple[Chunk, ...] = ()
        self.store = HostStore([], pin_for=self.device, huge_pages=huge_pages)
        self._model = model
        self._streams = streams or DeviceStreams(self.device)
        self._resident: dict[int, torch.Tensor] = {}
        """State that stays on the device, by chunk: all of it, or what `schedule.resident_bytes` allows."""
        self._updates: list[ChunkUpdates] = []
        self._counters = StepCounters()
        self._taken: list[nn.Parameter] = []
        """Parameters whose gradients the last step() took, until they are zeroed."""
        self._engine: Engine | None = None
        self._finalizer: weakref.finalize[[Engine, fsdp.ReadGuard, Callable[[], None]], OffloadedAdamW] | None = None
        self._debug = debug
        self._lay_out(trained)

    def _without_state(self, wanted: Callable[[nn.Parameter], bool]) -> list[tuple[nn.Parameter, int]]:
        """Parameters, with their param group's index, that have no moments yet and are `wanted`."""
        groups, known = enumerate(self.param_groups), self._laid_out
        return [(p, g) for g, group in groups for p in group["params"] if p not in known and wanted(p)]

    def _lay_out(self, parameters: list[tuple[nn.Parameter, int]]) -> None:
        """Give these parameters chunks behind the ones there are, with zero moments in `self.state`."""
        given = [p for p, _ in parameters]
        if why := misplaced([*(update.members[0].parameter for update in self._updates[:1]), *given]):
            raise OffbenchError(why)
        schedule = self.schedule
        if schedule.deferred:
            schedule = deferrable(schedule, self._model, given, self._streams)
            parameters = in_gather_order(schedule, self._model, parameters)
        locals_ = [local_of(p) for p, _ in parameters]
        if schedule.update == "host_memory":
            schedule = in_host_memory(schedule, self.device, self.implementation, locals_)
        sizes = [local.numel() * local.element_size() for local in locals_]
        solid = {i for i, local in enumerate(locals_) if not local.is_contiguous()}
        new = plan_chunks(sizes, schedule.chunk_bytes, self.chunks, schedule.cut_above, solid)
        keep = leading((*self.chunks, *new), schedule.resident_bytes if schedule.offloaded else None)
        in_host = [0 if chunk.index in keep else chunk.home_bytes for chunk in new]
        require_room(sum(in_host))  # before the device's memory goes
        stay = {
            chunk.index: torch.zeros(chunk.home_bytes, dtype=torch.uint8, device=self.device)
            for chunk in new
            if chunk.index in keep
        }
        self.store.extend(in_host)
        self.schedule = schedule  # not before: where memory is refused the engine goes on with the old one
        self._resident.update(stay)
        homes = [self._resident.get(chunk.index, self.store.chunk(chunk.index)) for chunk in new]
        at = self.device if self.implementation == "fused" else torch.device("cpu")
        updates = updates_of(new, parameters, self.implementation, at)
        found: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for update, home in zip(updates, homes, strict=True):
            found |= moments_in(home, update.at_home)
        self._updates += updates
        steps = dict(zip(found, self._counters.make(len(found)), strict=True))
        for parameter in given:  # in torch's order
            self.state[parameter] = {"step": steps[parameter], **found[parameter]}
        self._laid_out |= found
        self.chunks += new
        if self.schedule.offloaded:
            self._engine = engine_for(
                self._engine, self.schedule, self.store, self._streams, self.copy_repeat, self._resident, self._debug
            )
            self._engine.has_gradients = partial(have_gradients, self._updates)
            self._engine.extend(self.chunks, self.schedule)
            self._watch(self._engine)

    def _watch(self, engine: Engine) -> None:
        """Let the model's gathers wait for deferred updates, until this optimizer is dropped."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        if self.schedule.deferred:
            assert self._model is not None
            # Of a parameter in pieces the last one, which is updated last.
            chunk_of = {m.parameter: update.chunk.index for update in self._updates for m in update.members}
            alive = partial(held, weakref.ref(self))
            guard = fsdp.ReadGuard(
                self._model,
                chunk_of,
                alive(engine.before_read),
                alive(engine.drain),
                self._streams,
                alive(engine.before_backward),
                alive(engine.look_ahead),
                alive(engine.after_backward),
            )
            withdraw = meanwhile.offer(alive(engine.queue_more))
            self._finalizer = weakref.finalize(self, end, engine, guard, withdraw)
            self._finalizer.atexit = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One AdamW step with the gradients and hyperparameters as they are now.

        Raises OffbenchError for a closure: it would have to run while state is in flight.
        """
        if closure is not None:
            raise OffbenchError("OffloadedAdamW takes no closure; run forward and backward before step()")
        if self._settled:
            raise OffbenchError("step() inside settled(): the code in there relies on parameters that do not change")
        if self.schedule.deferred and self._finalizer is None:
            raise OffbenchError(
                "step() after detach(): the model's gathers would not wait for it; make a new optimizer"
            )
        check_own(self.state, dict(islice(self._laid_out.items(), 1)))  # what replaces any replaces all of them
        if late := self._without_state(lambda p: p.grad is not None):  # frozen until now
            self._lay_out(late)
        hypers = [capture(group) for group in self.param_groups]
        deferred = self.schedule.deferred
        works, counters, parameters = take_gradients(self._updates, self.state, hypers, deferred, self._in_place)
        self._taken = parameters if deferred else []
        if self._engine is not None and self._debug and deferred:
            stale.step(self._engine, works, self._streams)
        elif self._engine is not None:
            self._engine.step(works)
        else:
            for work in works:
                work.update(Staged.whole(self._resident[work.chunk.index]))
        self._counters.count(counters)  # no kernel reads these: the device's work is queued first

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients that a deferred step() took become zeros, too, unless None is asked for: a parameter
        that the next backward does not reach then decays and moves by its moments as in torch."""
        super().zero_grad(set_to_none)
        taken, self._taken = self._taken, []
        for parameter in [] if set_to_none else taken:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _in_place(self, chunk: Chunk) -> bool:
        """Whether a kernel of ours updates this chunk in host memory; on the CPU torch's does."""
        in_host = self.schedule.update == "host_memory" and chunk.index not in self._resident
        return in_host and self.device.type == "cuda"

    def side_streams(self) -> dict[str, Any]:
        """The device's streams that copies and updates run on, by name (`in`, `out`, `update`), those used so far."""
        return self._streams.raw() if isinstance(self._streams, DeviceStreams) else {}

    def drain(self) -> None:
        """Return when no update is queued or in flight: parameters and `state` are those of the last step."""
        if self._engine is not None:
            self._engine.drain()

    @torch.no_grad()
    def set_state_budget(self, nbytes: int) -> None:
        """From now on keep the leading chunks that fit whole into `nbytes` on the device, and move the others.

        Drains first; no bit changes. Moments that moved are other tensors in `self.state` afterwards: fetch them anew.
        Host memory stays pinned while its state is on the device; state that has none gets it when it leaves. Raises
        OffbenchError for a negative budget, where nothing is offloaded, and inside `settled()`. Where memory runs out,
        on either side, it raises and nothing has changed.
        """
        if self._engine is None:
            raise OffbenchError(f"{self.schedule.name}: all state stays on the device, there is no budget to set")
        if nbytes < 0:
            raise OffbenchError(f"a state budget of {nbytes} bytes: must be at least 0")
        if self._settled:
            raise OffbenchError("set_state_budget() inside settled(): the code in there may hold the moments it moves")
        self.drain()
        keep = leading(self.chunks, nbytes)
        for index in relocate(self.chunks, keep, self._resident, self.store, self.device):
            home = self._resident.get(index, self.store.chunk(index))
            for parameter, moments in moments_in(home, self._updates[index].at_home).items():
                self.state[parameter].update(moments)
                self._laid_out[parameter] = moments
        self.schedule = replace(self.schedule, resident_bytes=nbytes)
        self._engine.extend(self.chunks, self.schedule)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """For code that reads or writes parameters or moments itself (a weight broadcast, an export): everything is up
        to date inside, and a step() in there is an error.
        """
        self.drain()
        self._settled += 1
        try:
            yield
        finally:
            self._settled -= 1

    def detach(self) -> None:
        """Drain, and stop making the model's gathers wait; dropping the optimizer does the same."""
        self.drain()
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    @property
    def ledger(self) -> Ledger | None:
        """Books of what moved; None when nothing is offloaded."""
        return None if self._engine is None else self._engine.ledger

    @property
    def bytes_per_step(self) -> int:
        """Payload one step moves in each direction when every parameter has a gradient."""
        return sum(chunk.nbytes for chunk in self.chunks if chunk.index not in self._resident)

    @property
    def staging_bytes(self) -> int:
        """Most staging memory that a steady step holds on the device, as far as that is known by now; bytes."""
        return 0 if self._engine is None else self._engine.staging_bytes

    @property
    def staging_peak(self) -> int:
        """Largest staging memory held on the device so far, bytes."""
        return 0 if self._engine is None else self._engine.staging_peak

    def where(self) -> dict[str, int]:
        """Bytes of the moments by the type of device that holds them between steps."""
        return places(self.state.values())

    def kernel_steps(self) -> tuple[int, int]:
        """Fewest and most steps the AdamW kernel itself has counted over the parameters; drained first."""
        self.drain()
        counted = [float(member.step) for update in self._updates for member in update.members]
        return int(min(counted)), int(max(counted))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters' state comes behind what is there."""
        late = hasattr(self, "_updates")  # not while torch's constructor adds the first groups
        if late:
            params = param_group["params"]
            if not isinstance(params, (torch.Tensor, set)):  # torch refuses sets: they have no order
                param_group = {**param_group, "params": list(params)}
            refuse(param_group, self.implementation)
        super().add_param_group(param_group)
        if late:
            self.drain()
            try:
                if new := self._without_state(lambda p: p.requires_grad):
                    self._lay_out(new)
            except Exception:  # what is refused, or finds no memory, is not added
                self.param_groups.pop()
                raise

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, drained first. Moments are the host tensors themselves, not copies: clone what is
        written while training goes on."""
        self.drain()
        check_own(self.state, self._laid_out)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state_dict of this class or of torch.optim.AdamW into the host store, in place.

        Raises OffbenchError when the groups or shapes do not fit this optimizer's.
        """
        self.drain()
        check_own(self.state, self._laid_out)
        state_dict = state_dict.copy()  # as torch: hooks may change theirs
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_saved(self.param_groups, state_dict["param_groups"], state_dict["state"])
        load_groups(self.param_groups, state_dict["param_groups"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if state_dict["state"].get(key) and parameter not in self._laid_out:  # frozen here, trained there
                    self._lay_out(self._without_state(lambda p, wanted=parameter: p is wanted))  # type: ignore[misc]
                if parameter in self._laid_out:
                    load_moments(self.state[parameter], state_dict["state"].get(key))
        for update in self._updates:
            for member in update.members:
                member.step.copy_(self.state[member.parameter]["step"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        raise OffbenchError(
            "an OffloadedAdamW can be neither copied nor pickled: its moments are in pinned memory of this process; "
            "load its state_dict() into another one"
        )
