"""What each rank of a launch runs: build, warm up, measure, drain, hand its figures over."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from offbench import arms, bandwidth, environment, pools, profiler
from offbench.auto_budget import AutoBudget
from offbench.config import GIB, RunSpec
from offbench.device import Device
from offbench.estimate import estimate
from offbench.extras import Extras
from offbench.hardware import load_nvml
from offbench.host_lead import HostClock, HostLeadWatch
from offbench.offload import OffloadedAdamW
from offbench.offload.gradient_pool import GradientPool
from offbench.offload.hoststore import HostStore
from offbench.offload.small_copies import KernelCopies, kernel_copies
from offbench.pools import PoolWatch
from offbench.rank_report import describe, hand_over, meet, tell
from offbench.record import HostLead, Link, Reserved, SmallCopies, Split
from offbench.replica import ReplicaLog
from offbench.small_watch import SmallCopyWatch
from offbench.trace.command import split_of
from offbench.traffic import TrafficLog
from offbench.window import WindowRecorder
from offbench.window_slope import slope
from offbench.workload.parallel import Job, build
from offbench.workload.rehearsal import init_rehearsal

if TYPE_CHECKING:
    from offbench.whereabouts import Whereabouts
    from offbench.worker import Progress

PROBE_BYTES = 4 * GIB
"""Half of it is read, half written. Such probes gave 80.6 to 83.8 GiB/s both ways over the launches of
results/h200-rehearsal-native.jsonl, one kind of machine and its native link."""
FIRST_STEPS = 2
"""The first compiles, and the backward of the second is the first that finds state staged: what only these two needed
is no part of the memory of a step."""
COLLECT_EVERY = 50
"""Steps between garbage collections; automatic ones would hit single steps of single ranks."""


def run(spec: RunSpec, local_rank: int, out: Path, progress: Progress, where: Whereabouts) -> None:
    """The launch as this rank lives it, bound already where it is to be."""
    with kernel_copies(spec.arm.fsdp_copies == "kernel") as copies:
        _run(spec, local_rank, out, progress, where, copies)


def _run(
    spec: RunSpec, local_rank: int, out: Path, progress: Progress, where: Whereabouts, copies: KernelCopies | None
) -> None:
    progress.enter("start")
    device, env = place(spec, local_rank, where)
    link, copy_repeat = probe_link(spec, device)
    env |= environment.capture(job_bus_id(env))

    progress.enter("build")
    join(spec, local_rank, device)
    where.joined()
    env["affinity_joined"] = environment.cpu_list(os.sched_getaffinity(0))
    where.planned(estimate(spec).pinned_bytes)
    job = build(spec, dist.get_rank(), device.torch_device)
    pool = pool_of(spec.arm.gradient_pool, job.model)
    progress.enter("pin")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make_optimizer(spec, job, copy_repeat)
    where.pinned(pinned_ranges(job, optimizer))
    replica = ReplicaLog(spec, job, optimizer) if spec.workload.broadcast_every else None

    recorder = WindowRecorder(device, spec.window.warmup, spec.window.steps, spec.arm.readbacks)
    log = TrafficLog(optimizer, device)

    def told(text: str) -> list[str]:
        return tell("auto budget", text, local_rank, spec.mode.nproc)

    auto = AutoBudget.asked(spec, optimizer, recorder, device, link, told)
    meet("before the first step", spec.mode.nproc)
    train(job, optimizer, recorder, log, replica, progress, env, auto)

    progress.enter("drain")
    recorder.close(optimizer.drain)
    progress.enter("gather")
    report = describe(spec, job, optimizer, recorder, log, replica, copy_repeat)
    report.kernel_copies = copies.copies_in if copies is not None else 0
    report.pooled_gradients = pool.made if pool is not None else 0
    report.gradient_pool_bytes = pool.nbytes if pool is not None else None
    report.pages = where.close(pinned_ranges(job, optimizer))
    report.host.numa = report.pages.numa
    report.link = link
    report.env = env | {"affinity_after": environment.cpu_list(os.sched_getaffinity(0))}
    report.warnings = [*(str(warning.message) for warning in caught), *where.warnings]
    if auto is not None:
        report.state_budget = auto.chosen
        report.warnings += auto.warnings
    extras = Extras.of()
    report.check_window = extras.check_window
    hand_over(spec, report, local_rank, out, complete=False)

    progress.enter("extras")
    if extras.watch:
        report.host_lead, report.small_copies, report.reserved = watch(job, optimizer, spec, device, out)
    report.window_slope_s = check_window(job, optimizer, spec, device) if report.check_window else None
    report.trace, report.split, why_not = trace(job, optimizer, spec, device, out)
    report.warnings += [] if why_not is None else [f"no split of traced steps: {why_not}"]
    hand_over(spec, report, local_rank, out, complete=True)
    optimizer.detach()
    dist.destroy_process_group()


def place(spec: RunSpec, local_rank: int, where: Whereabouts) -> tuple[Device, dict[str, Any]]:
    """The rank's device, and its address as CUDA says it."""
    bus_id = where.bus_id
    if spec.mode.device == "cuda":
        torch.cuda.set_device(local_rank)
        if spec.arm.memory_limit is not None:
            total = torch.cuda.get_device_properties(local_rank).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, spec.arm.memory_limit / total), local_rank)
        device = Device.of(torch.device("cuda", local_rank))
    else:
        device = Device.of(torch.device("cpu"))
    env = {"gpu_bus_id": device.pci_bus_id}
    if device.pci_bus_id is not None:
        where.seen(device.pci_bus_id)
    if bus_id is not None and bus_id != device.pci_bus_id:
        env["gpu_bus_id_by_nvml"] = bus_id  # CUDA_DEVICE_ORDER: CUDA and NVML count differently here
    return device, env


