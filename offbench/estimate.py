"""Memory of a launch before it starts: bytes on each GPU, in each rank's process, and pinned. Pure arithmetic.

Checked against one H200 at 48 layers, 16,384 tokens, rehearsal of 8 with EP 8 (results/h200-rehearsal-native.jsonl,
GiB): 60.8 with all state resident, 56.9 when all of it is staged at the step, 32.4 chunked, 33.2 overlap.

Staging is taken at the step, where backward's temporaries are gone, so chunked peaks where the workload does. Left
out: that a forward takes less than a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from offbench import arms
from offbench.config import MIB, RunSpec
from offbench.hardware import Hardware, memlock_caution
from offbench.offload.chunks import least_arena, plan_staging
from offbench.offload.schedule import Schedule
from offbench.planner.inputs import of_model
from offbench.planner.room import resident
from offbench.units import count, gib
from offbench.workload import presets

OUTSIDE_ALLOCATOR = int(1.5 * (1 << 30))
"""CUDA context, NCCL and cuBLAS workspaces: on the device, not in the allocator's count."""
FRAGMENTATION = 0.03
"""Share of the card left to allocator rounding with expandable segments."""
HOST_SHARE = 0.9
"""Share of the host's memory that a default depth may plan with."""
PROCESS_RSS = {"cuda": 4 * (1 << 30), "cpu": 720 * MIB}
"""Resident size of a rank before any state is pinned: torch, CUDA libraries, the compiler."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank. On a CPU device everything is host memory and gpu_bytes is 0."""

    gpu_bytes: int
    """Largest sum of live tensors, comparable to peak allocated."""
    host_bytes: int
    """Resident memory of the process, pinned memory included, rank 0's replica of the weights left out."""
    pinned_bytes: int


