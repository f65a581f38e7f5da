"""A rank's place and that of its pages, when libraries, kernels and containers do what they do."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbench import placement, whereabouts
from offbench.config import Mode, RunSpec
from offbench.placement import Placement
from offbench.topology.model import NumaNode
from offbench.whereabouts import Whereabouts, home_node
from tests.topology.roots import FakeNvml, described, put, write_root

GIB = 2**30
ROOT = Path(__file__).parent.parent
NODES = tuple(
    NumaNode(i, "cpu", (4 * i, 4 * i + 1), (4 * i, 4 * i + 1), i, 64 * GIB, 60 * GIB, (10, 20)) for i in range(2)
)
BOUND = Placement("bound", None, 1, (4, 5), "preferred")
SLABS = [(0, GIB), (2 * GIB, GIB)]


class Rank:
    """A rank on node 1 with pages and threads of the test's choosing."""

    def __init__(self, proc: Path, bound: Placement | None = BOUND, **changes: Any) -> None:
        self.proc, self.bound_again, self.pages = proc, 0, {1: 1.0}
        self.threads(100)
        self.where = Whereabouts(3, "0000:1a:00.0", 1, NODES, bound, self._rebind, proc=proc, ask=self._ask, **changes)

    def threads(self, *loose: int) -> None:
        """Thread 100 is bound, those of `loose` above it are not."""
        put(self.proc / "self/task/100/status", "Cpus_allowed_list:\t4-5")
        for thread in loose:
            put(self.proc / f"self/task/{thread}/status", f"Cpus_allowed_list:\t{'4-5' if thread == 100 else '0-7'}")

    def _rebind(self) -> Placement:
        self.bound_again += 1
        for task in (self.proc / "self/task").iterdir():
            put(task / "status", "Cpus_allowed_list:\t4-5")
        return BOUND

    def _ask(self, addresses: Sequence[int]) -> list[int]:
        """Shares of the pages by node, dealt out in address order."""
        return [
            node for node, share in self.pages.items() for _ in range(round(share * len(addresses)))
        ]  # shares in the tests divide the samples

    def lived(self) -> Any:
        """A launch from process-group start to the end of the window; returns the row."""
        self.where.joined()
        self.where.pinned(SLABS)
        return self.where.close(SLABS)


