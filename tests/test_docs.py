"""The examples of the user's page run as they are printed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.ranks import on_ranks

PAGE = Path(__file__).parent.parent / "docs" / "using-the-optimizer.md"
BLOCKS = re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def execute(rank: int, code: str, results: str) -> bool:
    with warnings.catch_warnings():
        if "transformers" in code:  # its own deprecations are not ours
            warnings.simplefilter("ignore")
        torch.manual_seed(0)
        exec(compile(code, str(PAGE), "exec"), {"device": torch.device("cpu"), "results": results})
    return True


def test_every_example_was_found() -> None:
    assert len(BLOCKS) == PAGE.read_text().count("```python") == 4


@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_an_example_runs(title: str, code: str, tmp_path: Path) -> None:
    assert on_ranks(1 if "Trainer" in title else 2, execute, code, str(tmp_path / "mine.jsonl"))
