"""What a record holds beside its spec: steps, phases, memory, copies, link, floor, pages, traces.

A figure that was not measured is null, never zero. Sizes are bytes, times are seconds. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field


class Row(BaseModel):
    """Base of the parts of a record: unknown keys of a newer schema are kept, not refused."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StepRow(Row):
    """One step; step_s, of the measured window only, is the largest of all ranks."""

    step_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    """Global norm before clipping."""
    clip_factor: float | None = None
    """What the gradients were multiplied by: min(1, max_norm / (norm + 1e-6))."""


class Phases(Row):
    """Mean seconds of the window, on the compute stream, max over ranks."""

    forward: float | None = None
    loss: float | None = None
    """Of the forward: final norm, head and loss, before which all state must have come in."""
    backward: float | None = None
    clip: float | None = None
    step: float | None = None
    """optimizer.step() as the compute stream sees it."""
    host_in_step: float | None = None
    """Host time spent inside optimizer.step()."""


class Peak(Row):
    """Largest over ranks. `first_step`: from the start to the end of step 1; `steady`: the measured window."""

    first_step_allocated_bytes: int | None = None
    first_step_reserved_bytes: int | None = None
    steady_allocated_bytes: int | None = None
    steady_reserved_bytes: int | None = None
    run_bytes: int | None = None
    """Over the whole run, as the author of a published row counts it; null in measured rows."""
    device_used_bytes: int | None = None
    """The device's own count (all processes), read in the window."""
    state_at_backward_end_bytes: int | None = None
    """Optimizer state on the GPU when backward ends."""
    staging_bytes: int | None = None
    """Largest staging arena held at any time."""
    alloc_retries: int | None = None
    """Times in the window that PyTorch's allocator had no memory left, gave all it kept back and tried again."""


class Moved(Row):
    """What the engine moved in the window, per step and rank. Payload excludes repeats of an emulated link."""

    in_bytes_per_step: float | None = None
    out_bytes_per_step: float | None = None
    planned_in_bytes_per_step: int | None = None
    planned_out_bytes_per_step: int | None = None
    copies_in_per_step: float | None = None
    copies_out_per_step: float | None = None
    copy_repeat: float | None = None
    """Copies actually made per payload byte (1.0 on the native link)."""
    copy_span_s: float | None = None
    """From the staging memory's hand-over to the end of its last write-back, mean of the window's steps."""
    copy_busy_s: float | None = None
    """Time during which at least one copy had begun and not ended, per step of the window."""


class SmallCopies(Row):
    """Copies of a few KB beside the bulk ones, in one step watched after the window (a trainer's own: in its warm-up).
    Largest over ranks. Times are null on the CPU; `offbench.small_watch` says what they hold."""

    uploads_per_step: int | None = None
    """FSDP2's copy-outs and copy-ins, each of which uploads a table of pointers."""
    readbacks_per_step: int | None = None
    """Expert counts, loss and norm that reach the host through the copy engine."""
    by_kernel_per_step: int | None = None
    """Of both kinds, those that kernels make without the copy engine (`--fsdp-copies`, `--readbacks`)."""
    longest_upload_s: float | None = None
    """The longest copy-out or copy-in, whoever makes it, from the end of the work before it to its own end."""
    longest_readback_s: float | None = None
    longest_wait_s: float | None = None
    """The longest of all, less what a copy-out or copy-in takes for its bytes; the host's launches are in it."""


class Pool(Row):
    """What PyTorch's allocator holds for one stream, in one step watched after the window."""

    stream: str
    """`compute`, `FSDP2 reduce-scatter` and the like, `optimizer in`; others by their handle."""
    reserved_bytes: int
    """At the end of that step; of what a pool once reserved it gives nothing back unless memory runs out."""
    most_bytes: int
    """The most in use in that step."""
    at_peak_bytes: int
    """In use when all pools together have their most."""


class Reserved(Row):
    """Where reserved memory lies, by one step watched after the window, of the rank that reserves most;
    `offbench.pools` says how it is told apart. In use: allocated, or freed and not yet passed by a stream."""

    allocated_bytes: int
    """The most that tensors have at once."""
    in_use_bytes: int
    """The most in use at once."""
    pools: list[Pool] = Field(default_factory=list)
    """The largest first."""

    @property
    def reserved_bytes(self) -> int:
        """Of all pools."""
        return sum(pool.reserved_bytes for pool in self.pools)

    @property
    def held_bytes(self) -> int:
        """Freed, but held back until a stream has passed."""
        return self.in_use_bytes - self.allocated_bytes

    @property
    def apart_bytes(self) -> int:
        """Pools have their most at different times."""
        return sum(pool.most_bytes for pool in self.pools) - self.in_use_bytes

    @property
    def spare_bytes(self) -> int:
        """Reserved by pools beyond their most: between blocks, rounded up, or needed at another time."""
        return sum(pool.reserved_bytes - pool.most_bytes for pool in self.pools)

    @staticmethod
    def worst(found: Iterable[Reserved | None]) -> Reserved | None:
        """The one that reserves most; None of none."""
        return max((one for one in found if one is not None), key=lambda one: one.reserved_bytes, default=None)