def probe_link(spec: RunSpec, device: Device) -> tuple[Link, float]:
    """The link's rates, as emulated, and how often each byte must be copied for that."""
    if device.torch_device.type == "cpu":
        return Link(), 1.0
    store = HostStore([PROBE_BYTES], pin_for=device.torch_device)
    rounds = itertools.count()

    def together() -> None:
        """Ranks of one host measure the same direction at the same time, as they will copy."""
        meet(f"probe {next(rounds)}", spec.mode.nproc)

    native = bandwidth.probe(device.torch_device, store.chunk(0), together=together)
    if spec.mode.emulate_link is None:
        native.native_both_bytes_per_s = native.both_bytes_per_s
        link, repeat = native, 1.0
    else:
        assert native.both_bytes_per_s is not None
        repeat = bandwidth.repeat_for(spec.mode.emulate_link, native.both_bytes_per_s)
        link = bandwidth.probe(device.torch_device, store.chunk(0), repeat=repeat, together=together)
        link.native_both_bytes_per_s = native.both_bytes_per_s
    torch.cuda.empty_cache()  # the probe's buffers are not the workload's
    return link, repeat


def join(spec: RunSpec, local_rank: int, device: Device) -> None:
    """The default process group: the real job's, or one that stands in for it."""
    if spec.mode.kind == "rehearsal":
        init_rehearsal(local_rank, spec.mode.world)
    elif spec.mode.device == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device.torch_device)
    else:
        dist.init_process_group("gloo")


def pool_of(how: str, model: nn.Module) -> GradientPool | None:
    """What --gradient-pool asks for."""
    return None if how == "stock" else GradientPool(model, "auto" if how == "auto" else None)


def make_optimizer(spec: RunSpec, job: Job, copy_repeat: float) -> OffloadedAdamW:
    """The arm's optimizer. All host memory is taken here, before the first forward."""
    w = spec.workload
    arm, _ = arms.find(spec.arm.name)
    return OffloadedAdamW(
        job.params,
        w.lr,
        w.betas,
        w.eps,
        w.weight_decay,
        schedule=arm.schedule(spec.arm),
        model=job.model,
        implementation=w.adamw,
        copy_repeat=copy_repeat,
    )


def pinned_ranges(job: Job, optimizer: OffloadedAdamW) -> list[tuple[int, int]]:
    """(address, bytes) of the slabs that copies read and write in every step."""
    offload = job.activation_offload
    return [*optimizer.store.addresses, *(offload.addresses if offload else [])]


