"""What one launch runs, as frozen values: Workload, ArmSpec, Window, Mode, and RunSpec over them.

A RunSpec is complete: every default is resolved before it is built, so its hash (`run_id`) names the run.
Sizes are bytes, times are seconds. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from offbench import units

GIB = units.GIB
MIB = 1 << 20


_LATER = (
    ("workload", "broadcast_every", None),
    ("arm", "pieces", None),
    ("arm", "staging_bytes", None),
    ("arm", "loss_bytes", None),
    ("arm", "readbacks", "copy"),
    ("arm", "memory_limit", None),
    ("arm", "gradient_pool", "stock"),
    ("arm", "activation_copies", "copy"),
)
"""Fields newer than the first records, with the values that leave a spec what it was."""


class Frozen(BaseModel):
    """Base of the specs: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Workload(Frozen):
    """The training job whose step is measured; equal for all arms of one comparison."""

    model: str = "qwen3-30b-a3b"
    """Name in `offbench.workload.presets`."""
    layers: int = Field(default=48, ge=1)
    seq_len: int = Field(default=16384, ge=1)
    """Tokens per sample."""
    micro_batch: int = Field(default=1, ge=1)
    """Samples per rank and forward."""
    grad_accum: int = Field(default=1, ge=1)
    """Forward + backward passes per optimizer step."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel degree; divides the world size and the number of experts."""
    ac: Literal["full", "none"] = "full"
    """Activation checkpointing of each block."""
    compile: bool = True
    activation_offload: bool = False
    """Saved block inputs go to pinned host memory over the same link."""
    routing: Literal["balanced", "natural"] = "balanced"
    """balanced: every expert gets the same number of tokens; natural: the router's own top-k."""
    count_readback: bool = True
    """The host reads the expert counts back once per layer and pass, as real expert parallelism must. False only
    under balanced routing, where it knows them: shows what that small copy costs beside bulk write-back."""
    adamw: Literal["fused", "foreach"] = "fused"
    """torch AdamW implementation, the same in every arm."""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float | None = 1.0
    """Global gradient-norm clip; None: no clipping."""
    seed: int = 0
    broadcast_every: int | None = Field(default=None, ge=1)
    """After every so many steps a replica on rank 0 gets the weights in bf16; None: never."""


class ArmSpec(Frozen):
    """Where optimizer state lives and how it moves; see `offbench arms`."""

    name: str = "none"
    numa: bool = False
    """Bind each rank to its GPU's NUMA node before anything is pinned."""
    fsdp_copies: Literal["stock", "kernel"] = "stock"
    """kernel: FSDP2's copy-in and copy-out without uploads of pointer tables (`offbench.offload.small_copies`)."""
    readbacks: Literal["copy", "kernel"] = "copy"
    """kernel: expert counts, loss and norm reach the host without the copy engine (`offbench.offload.readback`)."""
    activation_copies: Literal["copy", "kernel"] = "copy"
    """kernel: with activation offload, block inputs travel without the copy engines, which may be busy with state."""
    gradient_pool: Literal["stock", "compute", "auto"] = "stock"
    """compute: sharded gradients in memory that activations can have, too (`offbench.offload.gradient_pool`); auto: as
    many of them as activations leave room for."""
    memory_limit: int | None = Field(default=None, ge=1)
    """Most bytes that PyTorch's allocator may take on the GPU; null: all there are."""
    chunk_bytes: int | None = Field(default=None, ge=4096)
    """Largest chunk of state moved at once; a parameter with more is cut. This and every field below is null in arms
    that do not use it (`Arm.resolve` in `offbench.arms` fills in the arm's defaults)."""
    state_budget: Annotated[int, Field(ge=0)] | Literal["auto"] | None = None
    """Bytes of state that stay on the GPU: the leading chunks, whole. auto: what should hide all copies, as far as the
    GPU has room, measured in the warm-up (`offbench.auto_budget`)."""
    pieces: int | None = Field(default=None, ge=1)
    """Parts in which a chunk moves and updates, so that its update hides behind its own copies; 1: whole."""
    slots: int | None = Field(default=None, ge=1)
    """Neighbouring chunks that fit into the staging arena at the same time."""
    staging_bytes: int | None = Field(default=None, ge=0)
    """stream: staging memory taken by step(), before gradient memory is taken over; null: two chunks."""
    loss_bytes: int | None = Field(default=None, ge=0)
    """stream: most staging memory, gradients' included, held when the forward ends; null: as much as raises no peak,
    by the memory that every forward and backward so far took."""
    lead: int | None = Field(default=None, ge=1)
    """Chunks queued by step() itself."""
    ahead: int | None = Field(default=None, ge=0)
    """Chunks kept queued in front of the forward."""
    first_step: Literal["bounded", "whole"] | None = None
    """bounded: state moves by chunks from the first step on; whole: the first step holds all of it on the GPU."""

    @property
    def resident_bytes(self) -> int:
        """The state budget as far as it is known before the launch; 0 for auto, which takes only what is left then."""
        return 0 if self.state_budget in (None, "auto") else int(self.state_budget)


class Window(Frozen):
    """Which steps are measured: `warmup` steps are discarded, then `steps` are timed."""

    warmup: int = Field(default=5, ge=1)
    steps: int = Field(default=15, ge=1)


class Mode(Frozen):
    """On what the job runs."""

    kind: Literal["real", "rehearsal"] = "real"
    """rehearsal: each process stands in for one rank of a larger job (see `offbench.workload.rehearsal`)."""
    device: Literal["cuda", "cpu"] = "cuda"
    world: int = Field(default=8, ge=1)
    """Ranks of the job."""
    nproc: int = Field(default=8, ge=1)
    """Processes on this host; equal to `world` unless rehearsed."""
    emulate_link: float | None = Field(default=None, gt=0)
    """Both-ways copy rate to imitate by repeating copies, bytes/s; None: the native link."""


class RunSpec(Frozen):
    """One launch, fully resolved."""

    workload: Workload = Workload()
    arm: ArmSpec = ArmSpec()
    window: Window = Window()
    mode: Mode = Mode()

    def canonical(self) -> str:
        """The spec as JSON with sorted keys and no spaces."""
        body = self.model_dump(mode="json")
        for part, name, usual in _LATER:
            if body[part][name] == usual:  # jobs without it keep the run_id they had
                del body[part][name]
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @property
    def run_id(self) -> str:
        """16 hex digits that name this spec."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        w = self.workload
        return w.seq_len * w.micro_batch * w.grad_accum * self.mode.world
