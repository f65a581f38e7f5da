"""A launch checks itself: did the arm do what its name says? A failed check makes the record `invalid`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbench import arms
from offbench.config import GIB, RunSpec
from offbench.window import first_non_finite, window_valid
from offbench.window_slope import disagreement

if TYPE_CHECKING:
    from offbench.rank_report import RankReport

MEMORY_SLACK = 2 * GIB
"""Library workspaces, rotary tables and the like. A smaller state than this can hide from the check."""


def check_launch(spec: RunSpec, reports: Sequence[RankReport]) -> dict[str, str]:
    """Name of each check -> `ok` or what was seen instead."""
    return {
        "schedule": _schedule(spec, reports) or "ok",
        "state": _state(spec, reports) or "ok",
        "memory": _memory(reports) or "ok",
        "updates": _updates(spec, reports) or "ok",
        "fsdp copies": _fsdp_copies(spec, reports) or "ok",
        "readbacks": _readbacks(spec, reports) or "ok",
        "gradient pool": _gradient_pool(spec, reports) or "ok",
        "activations": _activations(spec, reports) or "ok",
        "window": _window(spec, reports) or "ok",
        **_slope(reports),
        "finite": first_non_finite([report.result for report in reports]) or "ok",
        "norms agree": _norms(spec, reports) or "ok",
    } | ({"replica": _replica(spec, reports) or "ok"} if spec.workload.broadcast_every else {})


def _schedule(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """No silent fallback from deferred to synchronous updates, or from updates in host memory to staged ones."""
    arm, _ = arms.find(spec.arm.name)
    wanted = arm.schedule(spec.arm).updates
    for report in reports:
        if report.schedule != wanted:
            return f"rank {report.rank} ran updates that were {report.schedule}; the arm's are {wanted}"
    return None


def _state(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """After a drained step the moments are where the arm keeps them, all of them."""
    schedule = arms.find(spec.arm.name)[0].schedule(spec.arm)
    for report in reports:
        expected = report.local_params * 8  # two fp32 moments
        device, host = report.state.device_bytes or 0, report.state.host_bytes or 0
        if device + host != expected:
            need = f"{report.local_params} parameters need {expected}"
            return f"rank {report.rank} holds {device + host} bytes of state, {need}"
        if spec.mode.device == "cpu":  # one memory: nothing to tell apart
            continue
        allowed = schedule.resident_bytes if report.state_budget is None else report.state_budget
        if schedule.offloaded and device > allowed:
            return f"rank {report.rank} keeps {device} bytes of state on the device, allowed {allowed}"
        if not schedule.offloaded and host:
            return f"rank {report.rank} keeps {host} bytes of state in host memory"
    return None


def _memory(reports: Sequence[RankReport]) -> str | None:
    """With nothing in flight the device holds parameters and, only where the arm keeps it there, state: what the
    allocator says, not what the optimizer says of itself."""
    for report in reports:
        if report.drained_bytes is None:
            continue
        expected = report.local_params * 4 + (report.state.device_bytes or 0)
        if abs(report.drained_bytes - expected) > MEMORY_SLACK:
            return (
                f"rank {report.rank} has {report.drained_bytes / GIB:.2f} GiB allocated after the drain, "
                f"expected {expected / GIB:.2f}"
            )
    return None


def _updates(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """The AdamW kernel ran once per step on every parameter, and left its trace in every second moment."""
    steps = spec.window.warmup + spec.window.steps
    for report in reports:
        if report.kernel_steps != (steps, steps):
            return f"rank {report.rank}: AdamW counted {report.kernel_steps} steps over its parameters, not {steps}"
        # In a rehearsal equal rows come back from every rank, and the gradient of their normalised scores vanishes.
        if report.untouched and spec.mode.kind == "real":
            return f"rank {report.rank}: {report.untouched[0]} was never updated ({len(report.untouched)} such)"
    return None


def _fsdp_copies(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """--fsdp-copies reached FSDP2: at least one copy-in for each layer and step, or none at all."""
    least = spec.workload.layers * (spec.window.warmup + spec.window.steps)
    for report in reports:
        if spec.arm.fsdp_copies == "kernel" and report.kernel_copies < least:
            return f"rank {report.rank}: {report.kernel_copies} copies went through kernels, at least {least} had to"
        if spec.arm.fsdp_copies == "stock" and report.kernel_copies:
            return f"rank {report.rank}: {report.kernel_copies} copies went through kernels, none had to"
    return None


def _gradient_pool(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """--gradient-pool reached FSDP2: with compute at least one reduction for each layer and step, with stock none at
    all; auto finds its own share."""
    if spec.arm.gradient_pool == "auto":
        return None
    asked = spec.arm.gradient_pool == "compute"
    least = spec.workload.layers * (spec.window.warmup + spec.window.steps) if asked else 0
    for report in reports:
        if report.pooled_gradients < least or (report.pooled_gradients and not asked):
            wanted = f"at least {least}" if asked else "none"
            return f"rank {report.rank}: {report.pooled_gradients} gradients came from compute's pool, {wanted} had to"
    return None


def _readbacks(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """--readbacks kernel reached the experts: their counts took no copy, in forward and recompute of every layer."""
    w = spec.workload
    asked = w.ep > 1 and w.count_readback and spec.mode.device == "cuda" and spec.arm.readbacks == "kernel"
    least = w.layers * w.grad_accum * (spec.window.warmup + spec.window.steps) if asked else 0
    for report in reports:
        if report.kernel_reads < least or (report.kernel_reads and not asked):
            return f"rank {report.rank}: {report.kernel_reads} expert counts came by kernels, at least {least} had to"
    return None


def _activations(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """--activation-offload moved every block input out and back, all by kernels or none."""
    w = spec.workload
    steps = spec.window.warmup + spec.window.steps
    by_kernel = 2 * w.layers * w.grad_accum * steps if spec.arm.activation_copies == "kernel" else 0
    for report in reports:
        out, back, planned = report.activations
        if not out == back == planned or bool(planned) != spec.workload.activation_offload:
            return f"rank {report.rank}: {out} bytes of activations out, {back} back, planned {planned} each way"
        if report.kernel_activations != by_kernel:
            return f"rank {report.rank}: {report.kernel_activations} block inputs went by kernels, not {by_kernel}"
    return None


def _window(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """All copies of the window's steps completed inside it, in both directions, within one chunk: a whole one, not one
    of its pieces, for by the host's own time a step's end comes earlier or later than its copies. An arena that fills
    before step() may be as full, or as empty, when a step ends: by no more than a step moves."""
    arena = arms.find(spec.arm.name)[0].schedule(spec.arm).staging_bytes or 0
    for report in reports:
        whole = min(report.largest_chunk * (spec.arm.pieces or 1), spec.arm.chunk_bytes or 0)
        planned = max((way.planned_per_step for way in report.traffic), default=0)
        chunk = max(report.largest_chunk, whole, min(arena, planned))
        found = window_valid(report.traffic, spec.window.steps, chunk, in_flight_slack=chunk)
        if found:
            return f"rank {report.rank}: {found}"
    return None


def _slope(reports: Sequence[RankReport]) -> dict[str, str]:
    """With --check-window: step_s does not depend on where the window ends."""
    if not any(report.check_window for report in reports):
        return {}
    for report in reports:
        if report.window_slope_s is None:
            return {"window slope": "asked for, but not measured"}
        if text := disagreement(report.result.window_s / len(report.result.step_s), report.window_slope_s):
            return {"window slope": f"rank {report.rank}: {text}"}
    return {"window slope": "ok"}


def _replica(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """What the last broadcast left on rank 0 is what a whole gather of the drained trainer gives, bit for bit."""
    first = reports[0]
    expected = (spec.window.warmup + spec.window.steps) // (spec.workload.broadcast_every or 1)
    if first.broadcast is None or first.broadcast.broadcasts != expected:
        return f"{first.broadcast.broadcasts if first.broadcast else 0} weight broadcasts, not {expected}"
    if first.stale:
        return f"{first.stale[0]} is not the trainer's in bf16 after the last step ({len(first.stale)} such)"
    return None


def _norms(spec: RunSpec, reports: Sequence[RankReport]) -> str | None:
    """The gradient norm is global: real ranks must agree on it. Rehearsed ranks see different data."""
    if spec.mode.kind == "rehearsal":
        return None
    for step, scalars in enumerate(zip(*(report.result.scalars for report in reports), strict=True)):
        norms = {s.grad_norm for s in scalars}
        if len(norms) > 1:
            return f"ranks disagree on the gradient norm of step {step + 1}: {sorted(map(str, norms))}"
    return None
