"""One thread per test process, and no GPU test without a GPU."""

from __future__ import annotations

import gc
import os

import pytest

# Before the first import of torch, which reads it once: test machines are small and often shared.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip items marked `gpu` where torch sees no CUDA device; torch is imported only to answer that."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What is loaded by now stays loaded: no garbage collection looks at it again, here or in a forked rank."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Before the interpreter ends, or native modules report what it cannot take down as leaked."""
    gc.unfreeze()
