"""--state-budget auto: how much, when, and what a launch says about it."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from offbench.arms import ARMS
from offbench.auto_budget import LEAST_WARMUP, AutoBudget, Times, spare, wanted
from offbench.config import GIB, Mode, RunSpec, Window, Workload
from offbench.device import CpuDevice, Stamp
from offbench.offload.chunks import plan_chunks
from offbench.offload.schedule import Schedule
from offbench.rank import run
from offbench.record import Link, RunRecord
from offbench.whereabouts import Whereabouts
from offbench.worker import Progress
from offbench.workload import presets

CPU = torch.device("cpu")
STATE = int(28.44 * GIB)
CHUNKS = plan_chunks([512] * 4, 1024)


def schedule(arm: str) -> Schedule:
    return ARMS[arm].schedule(ARMS[arm].resolve())


@pytest.mark.parametrize(
    ("into", "forward", "kept"),
    [(50.2, 0.55, 0.8), (21.5, 0.55, 16.6), (26.0, 0.66, 11.3), (50.2, 0.7, 0.0)],
)
def test_stream_keeps_what_cannot_arrive_during_clip_and_forward(into: float, forward: float, kept: float) -> None:
    link = Link(in_bytes_per_s=into * GIB, out_bytes_per_s=into * GIB, both_bytes_per_s=1.7 * into * GIB)
    found = wanted(schedule("stream"), STATE, GIB // 4, link, Times(forward, 1.35))
    assert found / GIB == pytest.approx(kept + 0.25, abs=0.05)


def test_other_schedules_hide_less() -> None:
    link, times = Link(in_bytes_per_s=20 * GIB, out_bytes_per_s=20 * GIB, both_bytes_per_s=30 * GIB), Times(0.5, 1.0)
    kept = {arm: wanted(schedule(arm), STATE, 0, link, times) for arm in ("main", "chunked", "overlap", "zerocopy")}
    assert kept["main"] == kept["chunked"] == STATE
    assert kept["overlap"] == kept["zerocopy"] == STATE - int(7.5 * GIB)
    both_ways = int(3.75 * GIB)
    assert wanted(schedule("stream"), STATE, 0, link, Times(0.5, 0.25)) == STATE - 5 * GIB - both_ways, "out, too"
    assert wanted(schedule("stream"), STATE, 0, link, times, 5 * GIB) == STATE - 5 * GIB - both_ways, "memory"
    assert wanted(schedule("stream"), STATE, 0, link, times, 11 * GIB) == STATE - 10 * GIB
    assert wanted(schedule("stream"), STATE, 0, link, times, 0) == wanted(schedule("overlap"), STATE, 0, link, times)
    assert wanted(schedule("chunked"), STATE, GIB, link, times) == STATE
    assert wanted(schedule("stream"), STATE, 0, Link(), times) == STATE, "no rates: nothing is known to hide"


def test_room_is_what_the_peak_leaves_less_a_margin() -> None:
    assert spare(100 * GIB, 60 * GIB) == 37 * GIB
    assert spare(100 * GIB, 99 * GIB) == 0


class Card(CpuDevice):
    """A device with 1000 bytes, of which the workload takes 700, that calls every stamp a second later."""

    now = 0.0
    said: list[str]

    def stamp(self) -> Stamp:
        self.now += 1.0
        return Stamp(None, self.now)

    def limit(self) -> int:
        return 1000

    def peak_reserved(self) -> int:
        return 700

    def reset_peaks(self) -> None:
        self.said.append("reset")

    def trim(self) -> None:
        self.said.append("trim")


@dataclass
class Recorder:
    """Every step's phases take 2 s of forward, 4 of backward and 1 of clip, after whatever came before."""

    device: Card
    warmup: int = LEAST_WARMUP
    ran: dict[int, list[tuple[str, Stamp]]] = field(default_factory=dict)

    def step(self, number: int) -> None:
        phases = []
        for name, seconds in (("forward", 2), ("backward", 4), ("clip", 1), ("step", 0)):
            self.device.now += seconds
            phases.append((name, Stamp(None, self.device.now)))
        self.ran[number] = phases

    def marks(self, step: int) -> list[tuple[str, Stamp]]:
        return self.ran[step]


@dataclass
class Optimizer:
    said: list[str]
    schedule: Schedule
    chunks: Any = CHUNKS
    staging_bytes: int = 1 << 40

    def drain(self) -> None:
        self.said.append("drain")

    def set_state_budget(self, nbytes: int) -> None:
        self.said.append(f"budget {nbytes}")


def course(link: Link, others: list[str]) -> tuple[list[tuple[int, list[str]]], AutoBudget]:
    said: list[str] = []
    device = Card(CPU)
    device.said = said
    recorder: Any = Recorder(device)
    optimizer: Any = Optimizer(said, schedule("stream"))
    spec = RunSpec(arm=ARMS["stream"].resolve(state_budget="auto"))
    auto = AutoBudget.asked(spec, optimizer, recorder, device, link, lambda mine: [mine, *others])
    assert auto is not None
    seen = []
    for step in range(LEAST_WARMUP + 2):
        said.clear()
        auto.before(step)
        seen.append((step, list(said)))
        recorder.step(step)
    return seen, auto


