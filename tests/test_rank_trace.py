"""The steps after the window: their split goes into the record, and nothing else of them is kept unless asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbench import rank
from offbench.config import RunSpec
from offbench.device import Device


class Traced:
    """What `rank.trace` did with a job that takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: Any = "the split") -> None:
        self.steps: list[int] = []
        self.read: list[Path] = []
        self.drained = 0
        monkeypatch.delenv("OFFBENCH_PROFILE", raising=False)
        monkeypatch.delenv("OFFBENCH_SPLIT", raising=False)
        monkeypatch.setattr(rank, "train_step", lambda *args: self.steps.append(args[-1]))

        def split_of(path: Path) -> Any:
            assert path.stat().st_size
            self.read.append(path)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(rank, "split_of", split_of)

    def run(self, number: int, out: Path) -> tuple[str | None, Any, str | None]:
        optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        optimizer.drain = lambda: setattr(self, "drained", self.drained + 1)
        job: Any = SimpleNamespace(rank=number)
        return rank.trace(job, optimizer, RunSpec(), Device.of(torch.device("cpu")), out)


def test_without_being_asked_no_step_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traced = Traced(monkeypatch)
    assert (traced.run(0, tmp_path), traced.steps) == ((None, None, None), [])


def test_rank_0_traces_for_the_record_while_others_take_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    traced = Traced(monkeypatch)
    monkeypatch.setenv("OFFBENCH_SPLIT", "1")
    assert traced.run(0, tmp_path) == (None, "the split", None)
    first = RunSpec().window.warmup + RunSpec().window.steps
    assert traced.steps == [first, first + 1, first + 2]
    assert [path.exists() for path in traced.read] == [False]
    traced.steps.clear()
    monkeypatch.delattr(torch.profiler, "profile")
    assert traced.run(1, tmp_path) == (None, None, None), "without a profiler"
    assert (traced.steps, len(traced.read), traced.drained) == ([first, first + 1, first + 2], 1, 2)


def test_traces_that_are_asked_for_are_kept_by_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traced = Traced(monkeypatch)
    monkeypatch.setenv("OFFBENCH_PROFILE", str(tmp_path / "traces"))
    (name, split, _), (other, nothing, _) = traced.run(0, tmp_path), traced.run(1, tmp_path)
    assert (split, nothing) == ("the split", None)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted([str(name), str(other)])


@pytest.mark.parametrize("what", ["writing", "reading"])
def test_a_trace_that_fails_costs_nothing_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    traced = Traced(monkeypatch, ValueError("no such event") if what == "reading" else None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OFFBENCH_SPLIT", "1")
    if what == "writing":
        monkeypatch.setenv("OFFBENCH_PROFILE", str(tmp_path / "file" / "below"))
    name, split, why = traced.run(0, tmp_path)
    assert (name, split) == (None, None)
    assert (why or "").startswith("ValueError: no such event" if what == "reading" else "NotADirectoryError")
    assert traced.drained == 1
