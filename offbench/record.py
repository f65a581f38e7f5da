"""One launch, one record: the schema. `offbench.results_file` keeps records as JSON lines.

A record says what ran (`spec`), on what (`mode`, `env`), how it ended (`status`) and what was measured.
A figure that was not measured is null, never zero. Sizes are bytes, times are seconds. No torch here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from offbench.config import ArmSpec, RunSpec
from offbench.record_parts import (
    Broadcast,
    Floor,
    Host,
    HostLead,
    Link,
    Moved,
    Peak,
    Phases,
    Pool,
    RankPages,
    Reserved,
    Row,
    SmallCopies,
    Split,
    StateAt,
    StepRow,
    TimeParts,
)

__all__ = [
    "SCHEMA",
    "Broadcast",
    "Failure",
    "Floor",
    "Host",
    "HostLead",
    "Link",
    "Moved",
    "Peak",
    "Phases",
    "Pool",
    "RankPages",
    "Reserved",
    "Row",
    "RunRecord",
    "SmallCopies",
    "Source",
    "Split",
    "StateAt",
    "Status",
    "StepRow",
    "TimeParts",
]

SCHEMA = 1

Status = Literal["ok", "invalid", "oom", "timeout", "crash", "interrupted", "skipped"]
Source = Literal["measured", "published", "simulated"]


class Failure(Row):
    """The first rank that failed by itself, not because a peer went away."""

    rank: int | None = None
    type: str | None = None
    message: str | None = None
    phase: str | None = None
    stack: str | None = None
    log: str | None = None
    """Folder of the per-rank logs."""
    stacks: dict[str, str] | None = None
    """On a timeout: each rank's stacks as a sampler saw them."""


class RunRecord(Row):
    """One launch. The fields below are the schema; see each part for units."""

    schema_version: int = SCHEMA
    run_id: str
    launch: int = 1
    """Which repeat of this spec, from 1."""
    order: int = 0
    """Position in the interleaved plan, from 0."""
    started_at: str | None = None
    """UTC, ISO 8601."""
    duration_s: float | None = None
    """Wall time of the launch, start-up included."""
    wall_s: dict[str, float] = Field(default_factory=dict)
    """The same by phase: launch (torchrun, imports), start, build, pin, warmup, measure, drain, gather (and exit)."""
    source: Source = "measured"
    reference: str | None = None
    """Where a published or simulated row comes from."""
    label: str | None = None
    """Row name in a published table, where the arm's name does not say it."""
    status: Status
    reason: str | None = None
    phase: str | None = None
    """What the launch was doing when it ended badly."""
    spec: RunSpec
    job: dict[str, str | int | float | bool | None] | None = None
    """What a trainer that offbench did not launch says about itself; `spec.workload` then means nothing."""
    schedule: dict[str, Any] | None = None
    """Of such a trainer: the fields of its optimizer's Schedule, where one OffloadedAdamW is all its optimizer."""
    step_s: float | None = None
    """Compute-stream time from before the first to after the last window step / steps, max over ranks."""
    median_step_s: float | None = None
    last10_step_s: float | None = None
    """Mean of the last 10 window steps (of all, when there are fewer)."""
    drained_step_s: float | None = None
    """From the window's first boundary to the end of the closing drain / steps: no copy is left out of it."""
    tail_s: float | None = None
    """Time the closing drain took after the last step's boundary."""
    policy_ideal_s: float | None = None
    """What its own schedule would take (`offbench.planner.ideal`), by the `none` rows that its file held by then; a
    report computes it anew from all of them."""
    policy_ideal_parts: TimeParts | None = None
    """What that ideal has and the step of `none` has not, by cause: its own waits, which no engine could avoid."""
    gap_s: float | None = None
    """step_s above the ideal."""
    gap_parts: TimeParts | None = None
    """What the traced steps took beyond it, by cause; null without a trace of both this and `none`."""
    tok_s: float | None = None
    """Tokens of all ranks per second, from step_s."""
    tokens_per_step: int | None = None
    mfu: float | None = None
    """Model FLOPs of the step over step_s x peak bf16 FLOP/s of the device; null for unknown devices."""
    warmup_steps: list[StepRow] = Field(default_factory=list)
    """Those before the window, without times; empty in records made before this was kept."""
    steps: list[StepRow] = Field(default_factory=list)
    """Those of the window."""
    first_step_s: float | None = None
    phases_s: Phases = Phases()
    peak: Peak = Peak()
    moved: Moved = Moved()
    small_copies: SmallCopies | None = None
    host_lead: HostLead | None = None
    """Null on the CPU, for a trainer of its own, and in records made before this was kept."""
    reserved: Reserved | None = None
    """Null on the CPU, for a trainer of its own, and in records made before this was kept."""
    state: StateAt = StateAt()
    state_budget_bytes: int | None = None
    """What `--state-budget auto` came to; null where that was not asked for."""
    gradient_pool_bytes: int | None = None
    """Gradients of a backward that are made in compute's pool, largest over ranks; null with FSDP2's own."""
    host: Host = Host()
    ranks: list[RankPages] = Field(default_factory=list)
    """One for each rank of this host."""
    link: Link = Link()
    floor: Floor = Floor()
    broadcast: Broadcast | None = None
    adamw: str | None = None
    """AdamW implementation that really ran."""
    params_checksum: float | None = None
    """Sum of the local parameters of all processes after the last step, in fp64: equal bits give equal sums."""
    params: int | None = None
    """Parameters of the whole model."""
    local_params: int | None = None
    """Parameters this rank updates (largest over ranks)."""
    chunks: int | None = None
    expert_tokens_max_over_mean: float | None = None
    window_slope_s: float | None = None
    """Seconds a step by two drained windows of different length; null without --check-window."""
    checks: dict[str, str] = Field(default_factory=dict)
    """Self-checks of the launch: name -> `ok` or what was seen."""
    traces: list[str] = Field(default_factory=list)
    """File names of the traces that --profile took, one for each rank of this host."""
    split: Split | None = None
    """Null without a trace of a GPU."""
    warnings: list[str] = Field(default_factory=list)
    failure: Failure | None = None
    env: dict[str, Any] = Field(default_factory=dict)
    """Versions, hardware, clocks, limits and variables; see `offbench.environment`."""

    @property
    def ran(self) -> ArmSpec:
        """The arm with the state budget that it ran with, also where the spec says `auto`."""
        arm = self.spec.arm
        return arm.model_copy(update={"state_budget": self.state_budget_bytes}) if arm.state_budget == "auto" else arm
