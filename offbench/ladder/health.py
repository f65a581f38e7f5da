"""What the ladder's samples say about the health of GPUs and links: slow ones, replays, links below their maximum."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from offbench.ladder.copy_window import Way
from offbench.ladder.plan import BINDS, DIRECTIONS, Outcome, Rates, Sample, Set
from offbench.topology.capacity import generation, gt_of_generation, line_rate
from offbench.topology.links import UNDER_LOAD
from offbench.topology.model import Gpu, Machine, Note
from offbench.units import gib

LAGS = 0.8
"""A GPU below this share of the median GPU is worth a warning."""
COUNTS = (0.95, 1.3)
"""PCIe bytes counted over bytes copied: headers and read requests may add up to a quarter, nothing takes away."""
IDLE_READINGS = ("idle-link",)
"""Notes about links read while nothing ran; readings under load replace them."""


def under_load(gpu: Gpu, outcomes: Sequence[Outcome]) -> Gpu:
    """The GPU with its link as it was read while copies ran; of several readings the last."""
    read = [match for s in _samples(outcomes, gpu.index) if (match := re.fullmatch(r"Gen(\d+) x(\d+)", s.link or ""))]
    if not read:
        return gpu
    speed, width = gt_of_generation(int(read[-1][1])), int(read[-1][2])
    return replace(gpu, pcie=replace(gpu.pcie, current_gt_s=speed, current_width=width, source=UNDER_LOAD))


def notes_after(machine: Machine, outcomes: Sequence[Outcome], rates: Rates) -> tuple[Note, ...]:
    """The machine's notes, less those that the measurement answers, and what it found."""
    loaded = [under_load(gpu, outcomes) for gpu in machine.gpus]
    answered = IDLE_READINGS if any(new != old for new, old in zip(loaded, machine.gpus, strict=True)) else ()
    kept = [note for note in machine.notes if note.code not in answered]
    found = [
        *_slow(machine, rates),
        *_narrow(loaded),
        *_unhealthy(outcomes),
        *_miscounted(outcomes),
        *_host_limit(machine, rates),
    ]
    return (*kept, *found)


def _samples(outcomes: Sequence[Outcome], gpu: int | None = None) -> Iterator[Sample]:
    for outcome in outcomes:
        for samples in outcome.repeats:
            yield from (sample for sample in samples if gpu is None or sample.gpu == gpu)


def _narrow(gpus: Sequence[Gpu]) -> Iterator[Note]:
    """Links slower or narrower under load than both ends could be."""
    for gpu in gpus:
        now = line_rate(gpu.pcie.current_gt_s, gpu.pcie.current_width)
        best = line_rate(gpu.pcie.max_gt_s, gpu.pcie.max_width)
        if gpu.pcie.source == UNDER_LOAD and now is not None and best is not None and now < best:
            is_now = f"Gen{generation(gpu.pcie.current_gt_s)} x{gpu.pcie.current_width}"
            could_be = f"Gen{generation(gpu.pcie.max_gt_s)} x{gpu.pcie.max_width}"
            text = f"GPU {gpu.index}: its PCIe link runs at {is_now} under load, it could be {could_be}"
            yield Note("warning", "link-below-max", text, "reseat the card, check the slot and its firmware settings")


def _slow(machine: Machine, rates: Rates) -> Iterator[Note]:
    """GPUs far below their peers."""
    for direction in DIRECTIONS:
        alone = {gpu.index: rates.get((Set({gpu.index}), direction)) for gpu in machine.gpus}
        known = {gpu: rate for gpu, rate in alone.items() if rate is not None}
        middle = statistics.median(known.values()) if known else 0.0
        for gpu, rate in known.items():
            if rate < LAGS * middle:
                text = f"GPU {gpu} alone carries {gib(rate)} GiB/s {direction}, the median GPU {gib(middle)}"
                yield Note("warning", "slow-gpu", text, "check its slot, riser and link width")


def _unhealthy(outcomes: Sequence[Outcome]) -> Iterator[Note]:
    """PCIe replays, and links that change their speed or width while they carry copies."""
    replays: Counter[int] = Counter()
    links: dict[int, set[str]] = {}
    for sample in _samples(outcomes):
        replays[sample.gpu] += sample.replays or 0
        links.setdefault(sample.gpu, set()).update({sample.link} if sample.link else set())
    for gpu, seen in links.items():
        if replays[gpu]:
            text = f"GPU {gpu}: {replays[gpu]} PCIe replays during the measurement"
            yield Note("warning", "replays", text, "reseat the card; a sound link has next to none")
        if len(seen) > 1:
            text = f"GPU {gpu}: its PCIe link changed under load ({', '.join(sorted(seen))})"
            yield Note("warning", "link-flaps", text, "check the slot and the power management of the link")


def _miscounted(outcomes: Sequence[Outcome]) -> Iterator[Note]:
    """Bytes copied that the PCIe counters do not confirm."""
    totals: dict[tuple[int, Way], list[float]] = {}
    for sample in _samples(outcomes):
        for way, copied in sample.copied.items():
            if copied and (counted := sample.counted.get(way)) is not None:
                total = totals.setdefault((sample.gpu, way), [0.0, 0.0])
                total[0], total[1] = total[0] + counted, total[1] + copied
    for (gpu, way), (counted, copied) in totals.items():
        if not COUNTS[0] <= counted / copied <= COUNTS[1]:
            text = f"GPU {gpu}: its PCIe counter saw {gib(counted)} GiB {way}, {gib(copied)} were copied"
            todo = "look for other users of the GPU; a counter that wraps counts less"
            yield Note("warning", "bytes-counted", text, todo)


def _host_limit(machine: Machine, rates: Rates) -> Iterator[Note]:
    """A limit above the sockets."""
    sockets = {gpu.package for gpu in machine.gpus}
    for direction in DIRECTIONS if len(sockets) > 1 else ():
        whole = rates.get((Set(gpu.index for gpu in machine.gpus), direction))
        parts = [rates.get((Set(g.index for g in machine.gpus if g.package == s), direction)) for s in sockets]
        if whole is not None and all(parts) and whole < BINDS * sum(part or 0 for part in parts):
            text = f"all GPUs together carry {gib(whole)} GiB/s {direction}, less than the sockets one by one"
            yield Note("warning", "host-limit", text, "the floor does not know this limit; trust the equal rung")
