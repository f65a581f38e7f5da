"""The examples of the user's page run as they are printed."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from offbench.compare import compare
from offbench.render import to_markdown
from offbench.results_file import read_records
from tests import titan
from tests.ranks import on_ranks

PAGE = Path(__file__).parent.parent / "docs" / "using-the-optimizer.md"
BLOCKS = re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
MEASURED = [(title, code) for title, code in BLOCKS if title.startswith("Measure")]
OTHERS = [block for block in BLOCKS if block not in MEASURED]


def execute(rank: int, code: str, results: str) -> bool:
    cpu = torch.device("cpu")
    training = SimpleNamespace(steps=4)
    config = SimpleNamespace(training=training, gradient_accumulation_steps=2, device=cpu)
    sys.modules["torchtitan"] = ModuleType("torchtitan")
    sys.modules["torchtitan.train"] = titan
    with warnings.catch_warnings():
        if "transformers" in code:  # its own deprecations are not ours
            warnings.simplefilter("ignore")
        torch.manual_seed(0)
        exec(compile(code, str(PAGE), "exec"), {"device": cpu, "results": results, "config": config})
    return True


def ranks_of(title: str) -> int:
    """Hugging Face Trainer would look for a launcher's variables."""
    return 1 if "Hugging Face" in title else 2


def test_every_example_was_found() -> None:
    assert len(BLOCKS) == PAGE.read_text().count("```python") == 7
    assert len(MEASURED) == 4


@pytest.mark.parametrize(("title", "code"), OTHERS, ids=[title for title, _ in OTHERS])
def test_an_example_runs(title: str, code: str, tmp_path: Path) -> None:
    assert on_ranks(ranks_of(title), execute, code, str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(("title", "code"), MEASURED, ids=[title for title, _ in MEASURED])
def test_a_measured_trainer_has_a_row_of_its_own(title: str, code: str, tmp_path: Path) -> None:
    results = tmp_path / "mine.jsonl"
    on_ranks(ranks_of(title), execute, code, str(results))
    (record,) = read_records([results]).records
    assert (record.status, record.reason) == ("ok", None)
    assert len(record.steps) == 3
    assert all(step.loss is not None for step in record.steps)
    phases = record.phases_s
    assert phases.forward
    assert phases.backward
    assert phases.step
    assert record.local_params
    if record.spec.arm.name != "none":
        assert record.moved.in_bytes_per_step == record.moved.planned_in_bytes_per_step
        assert (record.moved.in_bytes_per_step or 0) >= 8 * record.local_params
    assert f"model {record.job['model']}" in to_markdown(compare([record]))  # type: ignore[index]
