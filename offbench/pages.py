"""On which NUMA nodes the pages of given address ranges lie, and how far that is from a GPU. No torch here.

move_pages(2) without targets moves nothing and says where a page is: it is asked about these ranges and nothing else.
Where a container forbids it, /proc/self/numa_maps counts the pages of whole mappings instead. What neither tells is
unknown, never local. Where one node has all the memory, everything is local and nobody is asked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from offbench.placement import PAGE, PROC, page_nodes
from offbench.topology.model import NumaNode, PageBytes

Ranges = Sequence[tuple[int, int]]
"""(address, bytes), page-aligned, without overlap."""
ByNode = dict[int | None, int]
"""NUMA node -> bytes; None: pages of which the kernel does not say it."""
Ask = Callable[[Sequence[int]], list[int] | None]
"""Node of the page at each address, negative where there is none; None when the kernel refuses to tell."""

EVERY_PAGE_BYTES = 256 << 20
"""Up to so much, every page is asked about."""
STRIDE = 509
"""Pages from one that is asked about to the next in more than that: prime, so that pages dealt out to several nodes in
turn are seen on all of them."""


def look(
    ranges: Ranges, gpu_node: int | None, nodes: Sequence[NumaNode], proc: Path = PROC, ask: Ask = page_nodes
) -> PageBytes | None:
    """Bytes of the ranges by distance from a GPU on `gpu_node`; None without a range.

    Takes milliseconds where move_pages is allowed; numa_maps walks the page tables of the whole process. Either way
    keep it out of a measured window.
    """
    total = sum(nbytes for _, nbytes in ranges)
    if not total:
        return None
    if len([node for node in nodes if node.memory_bytes != 0]) == 1:
        return PageBytes(local_bytes=total)
    if gpu_node is None or not nodes:
        return PageBytes(unknown_bytes=total)
    return seen_from(by_node(ranges, proc, ask), gpu_node, nodes)


def by_node(ranges: Ranges, proc: Path = PROC, ask: Ask = page_nodes) -> ByNode:
    """Bytes of the ranges on each node, of a large amount by sampling."""
    step = PAGE * (1 if sum(nbytes for _, nbytes in ranges) <= EVERY_PAGE_BYTES else STRIDE)
    samples = [(at, min(step, start + size - at)) for start, size in ranges for at in range(start, start + size, step)]
    places = ask([address for address, _ in samples])
    if places is None:
        return _from_maps(ranges, proc)
    found: Counter[int | None] = Counter()
    for place, (_, nbytes) in zip(places, samples, strict=True):
        found[place if place >= 0 else None] += nbytes
    return dict(found)


def seen_from(found: ByNode, gpu_node: int, nodes: Sequence[NumaNode]) -> PageBytes:
    """Distances from a GPU on `gpu_node`. A node of an unknown socket, other than the GPU's own, is at an unknown
    distance."""
    package = {node.id: node.package for node in nodes}
    home, mine = memory_home(gpu_node, nodes), package.get(gpu_node)
    out = PageBytes()
    for node, nbytes in found.items():
        if node == home:
            out += PageBytes(local_bytes=nbytes)
        elif node is None or mine is None or package.get(node) is None:
            out += PageBytes(unknown_bytes=nbytes)
        else:
            out += PageBytes(same_socket_bytes=nbytes) if package[node] == mine else PageBytes(remote_bytes=nbytes)
    return out


def memory_home(node: int, nodes: Sequence[NumaNode]) -> int:
    """The node itself or, where it has CPUs but no memory, the nearest one with memory by the kernel's distances."""
    own = next((one for one in nodes if one.id == node), None)
    if own is None or own.memory_bytes != 0 or len(own.distances) != len(nodes):
        return node
    far = dict(zip(sorted(one.id for one in nodes), own.distances, strict=True))
    return min((one.id for one in nodes if one.memory_bytes), key=lambda other: (far[other], other), default=node)


def _from_maps(ranges: Ranges, proc: Path) -> ByNode:
    """From numa_maps. Neighbouring mappings may have been merged into one line: a line that reaches beyond the ranges
    counts only where all of its pages are on one node."""
    left, found = sum(nbytes for _, nbytes in ranges), Counter[int | None]()
    for start, end, pages in _mappings(proc):
        inside = sum(max(0, min(end, at + size) - max(start, at)) for at, size in ranges)
        if inside == end - start:
            counted = pages
        elif inside and len(pages) == 1:
            counted = dict.fromkeys(pages, inside)
        else:
            continue
        found.update(counted)
        left -= sum(counted.values())
    return dict(found) | ({None: left} if left > 0 else {})


def _mappings(proc: Path) -> Iterable[tuple[int, int, ByNode]]:
    """(start, end, bytes by node) of each mapping. numa_maps names only the start; maps knows the end."""
    try:
        lines, maps = (proc / "self/numa_maps").read_text().splitlines(), (proc / "self/maps").read_text()
    except OSError:
        return
    ends = {
        int(start, 16): int(end, 16) for start, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", maps, re.MULTILINE)
    }
    for line in lines:
        start, size = int(line.split(" ", 1)[0], 16), re.search(r" kernelpagesize_kB=(\d+)", line)
        if size is not None and start in ends:
            counts = re.findall(r" N(\d+)=(\d+)", line)
            yield start, ends[start], {int(node): int(count) * int(size[1]) * 1024 for node, count in counts}
