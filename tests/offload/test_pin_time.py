"""The pinning measurement where there is nothing to measure; on a GPU it runs in test_gpu.py."""

from __future__ import annotations

import pytest
import torch

from offbench.offload.pin_time import chunk_sizes, main
from offbench.units import GIB


def test_chunks_hold_what_was_asked_for() -> None:
    assert chunk_sizes(GIB // 2) == [GIB // 2]
    assert chunk_sizes(2 * GIB) == [GIB, GIB]
    assert chunk_sizes(GIB + 1) == [GIB, 512]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--bytes", "8"], "error: --bytes 8: not a size"),
        (["--bytes", "1KiB", "--tensors", "2000"], "error: --tensors 2000: must be at least 1, and "),
        ([], "error: no CUDA device: only its driver can pin memory; "),
    ],
)
def test_without_a_gpu_or_with_bad_input_it_says_so(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1
    assert captured.out == ""
