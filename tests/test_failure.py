"""What a failing rank leaves behind, and whose fault it says it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from offbench.failure import is_out_of_memory, is_peer_failure, record_failure, write_json


@pytest.mark.parametrize(
    ("error", "oom", "peer"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("the driver refused to pin 4.0 GiB of host memory"), True, False),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4242"), False, True),
        (RuntimeError("[rank1]: NCCL error: remote process exited or there was a network error"), False, True),
        (BrokenPipeError("Broken pipe"), False, True),
        (RuntimeError("Connection was likely closed. Did the remote server shutdown?"), False, True),
        (RuntimeError("recvValue failed on SocketImpl"), False, True),
        (RuntimeError("Application timeout caused pair closure"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True, False),
        (RuntimeError("std::bad_alloc"), True, False),
        (ValueError("shape mismatch"), False, False),
    ],
)
def test_kinds_of_failure(error: Exception, oom: bool, peer: bool) -> None:
    assert is_out_of_memory(error) is oom
    assert is_peer_failure(error) is peer


def test_a_failure_names_phase_and_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("no such layer")
    except ValueError as error:
        record_failure(tmp_path, 3, error, "build")
    found = json.loads((tmp_path / "failure-3.json").read_text())
    assert (found["rank"], found["type"], found["message"], found["phase"]) == (
        3,
        "ValueError",
        "no such layer",
        "build",
    )
    assert "test_a_failure_names_phase_and_stack" in found["stack"]
    assert "rank 3 failed in build" in capsys.readouterr().err


def test_json_files_are_complete_or_absent(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}
    with pytest.raises(TypeError):
        write_json(tmp_path / "c.json", {"b": object()})
    assert not (tmp_path / "c.json").exists()


def test_a_rank_dies_with_its_parent() -> None:
    child = (
        "from offbench.failure import die_with_parent; die_with_parent(); print('ready', flush=True); "
        "import time; time.sleep(60)"
    )
    parent = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True, "
        "stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the rank outlived its parent")
