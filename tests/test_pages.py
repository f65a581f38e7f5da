from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbench.pages import EVERY_PAGE_BYTES, STRIDE, Ask, by_node, look, memory_home, seen_from
from offbench.placement import PAGE, PROC, SYSFS, page_nodes
from offbench.topology.model import NumaNode, PageBytes
from offbench.topology.sysfs import read_nodes

MIB = 1 << 20
FOUR = tuple(NumaNode(i, "cpu", (i,), (i,), package=i // 2, memory_bytes=1) for i in range(4))
"""Two sockets of two nodes."""


def all_on(node: int) -> Ask:
    return lambda addresses: [node] * len(addresses)


def refuse(addresses: Sequence[int]) -> None:
    """A container that forbids move_pages."""


def maps(proc: Path, *lines: tuple[int, int, str]) -> Path:
    """/proc with mappings: (start, bytes, counts)."""
    (proc / "self").mkdir(parents=True)
    (proc / "self/maps").write_text("".join(f"{a:x}-{a + n:x} rw-p 00000000 00:00 0 \n" for a, n, _ in lines))
    (proc / "self/numa_maps").write_text("".join(f"{a:x} default {text}\n" for a, _, text in lines))
    return proc


def test_the_real_kernel_knows_where_touched_pages_are() -> None:
    size = 64 * PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[: size // 2] = b"x" * (size // 2)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    places = page_nodes([start, start + size // 2])
    if places is not None:
        assert places[0] >= 0
        assert places[1] < 0, "nobody has touched that page"
        assert sum(n for node, n in by_node([(start, size)]).items() if node is not None) == size // 2
    told = by_node([(start, size)], ask=refuse)
    assert sum(told.values()) == size
    if (PROC / "self/numa_maps").exists():
        assert {node for node, n in told.items() if n} <= {node.id for node in read_nodes(SYSFS, PROC)} | {None}


def test_every_page_of_little_and_some_pages_of_much() -> None:
    asked: list[int] = []

    def ask(addresses: Sequence[int]) -> list[int]:
        asked[:] = addresses
        return [address // PAGE % 2 for address in addresses]

    assert by_node([(0, 4 * PAGE), (8 * PAGE, PAGE)], ask=ask) == {0: 3 * PAGE, 1: 2 * PAGE}
    assert asked == [0, PAGE, 2 * PAGE, 3 * PAGE, 8 * PAGE]
    much = EVERY_PAGE_BYTES + PAGE
    found = by_node([(0, much)], ask=ask)
    assert len(asked) == -(-much // (STRIDE * PAGE))
    assert sum(found.values()) == much
    assert found[0] == pytest.approx(much / 2, rel=0.02), "pages in turn on two nodes are seen on both"


@given(st.integers(2, 16))
def test_interleaving_over_any_number_of_nodes_shows(nodes: int) -> None:
    found = by_node([(0, 2 * EVERY_PAGE_BYTES)], ask=lambda addresses: [a // PAGE % nodes for a in addresses])
    assert set(found) == set(range(nodes))


def test_mappings_stand_in_where_the_kernel_refuses_to_answer(tmp_path: Path) -> None:
    base = 0x7F0000000000
    proc = maps(
        tmp_path / "proc",
        (base, 2 * MIB, "anon=512 dirty=512 N0=128 N1=384 kernelpagesize_kB=4"),
        (base + 4 * MIB, 4 * MIB, "huge anon=2 N1=2 kernelpagesize_kB=2048"),
        (base + 8 * MIB, 4 * MIB, "anon=1024 N0=1024 kernelpagesize_kB=4"),
        (base + 16 * MIB, 4 * MIB, "anon=1024 N0=512 N1=512 kernelpagesize_kB=4"),
        (base + 24 * MIB, MIB, "file=/dev/nvidia0"),
    )

    def told(*ranges: tuple[int, int]) -> dict[int | None, int]:
        return by_node([(base + at * MIB, size * MIB) for at, size in ranges], proc, refuse)

    assert told((0, 2)) == {0: MIB // 2, 1: 3 * MIB // 2}
    assert told((4, 4)) == {1: 4 * MIB}, "huge pages count by their size"
    assert told((8, 1)) == {0: MIB}, "part of a merged mapping, all of it on one node"
    assert told((16, 1)) == {None: MIB}, "part of a merged mapping over two nodes proves nothing"
    assert told((16, 2), (18, 2)) == {0: 2 * MIB, 1: 2 * MIB}, "two slabs in one mapping"
    assert told((24, 1)) == {None: MIB}, "no counts is not verifiable, never local"
    assert told((0, 2), (40, 1)) == {0: MIB // 2, 1: 3 * MIB // 2, None: MIB}
    assert by_node([(base, MIB)], tmp_path / "nowhere", refuse) == {None: MIB}


def test_node_is_not_socket() -> None:
    found = seen_from({0: 1, 1: 2, 2: 4, 3: 8, None: 16}, 0, FOUR)
    assert found == PageBytes(local_bytes=1, same_socket_bytes=2, remote_bytes=12, unknown_bytes=16)
    assert found.total == 31
    assert seen_from({0: 1, 3: 8}, 3, FOUR) == PageBytes(8, 0, 1, 0)


def test_a_node_of_an_unknown_socket_is_at_an_unknown_distance() -> None:
    flat = tuple(NumaNode(i, "cpu", (i,), (i,), memory_bytes=1) for i in range(2))
    assert seen_from({0: 1, 1: 2}, 0, flat) == PageBytes(local_bytes=1, unknown_bytes=2)
    far_memory = (*FOUR, NumaNode(9, "memory_only", (), (), memory_bytes=1))
    assert seen_from({9: 5}, 0, far_memory) == PageBytes(unknown_bytes=5)


def test_one_node_is_local_without_asking_and_an_unknown_gpu_is_unknown() -> None:
    one = (NumaNode(0, "cpu", (0,), (0,), memory_bytes=1),)
    assert look([(0, 7 * PAGE)], None, one, ask=refuse) == PageBytes(local_bytes=7 * PAGE)
    empty = (*one, NumaNode(1, "cpu", (1,), (1,), memory_bytes=0))
    assert look([(0, PAGE)], 1, empty, ask=refuse) == PageBytes(local_bytes=PAGE), "all memory is on one node"
    assert look([(0, PAGE)], None, FOUR, ask=all_on(0)) == PageBytes(unknown_bytes=PAGE)
    assert look([(0, PAGE)], None, (), ask=all_on(0)) == PageBytes(unknown_bytes=PAGE)
    assert look([(0, PAGE)], 2, FOUR, ask=all_on(3)) == PageBytes(same_socket_bytes=PAGE)
    assert look([], 0, FOUR, ask=all_on(0)) is None, "nothing pinned is not zero bytes"


def test_cpus_without_memory_are_at_home_on_the_nearest_memory() -> None:
    nodes = (
        NumaNode(0, "cpu", (0,), (0,), 0, memory_bytes=1, distances=(10, 12, 32)),
        NumaNode(1, "cpu", (1,), (1,), 0, memory_bytes=0, distances=(12, 10, 20)),
        NumaNode(2, "cpu", (2,), (2,), 1, memory_bytes=1, distances=(32, 20, 10)),
    )
    assert [memory_home(node, nodes) for node in (0, 1, 2)] == [0, 0, 2]
    assert seen_from({0: 5, 2: 3}, 1, nodes) == PageBytes(local_bytes=5, remote_bytes=3)
    assert memory_home(7, nodes) == 7