def estimate(spec: RunSpec) -> Estimate:
    """Estimate one rank's memory under that spec."""
    w, shape = spec.workload, presets.find(spec.workload.model)
    params = 4 * shape.local_params(spec.mode.world, w.ep, w.layers)
    grads, state = params, 2 * params
    if w.grad_accum > 1:
        # Without reduction FSDP2 adds micro batches up unsharded, in fp32.
        experts = shape.params(w.layers) - shape.dense_params(w.layers)
        grads = 4 * (shape.dense_params(w.layers) + experts // w.ep)
    saved = saved_bytes(spec)
    kept, parked = (2 * saved // w.layers, saved) if w.activation_offload else (saved, 0)
    # Gradients grow through backward while saved inputs are freed, so their larger amount is what adds up.
    compute = params + max(grads, min(kept, saved)) + temporary_bytes(spec)
    schedule = arms.find(spec.arm.name)[0].schedule(spec.arm)
    if not schedule.offloaded:
        device, pinned = compute + state, 0
    elif (schedule.slots is None and schedule.write_back == "forward") or schedule.first_step == "whole":
        # All state is on the device during a step, when activations are gone.
        device, pinned = max(compute, params + grads + state), state
    else:
        stays = min(state, schedule.resident_bytes)
        moving = state - stays
        arena = staging_bytes(w.model, spec.mode.world, w.ep, w.layers, schedule)
        if schedule.update == "host_memory":
            device = compute + stays  # nothing is staged
        elif schedule.write_back == "backward":
            device = stays + _flowing(schedule, params, grads, moving, arena, compute, saved)
        else:
            device = stays + max(compute, _staged(schedule, params, grads, arena, temporary_bytes(spec)))
        pinned = moving
    if w.broadcast_every:  # each rank keeps its shard of the last broadcast in bf16
        pinned += params // 2
    base = PROCESS_RSS[spec.mode.device]
    if spec.mode.device == "cpu":
        return Estimate(0, device + pinned + parked + base, 0)
    return Estimate(device, pinned + parked + base, pinned + parked)


@functools.cache
def staging_bytes(model: str, world: int, ep: int, layers: int, schedule: Schedule) -> int:
    """The arena that step() takes, as the engine plans it for that rank's chunks. A parameter above the cap of a copy
    that is not cut is a copy alone, and has its own size in it."""
    cap, cut_above = schedule.chunk_bytes, schedule.cut_above
    layout = of_model(presets.find(model), world, ep, layers, cap, cut_above=cut_above)
    kept = resident(layout, schedule)
    moving = [replace(chunk, nbytes=0) if chunk.index < kept else chunk for chunk in layout.chunks]
    if schedule.update == "host_memory":
        return 0
    if schedule.write_back == "forward":
        return plan_staging(moving, schedule.slots).nbytes
    sizes = [chunk.nbytes for chunk in moving]
    return min(sum(sizes), max(schedule.staging_bytes or 0, least_arena(sizes)))


def _staged(schedule: Schedule, params: int, grads: int, arena: int, temporary: int) -> int:
    """chunked, overlap: the arena beside all gradients, at step(); deferred, it is still there when the next forward
    begins, but the gradients of the `lead` chunks that step() queued (half of their moments' bytes) are not."""
    if not schedule.deferred:
        return params + grads + arena
    left = max(0, grads - schedule.lead * schedule.chunk_bytes // 2)
    return params + arena + max(grads, left + temporary)


def _flowing(schedule: Schedule, params: int, grads: int, moving: int, arena: int, compute: int, saved: int) -> int:
    """stream: the workload's own peak, the arena at step(), or what staging has grown to when the forward ends."""
    at_loss = max(0, grads - saved) if schedule.loss_bytes is None else schedule.loss_bytes
    grown = min(moving, arena + grads, max(arena, at_loss))
    temporary = compute - params - max(grads, saved)
    return max(compute, params + grads + arena, params + grown + saved + temporary)


def replica_bytes(spec: RunSpec) -> int:
    """Host memory of the replica on rank 0: all weights in bf16, where they are broadcast."""
    w = spec.workload
    return 2 * presets.find(w.model).params(w.layers) if w.broadcast_every else 0


def saved_bytes(spec: RunSpec) -> int:
    """Activations kept for backward: with full checkpointing one bf16 block input a layer."""
    w = spec.workload
    inputs = w.layers * w.seq_len * w.micro_batch * presets.find(w.model).hidden * 2
    return inputs if w.ac == "full" else inputs + w.layers * block_bytes(spec)


def block_bytes(spec: RunSpec) -> int:
    """bf16 intermediates of one block: attention's projections and the routed tokens' hidden and expert widths."""
    w, s = spec.workload, presets.find(spec.workload.model)
    attention = 2 * (s.heads + s.kv_heads) * s.head_dim + 4 * s.hidden
    routed = s.top_k * (2 * s.hidden + 3 * s.expert_width)
    return w.seq_len * w.micro_batch * (attention + routed) * 2


def temporary_bytes(spec: RunSpec) -> int:
    """What one block and the vocabulary layers need while they run: unsharded bf16 weights and gradients, fp32
    reduce buffers, and one block's intermediates."""
    w, s = spec.workload, presets.find(spec.workload.model)
    vocabulary = 8 * s.vocab * s.hidden
    block_params = s.params(1) - s.params(0)
    experts = 3 * s.experts * s.hidden * s.expert_width
    gathered = 8 * (block_params - experts) + 6 * experts // w.ep
    return vocabulary + gathered + block_bytes(spec)


def shortfalls(spec: RunSpec, hardware: Hardware) -> list[str]:
    """Why this spec cannot fit here, with the numbers; empty when it can."""
    need, problems = estimate(spec), []
    if hardware.gpu_bytes is not None and spec.mode.device == "cuda":
        room = int(hardware.gpu_bytes * (1 - FRAGMENTATION)) - OUTSIDE_ALLOCATOR
        if need.gpu_bytes > room:
            problems.append(
                f"needs about {gib(need.gpu_bytes)} GiB on each GPU, "
                f"{gib(room)} of {gib(hardware.gpu_bytes)} GiB are usable"
            )
    host = need.host_bytes * spec.mode.nproc + replica_bytes(spec)
    if host > hardware.host_available_bytes:
        problems.append(
            f"needs about {gib(host)} GiB of host memory for {count(spec.mode.nproc, 'process')}, "
            f"{gib(hardware.host_available_bytes)} GiB are available"
        )
    return problems


def cautions(spec: RunSpec, hardware: Hardware) -> list[str]:
    """What may go wrong although the estimate fits."""
    need, notes = estimate(spec), []
    if note := memlock_caution(need.pinned_bytes, hardware.memlock_bytes):
        notes.append(note)
    free = min((gpu.free_bytes for gpu in hardware.gpus[: spec.mode.nproc]), default=None)
    if spec.mode.device == "cuda" and free is not None and need.gpu_bytes + OUTSIDE_ALLOCATOR > free:
        notes.append(
            f"needs about {gib(need.gpu_bytes)} GiB and {gib(free)} GiB are free: other processes use the GPU"
        )
    return notes


def fit_layers(specs: Iterable[RunSpec], hardware: Hardware) -> int:
    """The most layers, up to the specs' own, at which all of them fit; 0 when not even one layer does.

    Host memory counts by its size, not by what is free now: the answer, and so the run's name, must not change from
    one minute to the next.
    """
    wanted = list(specs)
    idle = replace(hardware, host_available_bytes=int(HOST_SHARE * hardware.host_bytes))
    for layers in range(min(spec.workload.layers for spec in wanted), 0, -1):
        if not any(shortfalls(with_layers(spec, layers), idle) for spec in wanted):
            return layers
    return 0


def with_layers(spec: RunSpec, layers: int) -> RunSpec:
    """The same spec with another depth."""
    return spec.model_copy(update={"workload": spec.workload.model_copy(update={"layers": layers})})
