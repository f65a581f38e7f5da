"""The reproducer runs without a GPU as far as it can, and its fix makes the copies of FSDP2's own operators."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.fsdp

SCRIPT = Path(__file__).parent.parent / "docs" / "reproducers" / "fsdp2_bulk_copies.py"
RANKS = 8


@pytest.fixture(scope="module")
def reproducer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fsdp2_bulk_copies", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_makes_one_step_of_each() -> None:
    words = [sys.executable, str(SCRIPT), "--dry", "--fix", "--direction", "both"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["stock: one step on the CPU", "fixed: one step on the CPU"]


def test_it_stands_alone_and_is_short() -> None:
    text = SCRIPT.read_text()
    assert "offbench" not in text
    assert len(text.splitlines()) < 120


def test_the_fix_copies_out_what_fsdp_does(reproducer: ModuleType) -> None:
    sizes = [6, 4, 10]
    gathered = torch.randn(RANKS, sum(sizes))
    ours, theirs = ([torch.empty(RANKS, size) for size in sizes] for _ in range(2))
    torch.ops.fsdp.split_with_sizes_copy(gathered, sizes, dim=1, out=theirs)
    reproducer.copy_out(gathered, sizes, dim=1, out=ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_the_fix_copies_in_what_fsdp_does(reproducer: ModuleType, into: torch.dtype) -> None:
    newer = hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype")
    stock = torch.ops.fsdp.chunk_cat_mixed_dtype if newer else torch.ops.fsdp.chunk_cat
    tensors = [torch.randn(shape).bfloat16() for shape in ((16, 3), (8, 5, 2), (24,))]
    ours, theirs = (torch.empty(RANKS, sum(t.numel() for t in tensors) // RANKS, dtype=into) for _ in range(2))
    stock(tensors, dim=0, num_chunks=RANKS, out=theirs)
    reproducer.copy_in(tensors, dim=0, num_chunks=RANKS, out=ours)
    assert torch.equal(ours, theirs)