def test_the_warm_up_times_a_drained_step_then_takes_the_peak_then_sets_the_budget_once() -> None:
    rate = 1111 / 3
    seen, auto = course(Link(in_bytes_per_s=rate, out_bytes_per_s=rate, both_bytes_per_s=rate), [])
    # f is below 3 s, in which 1111 of 4096 bytes would come: more than 2985 are wanted, and 270 are free.
    assert seen[:5] == [
        (0, []),
        (1, ["drain"]),
        (2, ["drain", "trim", "reset"]),
        (3, ["drain", "trim", "budget 270"]),
        (4, []),
    ]
    assert all(not said for _, said in seen[4:])
    assert auto.chosen == 270
    (warning,) = auto.warnings
    assert "all that the GPU has room for" in warning


def test_state_must_be_there_before_head_and_loss() -> None:
    _, auto = course(Link(), [])
    w = RunSpec(arm=ARMS["stream"].resolve()).workload
    share = presets.find(w.model).loss_share(w.seq_len, w.layers)
    assert 0.1 < share < 0.2
    # 2 s of forward and 1 of clip; what the loss takes is left for state on its way out, beside 4 s of backward.
    assert auto._times() == Times(pytest.approx(3 - 2 * share), pytest.approx(4 + 2 * share))


def test_ranks_agree_on_the_neediest_ones_budget_and_the_fullest_ones_room() -> None:
    fast = Link(in_bytes_per_s=1e9, out_bytes_per_s=1e9, both_bytes_per_s=1e9)
    assert course(fast, ["100 999"])[1].chosen == 270
    assert course(fast, ["4096 150"])[1].chosen == 150
    fits = Link(in_bytes_per_s=4096 / 3, out_bytes_per_s=4096 / 3, both_bytes_per_s=4096 / 3)
    assert course(fits, ["5 9999"])[1].chosen == 270, "one chunk is wanted"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def ranked(rank: int, out: Path) -> None:
    """A rank's whole launch, on a CPU whose memory is counted and has room for 1 MiB of state."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    CpuDevice.limit = lambda self: (1 << 20) * 100 // 97 + 9  # type: ignore[method-assign]
    CpuDevice.peak_reserved = lambda self: 0  # type: ignore[method-assign]
    spec = RunSpec(
        workload=Workload(model="tiny", layers=2, seq_len=32, compile=False),
        arm=ARMS["stream"].resolve(state_budget="auto", chunk_bytes=1 << 19),
        window=Window(warmup=LEAST_WARMUP, steps=2),
        mode=Mode(device="cpu", world=1, nproc=1),
    )
    run(spec, 0, out, Progress(out, 0), Whereabouts.take(0, [], numa=False))


def test_a_launch_sets_it_in_the_warm_up_and_passes_its_checks(tmp_path: Path) -> None:
    mp.start_processes(ranked, (tmp_path,), nprocs=1, start_method="fork")
    found = json.loads((tmp_path / "result.json").read_text())
    assert set(found["checks"].values()) == {"ok"}
    assert 1 << 20 <= found["state_budget_bytes"] < (1 << 20) + 9
    assert 0 < 8 * found["local_params"] - found["moved"]["planned_in_bytes_per_step"] <= 1 << 20
    (warning,) = found["warnings"]
    assert "keeps 0.001 GiB" in warning


def test_where_nobody_counts_memory_nothing_is_kept() -> None:
    optimizer: Any = Optimizer([], schedule("stream"))
    spec = RunSpec(arm=ARMS["stream"].resolve(state_budget="auto"))
    auto = AutoBudget.asked(spec, optimizer, Recorder(Card(CPU)), CpuDevice(CPU), Link(), lambda mine: [mine])  # type: ignore[arg-type]
    assert auto is not None
    for step in range(LEAST_WARMUP):
        auto.before(step)
    assert (auto.chosen, optimizer.said, len(auto.warnings)) == (0, [], 1)
    fixed = RunSpec(arm=ARMS["stream"].resolve(state_budget=1))
    assert AutoBudget.asked(fixed, optimizer, Recorder(Card(CPU)), Card(CPU), Link(), lambda mine: [mine]) is None  # type: ignore[arg-type]


def test_a_record_tells_what_ran() -> None:
    spec = RunSpec(arm=ARMS["stream"].resolve(state_budget="auto"))
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    record = RunRecord(run_id=spec.run_id, status="ok", spec=spec, state_budget_bytes=3 * GIB)
    assert record.spec.arm.state_budget == "auto"
    assert record.ran.state_budget == 3 * GIB
    assert ARMS["stream"].schedule(record.ran).resident_bytes == 3 * GIB
    assert ARMS["stream"].schedule(record.spec.arm).resident_bytes == 0
