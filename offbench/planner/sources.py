"""Where the numbers of a plan come from: a machine's description, a measured record, published times, or FLOPs.

Each function returns the numbers and one line that says where they come from. No torch here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from offbench import arms
from offbench.errors import ScheduleError, UsageError
from offbench.floor import Capacity, Flow, loads
from offbench.machine_floor import capacities, path
from offbench.offload.schedule import Schedule
from offbench.planner.inputs import Compute, Layout, Links, of_model
from offbench.record import RunRecord
from offbench.topology.links import Rate
from offbench.topology.model import Machine
from offbench.units import GIB
from offbench.workload import presets
from offbench.workload.presets import ModelShape

SEED_MACHINE = "seed-8xh200"
SEED_JOB = ("qwen3-30b-a3b", 8, 48, 16384)
"""Model, ranks, layers and tokens per sample of prime-rl#4427."""
SEED_COMPUTE = Compute(forward=0.64, backward=1.54, update=0.075).with_loss(
    presets.find(SEED_JOB[0]).loss_share(SEED_JOB[3], SEED_JOB[2])
)
"""Published there; they add up to the step of its row without offload. What the loss took of the forward was not: it
is estimated as for our own model."""
SEED_LINKS = Links(26.0 * GIB, 26.0 * GIB, 38.8 * GIB)
"""Published there, per GPU while all eight copy from local memory."""
SUSTAINED_FLOPS = 400e12
"""Model FLOP/s a GPU is taken to sustain when nothing else says: 0.40 of an H200's 989e12 (dense bf16, datasheet)."""
UPDATE_BYTES_PER_S = 28 / 4.8e12
"""Seconds per parameter of fused fp32 AdamW: 28 bytes read and written, at an H200's 4.8e12 B/s (datasheet)."""


def links_of_machine(machine: Machine, ranks: int) -> tuple[Links, str]:
    """Rates of the rank that gets least, while so many ranks, one per GPU in the machine's order, copy alike.

    Raises UsageError when the machine lacks GPUs or says nothing about some direction.
    """
    if not 1 <= ranks <= len(machine.gpus):
        raise UsageError(f"{ranks} ranks do not fit: this machine has {len(machine.gpus)} GPUs")
    known = {capacity.link: capacity for capacity in capacities(machine)}
    crossed = loads(Flow(gpu.index, 1.0, 1.0, path(machine, gpu)) for gpu in machine.gpus[:ranks])
    sharers = {link: round(load[0]) for link, load in crossed.items()}
    present = [(known[link], count) for link, count in sharers.items() if link in known]
    both = _least((c.link, c.both, n) for c, n in present)
    into = _least((c.link, c.down, n) for c, n in present) or both
    out = _least((c.link, c.up, n) for c, n in present) or both
    if into is None or out is None:
        raise UsageError(
            "no copy rate is known for this machine; measure it (offbench topo --measure), describe it with --from, "
            "or give --one-way and --both-ways"
        )
    parts = [f"one way {_shared(*into)}", f"both ways {_shared(*both) if both else 'the sum of the two'}"]
    unknown = [link for link in sharers if link not in known or _empty(known[link])]
    if unknown:
        parts.append(f"not counted, capacity unknown: {', '.join(unknown)}")
    return Links.of(into[0], out[0], both[0] if both else None), "; ".join(parts)


def _least(found: Iterable[tuple[str, Rate | None, int]]) -> tuple[float, str, int, Rate] | None:
    """The lowest share: (bytes/s, link, ranks on it, its capacity). Links that did not bind when measured are out."""
    shares = [(rate.bytes_s / n, link, n, rate) for link, rate, n in found if rate is not None and not rate.at_least]
    return min(shares, key=lambda share: share[0], default=None)


def _empty(capacity: Capacity) -> bool:
    return capacity.down is None and capacity.up is None and capacity.both is None


def _shared(share: float, link: str, ranks: int, rate: Rate) -> str:
    origin = rate.source if rate.source.startswith(rate.kind) else f"{rate.kind}, {rate.source}"
    return f"{link} {rate.bytes_s / GIB:.1f} / {ranks} ({origin})"


def schedule_of(record: RunRecord) -> Schedule | None:
    """What a record's arm ran; None where that is not known. How far its staging grew, where the engine found that out
    itself, is in the record."""
    schedule = _told_schedule(record) if record.job is not None else _arms_schedule(record)
    if schedule is None:
        return None
    if schedule.write_back == "backward" and schedule.loss_bytes is None and record.peak.staging_bytes:
        return replace(schedule, loss_bytes=record.peak.staging_bytes)
    return schedule


def _arms_schedule(record: RunRecord) -> Schedule | None:
    arm = arms.ARMS.get(record.spec.arm.name)
    return None if arm is None else arm.schedule(record.ran)


def _told_schedule(record: RunRecord) -> Schedule | None:
    """What a trainer of its own said of its optimizer; a `none` that said nothing moves nothing."""
    if record.schedule is None:
        return arms.ARMS["none"].schedule(arms.ARMS["none"].resolve()) if record.spec.arm.name == "none" else None
    try:
        return Schedule(**record.schedule)
    except (TypeError, ScheduleError):  # another version's
        return None


