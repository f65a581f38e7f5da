from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbench.placement import (
    Placement,
    abilities,
    affinity,
    bind,
    format_cpulist,
    gpu_node,
    parse_cpulist,
    strayed_threads,
    sysfs_address,
)

GPU = "0000:1a:00.0"


@dataclass
class Machine:
    """A made-up machine: /sys and /proc below a folder, and a kernel that records what it is asked for."""

    root: Path
    bound: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    preferred: list[int] = field(default_factory=list)
    affinity_error: int | None = None
    policy_error: str | None = None

    @property
    def sysfs(self) -> Path:
        return self.root / "sys"

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def nodes(self, *cpulists: str) -> None:
        for node, cpulist in enumerate(cpulists):
            self.write(f"sys/devices/system/node/node{node}/cpulist", cpulist)

    def device(self, address: str, chain: str, **files: str) -> None:
        """A PCI device below the bridges of `chain`, linked as sysfs links it."""
        where = f"sys/devices/pci0000:00/{chain}{address}"
        (self.root / where).mkdir(parents=True)
        for name, text in files.items():
            self.write(f"{where}/{name}", text)
        link = self.sysfs / "bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / where)

    def process(self, cpus: str, mems: str, threads: Iterable[int] = (100,)) -> None:
        status = f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}"
        self.write("proc/self/status", status)
        for thread in threads:
            self.write(f"proc/self/task/{thread}/status", status)

    def set_affinity(self, thread: int, cpus: Iterable[int]) -> None:
        if self.affinity_error is not None:
            raise OSError(self.affinity_error, os.strerror(self.affinity_error))
        if thread == 404:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        self.bound.append((thread, frozenset(cpus)))

    def prefer(self, node: int) -> str | None:
        self.preferred.append(node)
        return self.policy_error

    def bind(self, address: str | None = GPU) -> Placement:
        return bind(address, self.sysfs, self.proc, self.set_affinity, self.prefer)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two sockets of four CPUs, one GPU below a bridge on the second, nothing forbidden."""
    made = Machine(tmp_path)
    made.nodes("0-3", "4-7")
    made.device(GPU, "0000:10:00.0/", numa_node="1", local_cpulist="4-7")
    made.process("0-7", "0-1")
    return made


def test_binds_every_thread_to_the_gpus_node(machine: Machine) -> None:
    machine.process("0-7", "0-1", threads=[100, 101, 404])
    placement = machine.bind()
    assert placement == Placement("bound", None, 1, (4, 5, 6, 7), "preferred")
    assert placement.describe() == "node 1"
    assert machine.bound == [(thread, frozenset({4, 5, 6, 7})) for thread in (0, 100, 101)], "404 ended meanwhile"
    assert machine.preferred == [1]


def test_address_may_be_written_as_nvml_does(machine: Machine) -> None:
    assert machine.bind("00000000:1A:00.0").node == 1


def test_only_allowed_and_online_cpus_are_used(machine: Machine) -> None:
    machine.process("2-5,7", "0-1")
    machine.write("sys/devices/system/cpu/online", "0-6")
    assert machine.bind().cpus == (4, 5)


def test_no_gpu_or_one_node_is_not_applicable(machine: Machine, tmp_path: Path) -> None:
    assert machine.bind(None) == Placement("not applicable", "no GPU")
    flat = Machine(tmp_path / "flat")
    flat.nodes("0-7")
    flat.device(GPU, "", numa_node="-1")
    flat.process("0-7", "0")
    assert flat.bind().describe() == "not applicable"
    assert flat.bind().reason == "one NUMA node"
    assert machine.bound == flat.bound == []


def test_memory_only_nodes_do_not_make_a_numa_host(tmp_path: Path) -> None:
    coherent = Machine(tmp_path)
    coherent.nodes("0-71", "", "", "")
    coherent.device(GPU, "", numa_node="0")
    coherent.process("0-71", "0-3")
    assert coherent.bind().reason == "one NUMA node"


def test_unknown_node_is_refused_and_never_node_0(tmp_path: Path) -> None:
    guest = Machine(tmp_path)
    guest.nodes("0-3", "4-7")
    guest.device(GPU, "", numa_node="-1", local_cpulist="0-7")
    guest.process("0-7", "0-1")
    placement = guest.bind()
    assert placement.describe() == f"refused: no source says on which NUMA node GPU {GPU} is"
    assert placement.node is None
    assert guest.bind("0000:99:00.0").status == "refused", "no such device"
    assert guest.bound == []


def test_a_node_the_caller_knows_stands_in_for_the_kernels(machine: Machine) -> None:
    machine.device("0000:2a:00.0", "", numa_node="-1", local_cpulist="0-7")
    known = bind("0000:2a:00.0", machine.sysfs, machine.proc, machine.set_affinity, machine.prefer, node=0)
    assert known.cpus == (0, 1, 2, 3)


def test_the_nearest_bridge_or_the_local_cpus_tell_the_node(machine: Machine) -> None:
    machine.device("0000:2a:00.0", "0000:20:00.0/0000:21:00.0/", numa_node="-1", local_cpulist="0-7")
    machine.write("sys/devices/pci0000:00/0000:20:00.0/numa_node", "0")
    machine.write("sys/devices/pci0000:00/0000:20:00.0/0000:21:00.0/numa_node", "1")
    assert gpu_node("0000:2a:00.0", machine.sysfs) == 1
    machine.device("0000:3a:00.0", "", numa_node="-1", local_cpulist="5-6")
    assert gpu_node("0000:3a:00.0", machine.sysfs) == 1


def test_every_gpu_gets_its_own_answer(tmp_path: Path) -> None:
    snc = Machine(tmp_path)
    snc.nodes(*(f"{8 * node}-{8 * node + 7}" for node in range(8)))
    snc.process("0-63", "0-7")
    found = []
    for index, node in enumerate([3, 3, 1, 1, 7, 7, 5, 5]):
        address = f"0000:{index:02x}:00.0"
        snc.device(address, "", numa_node=str(node))
        found.append(snc.bind(address).cpus[0] // 8)
    assert found == [3, 3, 1, 1, 7, 7, 5, 5]


def test_a_node_without_cpus_is_refused(machine: Machine) -> None:
    machine.write("sys/devices/system/node/node2/cpulist", "")
    machine.device("0000:2a:00.0", "", numa_node="2")
    assert machine.bind("0000:2a:00.0").describe() == "refused: node 2 of GPU 0000:2a:00.0 has no CPUs"


def test_a_cpuset_elsewhere_keeps_its_mask(machine: Machine) -> None:
    machine.process("0-2", "0-1")
    assert machine.bind().describe() == "refused: this process may use CPUs 0-2, none of node 1 (4-7)"
    assert machine.bound == []
    assert machine.preferred == []


def test_refused_affinity_is_recorded(machine: Machine) -> None:
    machine.affinity_error = errno.EINVAL
    assert machine.bind().describe() == "refused: sched_setaffinity: Invalid argument"
    assert machine.preferred == []


def test_refused_memory_policy_leaves_the_process_bound(machine: Machine) -> None:
    machine.policy_error = "Operation not permitted"
    placement = machine.bind()
    assert placement.describe() == "node 1"
    assert placement.memory == "refused: Operation not permitted"
    machine.process("0-7", "0")
    assert machine.bind().memory == "refused: this process may not use memory of node 1"
    assert machine.preferred == [1], "a forbidden node is not asked for"


def test_strayed_threads_are_found(machine: Machine) -> None:
    machine.process("4-7", "1", threads=[100])
    machine.write("proc/self/task/7/status", "Cpus_allowed_list:\t0-7")
    (machine.proc / "self/task/9").mkdir()
    assert strayed_threads([4, 5, 6, 7], machine.proc) == [7]
    assert strayed_threads(range(8), machine.proc) == []


def test_affinity_is_read_back_sorted() -> None:
    cpus = affinity()
    assert cpus == sorted(os.sched_getaffinity(0))
    assert strayed_threads(cpus) == [], f"threads of {threading.active_count()} known"


REAL_BIND = """
import os, sys, threading
from pathlib import Path
from offbench.placement import affinity, bind, strayed_threads
release = threading.Event()
threading.Thread(target=release.wait).start()   # a thread older than the bind
before = strayed_threads([int(sys.argv[2])])
placement = bind("0000:1a:00.0", Path(sys.argv[1]))
print(len(before), placement.describe(), affinity() == [int(sys.argv[2])], strayed_threads(affinity()))
print(placement.memory)
page = bytearray(64 << 20)
print(any(" prefer:0 " in line for line in open("/proc/self/numa_maps")))
release.set()
"""


FORBIDDEN = {os.strerror(errno.EPERM), os.strerror(errno.ENOSYS)}


def test_the_real_kernel_does_what_it_is_asked(machine: Machine) -> None:
    cpus = affinity()
    if len(cpus) < 2:
        pytest.skip("one CPU: nothing to bind to")
    # Node 0 exists everywhere, so let the made-up GPU sit there with one of our CPUs.
    machine.nodes(str(cpus[-1]), format_cpulist(cpus[:-1]))
    machine.write("sys/devices/pci0000:00/0000:10:00.0/0000:1a:00.0/numa_node", "0")
    done = subprocess.run(
        [sys.executable, "-c", REAL_BIND, str(machine.sysfs), str(cpus[-1])],
        capture_output=True, text=True, check=True, timeout=60,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    bound, memory, in_maps = done.stdout.splitlines()
    assert bound == "2 node 0 True []"
    assert memory == "preferred" or memory.removeprefix("refused: ") in FORBIDDEN, "EINVAL would be our mistake"
    assert (in_maps == "True") == (memory == "preferred")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8-11\n", {0, 1, 2, 3, 8, 9, 10, 11}),
        ("0,3-9,11-17", {0, *range(3, 10), *range(11, 18)}),
        ("5", {5}),
        ("65534-65535", {65534, 65535}),
        (" 1 , 2-2 ", {1, 2}),
        ("4,0,2-3,2", {0, 2, 3, 4}),
        ("N/A", set()),
        ("", set()),
        ("\n", set()),
    ],
)
def test_cpulists(text: str, cpus: set[int]) -> None:
    assert parse_cpulist(text) == cpus


@pytest.mark.parametrize(
    "text", ["0-", "-1", "3-1", "a", "0,,1", "0-3:2", "1 2", "0x3", "²", "64-" + 23 * "9", "65536"]
)
def test_what_is_no_cpulist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no CPU list like"):
        parse_cpulist(text)


@given(st.frozensets(st.integers(0, 1023)))
def test_format_and_parse_are_inverse(cpus: frozenset[int]) -> None:
    text = format_cpulist(cpus)
    assert parse_cpulist(text) == cpus
    gaps = sum(cpu - 1 not in cpus for cpu in cpus)
    assert len(text.split(",")) == max(gaps, 1), "one part a run, the shortest spelling"


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 30)), min_size=1), st.sampled_from([",", " ,", ", "]))
def test_any_spelling_gives_the_union_of_its_parts(parts: list[tuple[int, int]], comma: str) -> None:
    text = comma.join(f"{first}-{first + more}" if more else str(first) for first, more in parts)
    assert parse_cpulist(text) == {cpu for first, more in parts for cpu in range(first, first + more + 1)}


def test_addresses_join_across_tools() -> None:
    assert sysfs_address("00000000:1A:00.0") == sysfs_address("0000:1a:00") == GPU
    assert sysfs_address("00010000:E1:00.0") == "10000:e1:00.0"
    with pytest.raises(ValueError, match="is no PCI address like"):
        sysfs_address("GPU-1234")


def test_what_a_process_may_do_is_tried_and_leaves_no_trace() -> None:
    before = affinity()
    able = abilities()
    assert able["setaffinity"] is True
    assert able["set_mempolicy"] == (prefer_in_child() is None)
    assert affinity() == before


def prefer_in_child() -> str | None:
    code = "from offbench.placement import prefer_node; print(prefer_node(0) or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip() or None