def test_a_bound_rank_at_home_has_nothing_to_say(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    row = rank.lived()
    assert (row.rank, row.gpu_node, row.numa, row.memory_policy) == (3, 1, "node 1", "preferred")
    assert (row.local_bytes, row.same_socket_bytes, row.remote_bytes, row.unknown_bytes) == (2 * GIB, 0, 0, 0)
    assert (row.strayed_threads, rank.bound_again, rank.where.warnings) == (0, 0, [])


def test_without_numa_the_pages_are_recorded_all_the_same(tmp_path: Path) -> None:
    rank = Rank(tmp_path, bound=None)
    rank.pages = {0: 1.0}
    rank.threads(7)
    row = rank.lived()
    assert (row.numa, row.memory_policy, row.strayed_threads) == (None, None, None)
    assert (row.local_bytes, row.remote_bytes) == (0, 2 * GIB)
    assert rank.where.warnings == [], "nobody asked for it to be elsewhere"


def test_a_mask_that_a_library_reset_at_process_group_start_is_set_again_before_pinning(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.threads(7, 8)
    row = rank.lived()
    assert rank.bound_again == 1
    assert row.strayed_threads == 0
    text = "2 threads outside the CPUs that --numa gave (4-5) at process-group start; bound again before pinning"
    assert rank.where.warnings == [f"rank 3: {text}"]


def test_a_mask_that_is_lost_in_the_window_is_said_and_left_alone(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.where.joined()
    rank.where.pinned(SLABS)
    rank.threads(7)
    assert rank.where.close(SLABS).strayed_threads == 1
    assert rank.bound_again == 0, "its pages are pinned by now"
    assert rank.where.warnings == [
        "rank 3: 1 thread outside the CPUs that --numa gave (4-5) by the end of the window",
    ]


TWICE = """
import sys, threading
from pathlib import Path
from offbench.placement import affinity, bind, strayed_threads
release = threading.Event()
threading.Thread(target=release.wait).start()   # what a library started before anyone bound
first = bind("0000:1a:00.0", Path(sys.argv[1]), node=0)
again = bind("0000:1a:00.0", Path(sys.argv[1]), node=0)
print(first == again, affinity() == list(first.cpus), strayed_threads(first.cpus))
release.set()
"""


def one_cpu_node(root: Path) -> list[str]:
    """A made-up /sys whose node 0 has the last of this process's CPUs, and an environment in which no program is."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU: nothing to bind to")
    put(root / "devices/system/node/node0/cpulist", str(cpus[-1]))
    put(root / "devices/system/node/node1/cpulist", placement.format_cpulist(cpus[:-1]))
    return [str(root)]


def child(code: str, words: Iterable[str], **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, check=False, timeout=60, cwd=ROOT, env={"PATH": "", **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_binding_reaches_older_threads_and_a_second_time_undoes_nothing(tmp_path: Path) -> None:
    assert child(TWICE, one_cpu_node(tmp_path)) == "True True []\n"


EARLY = """
import sys
from offbench import whereabouts, worker
class Seen(Exception): pass
def take(*words):
    raise Seen(f"torch is loaded: {'torch' in sys.modules}")
whereabouts.Whereabouts.take = take
print(worker.main())
"""


def test_a_rank_is_bound_before_torch_is_loaded(tmp_path: Path) -> None:
    spec = RunSpec(mode=Mode(device="cpu", world=1, nproc=1))
    (tmp_path / "spec.json").write_text(spec.canonical())
    places = {"OFFBENCH_SPEC": str(tmp_path / "spec.json"), "OFFBENCH_OUT": str(tmp_path), "LOCAL_RANK": "0"}
    assert child(EARLY, [], **places) == "1\n"
    assert "torch is loaded: False" in json.loads((tmp_path / "failure-0.json").read_text())["message"]


def test_no_numactl_and_no_libnuma_are_needed(tmp_path: Path) -> None:
    code = TWICE + 'print("numa" in open("/proc/self/maps").read().replace("numa_maps", ""))'
    assert child(code, one_cpu_node(tmp_path)).splitlines()[-1] == "False", "PATH is empty, libnuma is not loaded"


SECCOMP = """
import ctypes, errno, mmap, os, struct, sys
from offbench import pages, placement
def step(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
blocked = [238, 279]   # set_mempolicy, move_pages on x86-64
filter_ = [step(0x20, 0, 0, 0)]                                          # load the call's number
filter_ += [step(0x15, len(blocked) - i, 0, number) for i, number in enumerate(blocked)]
filter_ += [step(0x06, 0, 0, 0x7FFF0000), step(0x06, 0, 0, 0x00050000 | errno.EPERM)]   # allow, or refuse
code = ctypes.create_string_buffer(b"".join(filter_))
program = struct.pack("HxxxxxxP", len(filter_), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
holder = ctypes.create_string_buffer(program)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(holder)), 0, 0):
    print("no filter"); sys.exit()
size = 64 * mmap.PAGESIZE
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = bytes(size)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert placement.abilities() == {"set_mempolicy": False, "setaffinity": True, "move_pages": False}
counted = sum(pages.by_node([(at, size)]).values()) == size
print(placement.prefer_node(0), "|", placement.page_nodes([at]), "|", counted)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter names the calls of x86-64")
def test_a_container_that_forbids_the_calls_is_a_fact_and_no_error() -> None:
    told = child(SECCOMP, [])
    if told == "no filter\n":
        pytest.skip("this kernel takes no seccomp filter")
    assert told == f"{os.strerror(errno.EPERM)} | None | True\n"


def test_the_level_of_binding_that_was_reached_is_in_the_record(tmp_path: Path) -> None:
    refused = replace(BOUND, memory="refused: Operation not permitted")
    assert Rank(tmp_path / "a", refused).lived().memory_policy == "refused: Operation not permitted"
    outside = Rank(tmp_path / "b", Placement("refused", "this process may use CPUs 0-2, none of node 1 (4-7)", 1))
    outside.threads(7)
    row = outside.lived()
    assert row.numa == "refused: this process may use CPUs 0-2, none of node 1 (4-7)"
    assert (row.strayed_threads, row.local_bytes, outside.bound_again) == (None, 2 * GIB, 0), "a lucky unbound rank"


def test_pages_an_allocator_put_on_another_node_are_seen_whatever_was_asked_for(tmp_path: Path) -> None:
    """hipHostMalloc ignores the NUMA flag, caches hand blocks of one node to another: only the pages tell."""
    rank = Rank(tmp_path)
    rank.pages = {0: 0.25, 1: 0.75}
    row = rank.lived()
    assert row.numa == "node 1"
    assert row.remote_bytes == pytest.approx(GIB / 2, rel=1e-2)
    text = "only 1.5 of 2.0 GiB of pinned memory are on the node of its GPU (0.0 on its socket, 0.5 remote"
    assert [warning.startswith(f"rank 3: {text}") for warning in rank.where.warnings] == [True]


def test_pages_that_leave_during_the_window_are_said(tmp_path: Path) -> None:
    rank = Rank(tmp_path, bound=None)
    rank.where.pinned(SLABS)
    rank.pages = {0: 0.5, 1: 0.5}
    assert rank.where.close(SLABS).remote_bytes == pytest.approx(GIB, rel=1e-2)
    assert rank.where.warnings == [
        "rank 3: pinned memory has left its node: 2.0 GiB were local after pinning",
    ]


@pytest.mark.parametrize(
    ("nbytes", "mates", "said"),
    [(28 * GIB, 4, True), (28 * GIB, 2, False), (61 * GIB, 1, True), (60 * GIB, 1, False)],
)
def test_a_node_too_full_for_what_will_be_pinned_is_said_before(
    nbytes: int, mates: int, said: bool, tmp_path: Path
) -> None:
    rank = Rank(tmp_path, mates=mates)
    rank.where.planned(nbytes)
    assert bool(rank.where.warnings) == said
    if said:
        need = f"{nbytes * mates / GIB:.1f} GiB are to be pinned on node 1 by {mates} rank"
        assert need in rank.where.warnings[0]
        assert "60.0 GiB are free there: the rest will lie on other nodes" in rank.where.warnings[0]
    unasked = Rank(tmp_path, bound=None, mates=mates)
    unasked.where.planned(nbytes)
    assert unasked.where.warnings == []


def test_a_cpu_device_has_no_gpu_to_be_near_to(tmp_path: Path) -> None:
    where = Whereabouts.take(0, [], numa=True)
    where.joined()
    where.planned(1 << 60)
    where.pinned(SLABS)
    row = where.close(SLABS)
    assert (row.numa, row.gpu_node, row.local_bytes, row.unknown_bytes) == ("not applicable", None, None, None)
    assert where.warnings == []


def test_a_rank_is_where_its_own_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = dict(zip("abcd", (1, 1, 0, 1), strict=True))
    monkeypatch.setattr(whereabouts, "home_node", lambda bus_id, nodes: homes[bus_id])
    bound: list[tuple[str | None, int | None]] = []

    def bind(bus_id: str | None, node: int | None) -> Placement:
        bound.append((bus_id, node))
        return BOUND

    monkeypatch.setattr(placement, "bind", bind)
    found = Whereabouts.take(3, list("abcd"), numa=True)
    assert (found.bus_id, found.node, found.mates, bound) == ("d", 1, 3, [("d", 1)])
    assert Whereabouts.take(2, list("abcd"), numa=False).bound is None
    found.seen("c")
    assert found.bus_id == "d", "NVML's word stands"
    late = Whereabouts.take(0, [], numa=False)
    late.seen("c")
    assert (late.bus_id, late.node) == ("c", 0), "without NVML the address is CUDA's"


def test_nvml_knows_the_node_where_the_kernel_does_not(tmp_path: Path) -> None:
    text = described("flat-guest")
    write_root(tmp_path, text)
    nodes = whereabouts.kernel.read_nodes(tmp_path / "sys", tmp_path / "proc")
    bdf = str(text["nvml"][0]["bdf"])

    class Nvml(FakeNvml):
        def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> int:
            return [row["bdf"] for row in text["nvml"]].index(bus_id.decode())

    def ask(nvml: FakeNvml) -> int | None:
        return home_node(bdf, nodes, tmp_path / "sys", nvml)

    blind = text | {"nvml": [row | {"node": None} for row in text["nvml"]]}
    assert ask(Nvml(blind)) is None
    knows = text | {"nvml": [row | {"node": 1} for row in text["nvml"]]}
    assert ask(Nvml(knows)) == 1
    assert ask(Nvml(knows, broken="no driver")) is None