def layout_of(record: RunRecord, schedule: Schedule) -> Layout:
    """State of a row of one of our models, in the chunks it moved in: rows of before large parameters were cut have
    fewer."""
    w, world = record.spec.workload, record.spec.mode.world
    shape, cap = presets.find(w.model), schedule.chunk_bytes
    layout = of_model(shape, world, w.ep, w.layers, cap, cut_above=schedule.cut_above)
    if record.chunks in (None, len(layout.chunks)):
        return layout
    return of_model(shape, world, w.ep, w.layers, cap)


def none_rows(records: Sequence[RunRecord], like: RunRecord) -> list[RunRecord]:
    """The `none` rows that give a record its compute times: of its own job and link, or else of the native link, since
    `none` copies nothing."""
    mode = like.spec.mode
    found = baseline(records, like=like)
    if found or mode.emulate_link is None:
        return found
    spec = like.spec.model_copy(update={"mode": mode.model_copy(update={"emulate_link": None})})
    return baseline(records, like=like.model_copy(update={"spec": spec}))


def baseline(records: Sequence[RunRecord], like: RunRecord | None = None) -> list[RunRecord]:
    """The `none` rows whose times the other rows of a file, or those like `like`, are simulated from."""
    rows = [r for r in records if r.status == "ok" and r.source == "measured" and r.spec.arm.name == "none"]
    rows = [r for r in rows if r.phases_s.forward and r.phases_s.backward]
    same = like or (rows[0] if rows else None)
    return [r for r in rows if same and _what_ran(r) == _what_ran(same)]


def _what_ran(record: RunRecord) -> tuple[object, ...]:
    """The job and what it ran on; a trainer that offbench did not launch names its own job."""
    return record.job, record.spec.workload, record.spec.mode


def told(record: RunRecord, name: str, default: int) -> int:
    """A count that a trainer of its own gave under this name in its `job`."""
    value = (record.job or {}).get(name)
    return value if isinstance(value, int) and value > 0 else default


def compute_of_records(rows: Sequence[RunRecord]) -> Compute:
    """Median phases of `none` rows of one workload. Of accumulated passes all but the first forward count as backward:
    updates run before the first. Head and loss have what was measured, in older records their share of FLOPs; none
    where the model is not one of ours."""

    def median(phase: str) -> float:
        return statistics.median(getattr(row.phases_s, phase) or 0.0 for row in rows)

    forward = median("forward") / told(rows[0], "grad_accum", rows[0].spec.workload.grad_accum)
    backward = median("backward") + median("forward") - forward
    share = statistics.median(loss_share(row) for row in rows)
    return Compute(forward, backward, median("step"), median("clip")).with_loss(share)


def loss_share(record: RunRecord) -> float:
    """Part of the forward that head and loss take, as measured, or by FLOPs; 0 where the model is not one of ours."""
    phases = record.phases_s
    if phases.forward and phases.loss is not None:
        return min(1.0, phases.loss / phases.forward)
    w = record.spec.workload
    if record.job is not None or w.model not in presets.PRESETS:
        return 0.0
    return presets.find(w.model).loss_share(w.seq_len, w.layers)


def links_of_records(rows: Sequence[RunRecord]) -> Links | None:
    """Median of the rates probed in these launches; None where none was measured."""
    found = [(row.link.in_bytes_per_s, row.link.out_bytes_per_s, row.link.both_bytes_per_s) for row in rows]
    full = [(i, o, b) for i, o, b in found if i is not None and o is not None and b is not None]
    if not full:
        return None
    return Links.of(*(statistics.median(rates) for rates in zip(*full, strict=True)))


def compute_of_flops(
    shape: ModelShape, layers: int, seq_len: int, local_params: int, flops: float
) -> tuple[Compute, str]:
    """Times from model FLOPs at a sustained rate, with full activation checkpointing: forward 1 part, backward 3
    (two for the gradients, one for computing the forward again)."""
    seconds = shape.flops_per_token(seq_len, layers) * seq_len / flops
    text = (
        f"assumed: model FLOPs of {seq_len:,} tokens at {flops / 1e12:g} TFLOP/s a GPU (--tflops), a quarter of it "
        "forward (full checkpointing)"
    )
    compute = Compute(seconds / 4, 3 * seconds / 4, update_s(local_params))
    return compute.with_loss(shape.loss_share(seq_len, layers)), text


def compute_of_params(params: int, tokens: int, world: int, flops: float, given: bool) -> tuple[Compute, str]:
    """The same of a model of which nothing is known but its parameters: 6 FLOPs a parameter and token. given: whether
    somebody said how many tokens a rank has."""
    seconds = 6 * params * tokens / flops
    text = (
        f"assumed: 6 FLOPs x {params:,} parameters x {tokens:,} tokens a rank{'' if given else ' (--seq-len)'} at "
        f"{flops / 1e12:g} TFLOP/s a GPU (--tflops), a quarter of it forward (full checkpointing); every token uses "
        "every parameter, which is too long for a mixture of experts, and attention and loss take no time of their own"
    )
    return Compute(seconds / 4, 3 * seconds / 4, update_s(params / world)), text


def update_s(local_params: float) -> float:
    """Seconds of a fused AdamW step over so many parameters."""
    return local_params * UPDATE_BYTES_PER_S
