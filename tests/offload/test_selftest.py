"""On a torch version nobody has checked, a test by value decides between overlapped and synchronous updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbench.offload import fsdp, selftest
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.selftest import CHECKED, is_checked
from offbench.offload.streams import DeviceStreams, Why
from tests.offload import sharded
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def verdict(rank: int, drop: Why | None) -> list[str | None]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    found = [selftest.gathers_wait(mesh, CPU, AdversarialStreams(drop=drop))]
    if drop is None:
        found.append(selftest.gathers_wait(mesh, CPU, DeviceStreams(CPU)))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_this_torch_waits(world: int) -> None:
    assert on_ranks(world, verdict, None) == [[None, None]] * world


@pytest.mark.parametrize("world", [1, 2])
def test_a_gather_that_does_not_wait_is_found_out(world: int) -> None:
    for (found,) in on_ranks(world, verdict, Why.READ):
        assert found is not None
        assert "before their update" in found


def on_unknown_version(rank: int, break_it: bool) -> tuple[bool, list[str], list[str]]:
    selftest.CHECKED = ()
    expected = sharded.build(CPU)
    reference = torch.optim.AdamW(expected.parameters(), **sharded.OPTIONS, fused=True)
    sharded.train(expected, reference, rank, CPU, steps=range(2))
    if break_it:
        wrap: Callable[..., Any] = lambda *_: lambda: None  # noqa: E731
        fsdp._wrap = wrap
    model = sharded.build(CPU)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = sharded.optimizer_of("overlap", model, AdversarialStreams({}))
    sharded.train(model, optimizer, rank, CPU, steps=range(2))
    wrong = sharded.differences(sharded.snapshot(expected, reference), sharded.snapshot(model, optimizer))
    return optimizer.schedule.deferred, [str(w.message) for w in caught], wrong


def test_an_unknown_version_that_passes_overlaps_and_says_so() -> None:
    text = f"overlap: torch {torch.__version__} is unknown here and passes the start-up test; updates overlap"
    assert on_ranks(2, on_unknown_version, False) == [(True, [text], [])] * 2


def test_an_unknown_version_that_fails_runs_synchronously_and_says_so() -> None:
    for deferred, texts, wrong in on_ranks(2, on_unknown_version, True):
        assert not deferred
        assert "fails the start-up test: a gather did not ask" in texts[0]
        assert wrong == []


def test_the_versions_under_test_are_the_checked_ones() -> None:
    assert is_checked(torch.__version__)
    assert not is_checked("2.99.0")
    assert len(CHECKED) == 2
