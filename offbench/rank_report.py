"""What one rank tells rank 0, and the launch's record from the reports of all of them."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._distributed_c10d import TCPStore

from offbench import bandwidth
from offbench.checks import check_launch
from offbench.config import RunSpec
from offbench.device import peak_bf16_flops
from offbench.failure import write_json
from offbench.floor import of_launch
from offbench.offload import OffloadedAdamW
from offbench.offload.layout import local_of
from offbench.record import Broadcast, Host, HostLead, Link, Moved, RankPages, Reserved, SmallCopies, Split, StateAt
from offbench.replica import ReplicaLog
from offbench.small_watch import worst
from offbench.stats import largest
from offbench.topo import cache as topo_cache
from offbench.topo.shared import shared_machine
from offbench.traffic import TrafficLog
from offbench.window import RankResult, Traffic, WindowRecorder, gather
from offbench.workload.experts import Experts
from offbench.workload.parallel import Job
from offbench.workload.presets import find


@dataclass
class RankReport:
    """Everything one rank tells rank 0."""

    rank: int
    result: RankResult
    traffic: list[Traffic]
    moved: Moved
    state: StateAt
    state_at_backward_end: int | None
    staging_bytes: int
    host: Host
    link: Link
    local_params: int
    largest_chunk: int
    chunks: int
    schedule: str
    kernel_steps: tuple[int, int]
    """Fewest and most steps the AdamW kernel counted over this rank's parameters."""
    untouched: list[str]
    """Parameters whose exp_avg_sq is all zeros where it was looked at."""
    checksum: float
    """Sum of this rank's parameters in fp64."""
    drained_bytes: int | None
    """Device memory allocated when nothing is in flight and gradients are gone."""
    activations: tuple[int, int, int]
    """Bytes of activations moved out and in, and planned each way, over all steps."""
    expert_load: float | None
    kernel_activations: int = 0
    """Block inputs that kernels moved, out and in."""
    state_budget: int | None = None
    """Bytes that --state-budget auto came to."""
    kernel_copies: int = 0
    """Reduce-scatter copy-ins that went through our kernels instead of FSDP2's."""
    pooled_gradients: int = 0
    """Results of a reduction that were made in compute's pool."""
    gradient_pool_bytes: int | None = None
    """Of the gradients of one backward that are made there."""
    kernel_reads: int = 0
    """Expert counts that reached the host by a kernel instead of a copy."""
    small_copies: SmallCopies | None = None
    host_lead: HostLead | None = None
    reserved: Reserved | None = None
    pages: RankPages | None = None
    broadcast: Broadcast | None = None
    stale: list[str] = field(default_factory=list)
    """Parameters whose replica is not the trainer's; on rank 0."""
    check_window: bool = False
    """With --check-window."""
    window_slope_s: float | None = None
    """Seconds a step by two drained windows, with --check-window, once they have run."""
    trace: str | None = None
    """Name of this rank's trace file."""
    split: Split | None = None
    """What that says; on rank 0."""
    env: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def describe(
    spec: RunSpec,
    job: Job,
    optimizer: OffloadedAdamW,
    recorder: WindowRecorder,
    log: TrafficLog,
    replica: ReplicaLog | None,
    copy_repeat: float,
) -> RankReport:
    """This rank's figures, read after the drain."""
    where = optimizer.where()
    offload = job.activation_offload
    kept, kept_locked = replica.pinned_bytes if replica else (0, 0)
    pinned = optimizer.store.requested_bytes + (offload.host_bytes if offload else 0) + kept
    locked = optimizer.store.locked_bytes + (offload.locked_bytes if offload else 0) + kept_locked
    on_gpu = job.device.type == "cuda"
    return RankReport(
        rank=job.rank,
        result=recorder.result(),
        traffic=log.traffic(),
        moved=log.moved(spec.window.steps, copy_repeat),
        state=StateAt(device_bytes=where.get("device", 0), host_bytes=where.get("host", 0)),
        state_at_backward_end=log.state_at(recorder.phase_ends("backward")),
        staging_bytes=optimizer.staging_peak,
        host=Host(
            pinned_requested_bytes=pinned if on_gpu else 0,
            pinned_locked_bytes=locked,
            pin_s=optimizer.store.seconds if on_gpu else None,
            rss_bytes=psutil.Process().memory_info().rss,
        ),
        link=Link(),
        local_params=sum(local_of(p).numel() for p in job.params),
        largest_chunk=max(chunk.nbytes for chunk in optimizer.chunks),
        chunks=len(optimizer.chunks),
        schedule=optimizer.schedule.updates,
        kernel_steps=optimizer.kernel_steps(),
        untouched=untouched(job, optimizer),
        checksum=checksum(job),
        drained_bytes=recorder.device.allocated(),
        activations=activations(spec, job, recorder.total),
        expert_load=job.expert_load(),
        kernel_activations=offload.by_kernel if offload else 0,
        kernel_reads=kernel_reads(job),
        broadcast=replica.describe() if replica else None,
        stale=replica.differences() if replica else [],
    )


def checksum(job: Job) -> float:
    """Sum of this rank's parameters in fp64."""
    shards = [local_of(parameter) for parameter in job.params]
    return float(sum(shard.sum(dtype=torch.float64) for shard in shards))


def untouched(job: Job, optimizer: OffloadedAdamW) -> list[str]:
    """Parameters with no trace of an update in exp_avg_sq; of large ones every 997th element is read."""
    found = []
    for name, parameter in job.model.named_parameters():
        moment = local_of(optimizer.state[parameter]["exp_avg_sq"]).flatten()
        if moment.numel() and not bool(moment[:: 997 if moment.numel() > 1 << 20 else 1].any()):
            found.append(name)
    return found


