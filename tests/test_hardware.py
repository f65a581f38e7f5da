from __future__ import annotations

import resource
from pathlib import Path

import pytest

from offbench.config import GIB
from offbench.hardware import (
    cpu_model,
    detect,
    host_memory,
    memlock_caution,
    memlock_limit,
    normal_bus_id,
    numa_nodes,
    visible_gpus,
)
from tests.hosts import FakeNvml

BOX = FakeNvml(("A", "B", "C", "D"), mig={"MIG-1": "A MIG 1g"})


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, "ABCD"),
        ("2", "C"),
        ("3,1", "DB"),
        ("GPU-1,GPU-0abc", "BA"),
        ("0,-1,1", "A"),  # CUDA stops at the first entry it does not know
        ("1,1", "B"),
        ("9", ""),
        ("", ""),
    ],
)
def test_cuda_visible_devices_decides_which_gpus_count(variable: str | None, names: str) -> None:
    env = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    gpus, why = visible_gpus(env, BOX)
    assert [gpu.name for gpu in gpus] == list(names)
    assert (why is None) == bool(names)


def test_mig_instances_are_found_by_their_uuid() -> None:
    gpus, _ = visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"}, BOX)
    assert [gpu.name for gpu in gpus] == ["A MIG 1g"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-2"}, BOX)[0] == ()


def test_the_reason_for_no_gpu_is_kept() -> None:
    assert visible_gpus({}, FakeNvml(broken="Driver Not Loaded")) == ((), "NVML says: Driver Not Loaded")
    assert visible_gpus({}, FakeNvml())[1] == "NVML lists no GPU"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "9"}, BOX)[1] == "CUDA_VISIBLE_DEVICES='9' hides all 4"


def test_bus_ids_have_one_form() -> None:
    assert normal_bus_id("00000000:1A:00.0") == normal_bus_id("0000:1a:00") == "0000:1a:00.0"
    assert normal_bus_id("00010000:1A:00.0") == "10000:1a:00.0"


def fake_root(tmp_path: Path, cgroup: str, files: dict[str, str]) -> Path:
    everything = {
        "proc/meminfo": "MemTotal:       104857600 kB\nMemFree: 1 kB\nMemAvailable:   83886080 kB\n",
        "proc/cpuinfo": "processor : 0\nmodel name\t: Test CPU 9000\n",
        "proc/self/cgroup": cgroup,
        **files,
    }
    for name, content in everything.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


V2 = "sys/fs/cgroup/job/task"


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "available"),
    [
        ("0::/", {}, 100, 80),
        (
            "0::/job/task\n",  # the parent's limit binds; dropped cache counts as unused
            {
                f"{V2}/memory.max": "max\n",
                f"{V2}/memory.current": f"{5 * GIB}",
                "sys/fs/cgroup/job/memory.max": f"{40 * GIB}",
                "sys/fs/cgroup/job/memory.current": f"{10 * GIB}",
                "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {4 * GIB}\n",
            },
            40,
            34,
        ),
        (
            "0::/not/mounted/here\n",  # inside a container the top of the mount is the container's own
            {"sys/fs/cgroup/memory.max": f"{30 * GIB}", "sys/fs/cgroup/memory.current": f"{GIB}"},
            30,
            29,
        ),
        (
            "4:memory:/slurm\n0::/\n",
            {
                "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": f"{20 * GIB}",
                "sys/fs/cgroup/memory/slurm/memory.usage_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}",
            },
            20,
            18,
        ),
    ],
)
def test_cgroup_limits_lower_host_memory(
    tmp_path: Path, cgroup: str, files: dict[str, str], total: int, available: int
) -> None:
    root = fake_root(tmp_path, cgroup, files)
    assert host_memory(root) == (total * GIB, available * GIB)


@pytest.mark.parametrize(("flags", "total", "available"), [("fpu hypervisor", 200, 190), ("fpu", 100, 80)])
def test_a_guest_that_grows_has_what_its_limit_says(flags: str, total: int, available: int, tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{200 * GIB}",
        "sys/fs/cgroup/memory.current": f"{10 * GIB}",
        "proc/cpuinfo": f"model name\t: Test CPU 9000\nflags\t\t: {flags}\n",
    }
    assert host_memory(fake_root(tmp_path, "0::/\n", files)) == (total * GIB, available * GIB)


def test_cpu_and_numa(tmp_path: Path) -> None:
    nodes = {f"sys/devices/system/node/node{i}/cpulist": cpus for i, cpus in enumerate(["0-3\n", "4-7\n", "\n"])}
    root = fake_root(tmp_path, "0::/", nodes)
    assert cpu_model(root) == "Test CPU 9000"
    assert numa_nodes(root) == 2


@pytest.mark.parametrize(
    ("soft", "capabilities", "limit"),
    [
        (8 << 20, "0000000000000000", 8 << 20),
        (8 << 20, "00000000a80425fb", 8 << 20),  # root of a container, without CAP_IPC_LOCK
        (8 << 20, "000001ffffffffff", None),
        (resource.RLIM_INFINITY, "0000000000000000", None),
    ],
)
def test_the_limit_of_locked_memory_does_not_bind_who_may_exceed_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, soft: int, capabilities: str, limit: int | None
) -> None:
    root = fake_root(tmp_path, "0::/", {"proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\nThreads:\t1\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert memlock_limit(root) == limit


def test_a_low_limit_of_locked_memory_is_said_with_both_numbers() -> None:
    assert memlock_caution(3 * GIB, 3 * GIB) is None
    assert memlock_caution(3 * GIB, None) is None
    assert memlock_caution(3 * GIB, 8 << 20) == (
        "pins 3.0 GiB a rank while RLIMIT_MEMLOCK is 0.008 GiB; if pinning fails, raise it (ulimit -l unlimited)"
    )


def test_this_host_can_be_looked_at() -> None:
    found = detect(env={})
    assert 0 < found.host_available_bytes <= found.host_bytes
    assert found.cpus >= 1
    assert bool(found.gpus) == (found.no_gpu_why is None)
