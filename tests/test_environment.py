from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offbench import environment
from offbench.environment import capture, cpu_list, source_state, throttle_names
from tests.hosts import FakeNvml


def test_versions_are_those_that_run() -> None:
    found = environment.versions()
    assert found["torch"] == torch.__version__
    assert found["cuda"] == torch.version.cuda


def test_no_torch_is_imported() -> None:
    code = "import sys, offbench.environment as e; e.capture(None); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_cpu_run_has_no_gpu_and_keeps_what_can_change_a_figure() -> None:
    found = capture(None, env={"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "HOME": "/secret"})
    assert (found["gpu"], found["driver"], found["omp_threads"]) == (None, None, "3")
    assert found["variables"] == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}


def test_gpu_state_is_null_where_nvml_cannot_say() -> None:
    found = capture("0000:02:00.0", env={}, nvml=FakeNvml(("A", "B")))
    assert (found["gpu"], found["driver"], found["gpu_power_w"]) == ("B", "580.1", 123.0)
    assert found["gpu_power_limit_w"] is None  # not supported
    assert found["pcie_replays"] is None  # not in these bindings
    assert found["gpu_id"] == "ea44997b8b6b973a"
    assert found["gpu_throttle_reasons"] == ["power cap", "hardware thermal"]


def test_throttle_bits() -> None:
    assert throttle_names(None) is None
    assert throttle_names(0) == []
    assert throttle_names(0x8 | 0x10000) == ["hardware slowdown", "0x10000"]


def test_cpu_lists() -> None:
    assert cpu_list({0, 1, 2, 5, 8, 9}) == "0-2,5,8-9"
    assert cpu_list(set()) == ""


def test_the_commit_is_found_or_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_state(tmp_path, {}) == {"commit": None, "dirty": None}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    (tmp_path / "offbench").mkdir()
    (tmp_path / "offbench" / "x.py").write_text("1")
    (tmp_path / "pyproject.toml").write_text("")
    git("init", "-q")
    assert source_state(tmp_path, {}) == {"commit": None, "dirty": None}  # no commit yet
    git("add", ".")
    git("commit", "-q", "-m", "one")
    clean = source_state(tmp_path, {})
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "notes.txt").write_text("not the package's")
    assert source_state(tmp_path, {})["dirty"] is False
    (tmp_path / "offbench" / "x.py").write_text("2")
    assert source_state(tmp_path, {})["dirty"] is True


def test_a_copied_tree_can_name_its_commit(tmp_path: Path) -> None:
    assert source_state(tmp_path, {"OFFBENCH_COMMIT": "abc"}) == {"commit": "abc", "dirty": False}
    assert source_state(tmp_path, {"OFFBENCH_COMMIT": "abc+"}) == {"commit": "abc", "dirty": True}
