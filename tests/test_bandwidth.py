from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbench.bandwidth import Direction, _Copier, link_rates, pieces, probe, repeat_for, worst
from offbench.config import GIB
from offbench.device import Device
from offbench.errors import UsageError
from offbench.record import Link

SECONDS = {("in",): 0.02, ("out",): 0.025, ("in", "out"): 0.04}


def test_rates_are_medians_without_the_first_copy() -> None:
    asked = []

    def time_of(directions: Sequence[Direction], times: int) -> list[float]:
        asked.append(("copy", *directions))
        quick = SECONDS[tuple(directions)]
        return [100.0, quick, quick, 9.0][:times]

    link = link_rates(time_of, GIB, rounds=3, together=lambda: asked.append(("together",)))
    assert link.in_bytes_per_s == pytest.approx(50 * GIB)
    assert link.out_bytes_per_s == pytest.approx(40 * GIB)
    assert link.both_bytes_per_s == pytest.approx(50 * GIB), "2 GiB until both have arrived"
    assert asked == [
        ("together",), ("copy", "in"), ("together",), ("copy", "out"), ("together",), ("copy", "in", "out"),
    ]  # fmt: skip


def test_cpu_has_no_link() -> None:
    assert probe(torch.device("cpu"), torch.zeros(8, dtype=torch.uint8)) == Link()
    assert set(Link().model_dump().values()) == {None}


def test_pageable_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="pageable memory; pin it first"):
        probe(torch.device("cuda"), torch.zeros(8, dtype=torch.uint8))


def test_repeat_imitates_a_slower_link() -> None:
    assert repeat_for(38.8 * GIB, 90.4 * GIB) == pytest.approx(2.33, abs=1e-2)
    assert repeat_for(50.0, 50.0) == 1.0
    with pytest.raises(UsageError, match=r"cannot emulate a link of 60\.0 GiB/s: this one reaches 41\.2 GiB/s"):
        repeat_for(60 * GIB, 41.2 * GIB)


def test_pieces_repeat_whole_and_in_part() -> None:
    assert pieces(1000, 1.0) == [1000]
    assert pieces(1000, 2.0) == [1000, 1000]
    assert pieces(1000, 2.33) == [1000, 1000, 330]


@given(st.integers(1, 1 << 40), st.floats(1.0, 50.0))
def test_pieces_carry_every_byte_and_the_right_total(nbytes: int, repeat: float) -> None:
    sizes = pieces(nbytes, repeat)
    assert sizes[0] == nbytes
    assert sum(sizes) == round(repeat * nbytes)
    assert all(0 < size <= nbytes for size in sizes)


def test_worst_rank_counts_and_unmeasured_stays_null() -> None:
    links = [Link(in_bytes_per_s=5.0, out_bytes_per_s=3.0), Link(in_bytes_per_s=4.0), Link()]
    assert worst(links) == Link(in_bytes_per_s=4.0, out_bytes_per_s=3.0)
    assert worst([Link()]) == Link()


def test_copies_move_the_bytes_and_change_no_host_memory() -> None:
    torch.manual_seed(0)
    source, target = (torch.randint(0, 256, (1 << 12,), dtype=torch.uint8) for _ in range(2))
    before = source.clone(), target.clone()
    copier = _Copier(Device.of(torch.device("cpu")), source, target, repeat=2.33)
    times = copier.time(["in", "out"], 3)
    assert len(times) == 3
    assert min(times) > 0
    assert torch.equal(copier._ways["in"][1], source)
    assert torch.equal(source, before[0])
    assert torch.equal(target, before[1])


@pytest.mark.gpu
def test_probe_on_the_device() -> None:
    device = torch.device("cuda")
    host = torch.randint(0, 256, (GIB,), dtype=torch.uint8).pin_memory()
    before = host.clone()
    probe(device, host, rounds=1)
    start = time.perf_counter()
    link = probe(device, host)
    assert time.perf_counter() - start < 1.5
    assert torch.equal(host, before)
    rates = (link.in_bytes_per_s or 0.0, link.out_bytes_per_s or 0.0)
    both = link.both_bytes_per_s or 0.0
    assert min(rates) > GIB
    assert 0.9 * max(rates) < both < 1.05 * sum(rates)
    slow = probe(device, host, repeat=2.33)
    assert slow.both_bytes_per_s == pytest.approx(both / 2.33, rel=0.1)
    assert slow.in_bytes_per_s == pytest.approx(rates[0] / 2.33, rel=0.1)
    with pytest.raises(UsageError, match="pageable"):
        probe(device, before)