def kernel_reads(job: Job) -> int:
    """Expert counts read back by kernels so far; all layers share one mailbox."""
    boxes = {
        id(m.ep.mailbox): m.ep.mailbox for m in job.model.modules() if isinstance(m, Experts) and m.ep is not None
    }
    return sum(box.kernel_writes for box in boxes.values() if box is not None)


def activations(spec: RunSpec, job: Job, steps: int) -> tuple[int, int, int]:
    """Bytes moved out, in, and planned each way: one block input per layer and micro batch."""
    if job.activation_offload is None:
        return 0, 0, 0
    w = spec.workload
    block = w.micro_batch * w.seq_len * job.shape.hidden * 2  # bf16
    return job.activation_offload.out_bytes, job.activation_offload.in_bytes, steps * w.grad_accum * w.layers * block


def store() -> TCPStore:
    """torchrun's own key-value store: it outlives any rank and knows nothing of the job's process group."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=300))


def meet(where: str, nproc: int) -> None:
    """Wait until every process of the launch is here: rehearsed ranks share links without knowing each other."""
    if nproc == 1:
        return
    shared = store()
    if shared.add(f"offbench/{where}", 1) == nproc:
        shared.set(f"offbench/{where}/all", "1")
    shared.wait([f"offbench/{where}/all"])


def tell(where: str, text: str, rank: int, nproc: int) -> list[str]:
    """Say `text` to every process of the launch, and wait for what they say; in rank order."""
    if nproc == 1:
        return [text]
    shared = store()
    shared.set(f"offbench/{where}/{rank}", text)
    return [shared.get(f"offbench/{where}/{other}").decode() for other in range(nproc)]


def hand_over(spec: RunSpec, report: RankReport, local_rank: int, out: Path, *, complete: bool) -> None:
    """Give the report to rank 0, which writes the launch's result: once when the window is measured, so that nothing
    that is tried later can cost it, and again, complete, over the first."""
    stage = "complete" if complete else "window"
    if local_rank:
        store().set(f"offbench/report/{stage}/{local_rank}", pickle.dumps(report).hex())
        return
    shared = store() if spec.mode.nproc > 1 else None
    reports = [report] + [
        pickle.loads(bytes.fromhex(shared.get(f"offbench/report/{stage}/{other}").decode()))
        for other in range(1, spec.mode.nproc)
        if shared
    ]
    write_json(out / "result.json", assemble(spec, reports) | {"complete": complete})


def assemble(spec: RunSpec, reports: list[RankReport]) -> dict[str, Any]:
    """Fields of the RunRecord from the reports of all ranks: largest over ranks, or rank 0's where it is global."""
    first = reports[0]
    figures = gather([report.result for report in reports], spec.tokens_per_step)
    shape = find(spec.workload.model)
    checks = check_launch(spec, reports)
    bad = next((f"{name}: {seen}" for name, seen in checks.items() if seen != "ok"), None)
    peak = figures.peak.model_copy(
        update={
            "state_at_backward_end_bytes": largest([r.state_at_backward_end for r in reports]),
            "staging_bytes": max(r.staging_bytes for r in reports),
        }
    )
    host = Host(
        **{
            name: largest([getattr(r.host, name) for r in reports])
            for name in ("pinned_requested_bytes", "pinned_locked_bytes", "pin_s", "rss_bytes")
        },
        numa=", ".join(dict.fromkeys(r.host.numa for r in reports if r.host.numa is not None)) or None,
    )
    link = bandwidth.worst([r.link for r in reports])
    machine = shared_machine(spec.mode)
    tree = topo_cache.launch_tree(machine, spec.mode.nproc) if machine is not None else None
    fields = dict(vars(figures)) | {
        "status": "invalid" if bad else "ok",
        "reason": bad,
        "tokens_per_step": spec.tokens_per_step,
        "mfu": mfu(spec, figures.step_s, first.env.get("gpu")),
        "peak": peak,
        "moved": first.moved,
        "small_copies": worst(small) if (small := [r.small_copies for r in reports if r.small_copies]) else None,
        "host_lead": first.host_lead,
        "reserved": Reserved.worst(r.reserved for r in reports),
        "state": first.state,
        "state_budget_bytes": largest([r.state_budget for r in reports]),
        "gradient_pool_bytes": largest([r.gradient_pool_bytes for r in reports]),
        "host": host,
        "ranks": [r.pages for r in reports if r.pages is not None],
        "link": link,
        "floor": of_launch(first.moved, link, tree, max(r.largest_chunk for r in reports)),
        "broadcast": first.broadcast,
        "adamw": spec.workload.adamw,
        "params_checksum": sum(r.checksum for r in reports),
        "params": shape.params(spec.workload.layers),
        "local_params": max(r.local_params for r in reports),
        "chunks": first.chunks,
        "expert_tokens_max_over_mean": largest([r.expert_load for r in reports]),
        "window_slope_s": largest([r.window_slope_s for r in reports]),
        "checks": checks,
        "traces": [r.trace for r in reports if r.trace is not None],
        "split": first.split,
        "warnings": sorted({warning for r in reports for warning in r.warnings}),
        "env": first.env | {"machine": topo_cache.identity(machine) if machine is not None else None},
    }
    return {key: _plain(value) for key, value in fields.items()}


def mfu(spec: RunSpec, step_s: float, gpu: str | None) -> float | None:
    """Model FLOPs per second over the peak of all ranks' devices; None where the device's peak is not known."""
    peak = peak_bf16_flops(gpu) if gpu else None
    if peak is None:
        return None
    per_token = find(spec.workload.model).flops_per_token(spec.workload.seq_len, spec.workload.layers)
    return float(per_token * spec.tokens_per_step / step_s / (peak * spec.mode.world))


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, list) else value