def train(
    job: Job,
    optimizer: OffloadedAdamW,
    recorder: WindowRecorder,
    log: TrafficLog,
    replica: ReplicaLog | None,
    progress: Progress,
    env: dict[str, Any],
    auto: AutoBudget | None = None,
) -> None:
    """Warm-up and window. Before the last warm-up step the allocator gives back what only the first steps needed
    (`--state-budget auto` has its own times for that). The GPU's condition is read under load, in that step."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    gc.disable()
    loss = job.model.norm.register_forward_pre_hook(lambda *_: recorder.loss_begins())

    def under_load() -> None:
        if (bus_id := job_bus_id(env)) is not None:
            env.update(environment.gpu_state(bus_id, load_nvml()))

    for step in range(recorder.total):
        if auto is not None:
            auto.before(step)
        elif FIRST_STEPS <= step == recorder.warmup - 1:
            recorder.device.trim()
        phase = "warmup" if step < recorder.warmup else "measure"
        loaded = under_load if step + 1 == recorder.warmup else None
        train_step(job, optimizer, scheduler, recorder, replica, step, loaded)
        if step + 1 in (recorder.warmup, recorder.total):
            log.note(step + 1, recorder.boundary)
        if step % COLLECT_EVERY == COLLECT_EVERY - 1:
            gc.collect()
        seconds = recorder.finished_step_s()
        done, of = (step + 1, recorder.warmup) if phase == "warmup" else (step + 1 - recorder.warmup, recorder.steps)
        progress.enter(phase, done, of, job.spec.tokens_per_step / seconds if seconds else None)
    loss.remove()


def watch(
    job: Job, optimizer: OffloadedAdamW, spec: RunSpec, device: Device, out: Path
) -> tuple[HostLead | None, SmallCopies, Reserved | None]:
    """When all other figures are taken: see how far the host is ahead of the device in one more step, count and time
    the small copies of another, and see in a third in which pools reserved memory lies. A step before them brings back
    the bulk copies that the drain has ended; all are drained again."""
    recorder = WindowRecorder(device, 1, 3, spec.arm.readbacks)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    number = spec.window.warmup + spec.window.steps
    clock = HostClock(device)
    train_step(job, optimizer, scheduler, recorder, None, number)
    with HostLeadWatch(clock, recorder, [*job.model.blocks, job.model.norm]) as lead:
        train_step(job, optimizer, scheduler, recorder, None, number + 1)
    with SmallCopyWatch(device) as small:
        train_step(job, optimizer, scheduler, recorder, None, number + 2)
    kept = traces_of(spec, job, out)
    memory = kept.with_name(f"{kept.name}-memory.pickle") if kept is not None else None
    with PoolWatch(device, lambda: pools_of(job, optimizer, device), memory) as reserved:
        train_step(job, optimizer, scheduler, recorder, None, number + 3)
    optimizer.drain()
    clock.close()
    return lead.figures(), small.figures(), reserved.figures()


def pools_of(job: Job, optimizer: OffloadedAdamW, device: Device) -> dict[int, str]:
    """Which stream each of the allocator's pools serves."""
    return pools.names(
        job.model, optimizer.side_streams(), torch.get_device_module(device.torch_device).current_stream()
    )


def check_window(job: Job, optimizer: OffloadedAdamW, spec: RunSpec, device: Device) -> float:
    """Seconds a step by two drained windows more, when all other figures are taken."""
    recorder = WindowRecorder(device, 1, 3 * spec.window.steps, spec.arm.readbacks)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    number = itertools.count(spec.window.warmup + spec.window.steps)

    def steps(count: int) -> None:
        meet(f"check window {count}", spec.mode.nproc)
        for _ in range(count):
            train_step(job, optimizer, scheduler, recorder, None, next(number))

    return slope(device, spec.window.steps, steps, optimizer.drain)


def trace(
    job: Job, optimizer: OffloadedAdamW, spec: RunSpec, device: Device, out: Path
) -> tuple[str | None, Split | None, str | None]:
    """A few more steps, under the profiler: with --profile the trace's file name; of rank 0 their split, unless
    --no-split; and why there is no trace, or none that can be read, if there should be one."""
    kept = traces_of(spec, job, out)
    if kept is None and not Extras.of().split:
        return None, None, None
    recorder = profiler.TracedRecorder(device, spec.arm.readbacks)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step(number: int) -> None:
        train_step(job, optimizer, scheduler, recorder, None, number)

    with tempfile.TemporaryDirectory() as spare:
        path = kept.with_name(f"{kept.name}.json.gz") if kept is not None else Path(spare) / "trace.json.gz"
        first = spec.window.warmup + spec.window.steps
        why = profiler.profile(step, first, path if kept or job.rank == 0 else None, device.torch_device)
        optimizer.drain()
        found = None
        if job.rank == 0 and why is None:
            try:
                found = split_of(path)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        return path.name if kept and path.exists() else None, found, why


def traces_of(spec: RunSpec, job: Job, out: Path) -> Path | None:
    """Where this rank keeps what it traces, with --profile: a folder and how its files begin."""
    folder = Extras.of().profile
    return folder / f"{spec.arm.name}-{out.name}-rank{job.rank}" if folder is not None else None


def job_bus_id(env: dict[str, Any]) -> str | None:
    """The GPU address `place` found."""
    bus_id = env.get("gpu_bus_id")
    return str(bus_id) if bus_id is not None else None


def train_step(
    job: Job,
    optimizer: OffloadedAdamW,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    recorder: WindowRecorder,
    replica: ReplicaLog | None,
    step: int,
    under_load: Callable[[], None] | None = None,
) -> None:
    """One optimizer step, as trainers write it: forward and backward, clip, step, zero_grad, scheduler, broadcast.

    under_load: called once the backward is queued, while the device is busy with it.
    """
    recorder.begin()
    losses = []
    for tokens, labels in job.micro_batches(step):
        loss = job.model(tokens, labels) / job.spec.workload.grad_accum
        recorder.mark("forward")
        loss.backward()
        recorder.mark("backward")
        if under_load is not None:
            under_load()
        losses.append(loss.detach())
    norm, factor = job.clip()
    recorder.mark("clip")
    recorder.report(torch.stack(losses).sum(), norm, factor)
    with recorder.optimizer_step():
        optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if replica is not None:
        replica.after(step)
    recorder.end()