class HostLead(Row):
    """How far the host was ahead of the GPU in one step watched after the window, rank 0's own; `offbench.host_lead`
    says how it is measured. Lists have an entry a block, of the first micro-batch; leads below zero are set to 0."""

    forward_s: list[float] = Field(default_factory=list)
    """The GPU's time from the block's first stamp to the next one's; of the last block to the final norm's."""
    lead_s: list[float] = Field(default_factory=list)
    """When the GPU could begin the block less when the host had got so far: about 0 where it waits for the host."""
    after_clip_lead_s: float | None = None
    after_step_lead_s: float | None = None
    """Where optimizer.step() returns."""
    accuracy_s: float | None = None
    """The largest lead, either way, that a stamp on an idle GPU seemed to have."""

    @property
    def least_s(self) -> float | None:
        """The smallest lead of any block but the first, before which the host has waited for the last step's loss."""
        return min(self.lead_s[1:], default=None)


class Host(Row):
    """Host side, per rank, max over ranks unless the name says otherwise."""

    pinned_requested_bytes: int | None = None
    pinned_locked_bytes: int | None = None
    pin_s: float | None = None
    rss_bytes: int | None = None
    numa: str | None = None
    """What --numa did: `node K`, `not applicable`, `refused: why`, or null when not asked for."""
    estimated_gpu_bytes: int | None = None
    estimated_host_bytes: int | None = None
    estimated_pinned_bytes: int | None = None


class Link(Row):
    """Copy rates reached in this launch, bytes/s, repeats excluded; worst rank."""

    in_bytes_per_s: float | None = None
    out_bytes_per_s: float | None = None
    both_bytes_per_s: float | None = None
    """Both directions at once, summed."""
    native_both_bytes_per_s: float | None = None
    """The same without an emulated link's repeats."""


class Floor(Row):
    """Least seconds the copies of one step can take."""

    seconds: float | None = None
    bound_by: str | None = None
    serial_seconds: float | None = None
    """The same bytes one way at a time."""
    pipeline_seconds: float | None = None
    """`seconds`, and the largest chunk alone in before and alone out after everything else."""


class StateAt(Row):
    """Bytes of optimizer state by place after a drained step, this rank."""

    device_bytes: int | None = None
    host_bytes: int | None = None


class RankPages(Row):
    """Where one rank of this host and its pinned memory are, seen from its GPU, after the window. Bytes of the slabs
    (optimizer state, offloaded activations) on the GPU's own NUMA node, on another node of its socket, on another
    socket, or where nobody says. Where one node has all memory, all of it is local. Null without GPU or pinned memory.
    """

    rank: int
    """On this host, from 0."""
    gpu_node: int | None = None
    numa: str | None = None
    """As Host.numa, of this rank."""
    memory_policy: str | None = None
    """Of a bound rank: `preferred`, or `refused: why` (pages then only follow the threads that touch them)."""
    strayed_threads: int | None = None
    """Threads that could run outside the rank's CPUs after the window; null where the rank is not bound."""
    local_bytes: int | None = None
    same_socket_bytes: int | None = None
    remote_bytes: int | None = None
    unknown_bytes: int | None = None


class Broadcast(Row):
    """Weight broadcasts (`--broadcast-every`). Bytes are what all ranks send for one, times rank 0's host clock. The
    first one is full: all weights in bf16. The others' figures are means over those in the window."""

    broadcasts: int | None = None
    full_bytes: int | None = None
    full_s: float | None = None
    delta_bytes: float | None = None
    """Positions and values of what changed, or a whole parameter where that is less."""
    delta_s: float | None = None
    """Drain included; it is part of the time of the step it follows."""
    drain_s: float | None = None
    changed: float | None = None
    """Share of the bf16 elements that differed from the broadcast before."""


class TimeParts(Row):
    """Seconds of the compute stream in one step, or in one phase of it, by what they went to: each instant counts
    once, under the cause that held it up last (`offbench.trace.blame`). The parts add up to `step_s`."""

    step_s: float | None = None
    compute_s: float | None = None
    """Forward, backward and clip running."""
    update_s: float | None = None
    """AdamW running, on this stream, or on another one with this one waiting."""
    move_in_s: float | None = None
    """Waits, direct or through an update, for copies to the device."""
    slot_s: float | None = None
    """The same where the copy to the device itself waited for a write-back out of its staging memory."""
    tail_s: float | None = None
    """Waits for write-backs with no move-in behind them: staging memory returns, or step() ends with them."""
    gather_s: float | None = None
    """Waits for collectives and the copies into and out of their buffers."""
    behind_bulk_s: float | None = None
    """Small copies on the compute stream served after bulk copies."""
    host_wait_s: float | None = None
    """The host had queued nothing, because it waited for the device."""
    profiler_s: float | None = None
    """The same, because the profiler was busy with its own buffers."""
    launch_s: float | None = None
    """The host had queued nothing yet."""
    between_s: float | None = None
    """From one queued kernel to the next."""
    unexplained_s: float | None = None
    """What the parts above leave of `step_s`."""
    kernels: float | None = None
    """How many kernels, copies and memsets `compute_s` is the time of."""


class Split(Row):
    """Where the steps traced after the window spent their time: means over `steps` steps, of rank 0. The profiler
    makes the host slower, so these steps are longer than those of the window: `launch_s` is the part that grows."""

    steps: int | None = None
    kernels_digest: str | None = None
    """Of the names and numbers of what `compute_s` is the time of: equal where the same kernels ran."""
    total: TimeParts = TimeParts()
    forward: TimeParts = TimeParts()
    backward: TimeParts = TimeParts()
    clip: TimeParts = TimeParts()
    step: TimeParts = TimeParts()
