from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from offbench.placement import parse_cpulist
from offbench.topo.draw import draw, figures
from offbench.topology.imports import load_machine
from offbench.topology.links import Bridge, Group, Link, Pcie, Rate
from offbench.topology.model import Evidence, Gpu, Host, Machine, NumaNode, Source
from tests.topology.roots import NAMES, described, look

GIB = 2**30
GEN5 = Pcie(32.0, 16)


def rates(kind: str, *figures: float, at_least: bool = False) -> tuple[Rate, ...]:
    ways = ("in", "out", "both")[: len(figures)]
    return tuple(Rate(w, f * GIB, kind, "test", at_least) for w, f in zip(ways, figures, strict=True))  # type: ignore[arg-type]


def node(number: int, package: int | None = 0, kind: str = "cpu") -> NumaNode:
    cpus = tuple(range(8 * number, 8 * number + 8)) if kind == "cpu" else ()
    return NumaNode(number, kind, cpus, cpus, package, memory_bytes=512 * GIB)  # type: ignore[arg-type]


def one_gpu() -> Machine:
    gpu = Gpu(0, "0000:05:00.0", Evidence(0, "high"), 0, "pci0000:00", pcie=GEN5, name="NVIDIA H200")
    links = (Link("gpu0", "gpu_link", (0,), rates("line rate", 58.7, 58.7, 117.4)), Link("socket0", "socket", (0,)))
    return Machine(
        Source("live"),
        Host(product="Box [9]", hypervisor=True),
        nodes=(node(0),),
        gpus=(gpu,),
        links=links,
        groups=(Group((0,), "unverified"),),
        title="1 x NVIDIA H200, 1 NUMA node",
    )


def sixteen() -> Machine:
    """Two sockets of two quads of two pairs, below switches of switches."""
    gpus, bridges, links, groups = [], [], [], []
    for quad in range(4):
        top, root = f"0000:{quad + 1}0:00.0", f"pci0000:{quad}0"
        members = tuple(range(4 * quad, 4 * quad + 4))
        bridges.append(Bridge(top, root, None, None, members, GEN5))
        links.append(Link(f"uplink {top}", "uplink", members, rates("measured", 50, 50), top, sharing="shared"))
        for pair in (0, 1):
            below = f"0000:{quad + 1}{pair + 1}:00.0"
            two = members[2 * pair : 2 * pair + 2]
            bridges.append(Bridge(below, root, top, None, two, GEN5))
            links.append(
                Link(f"uplink {below}", "uplink", two, rates("line rate", 58.7, 58.7), below, sharing="shared")
            )
            groups.append(Group(two, "shared", f"uplink {below}"))
            for index in two:
                bdf = f"0000:{index + 64:02x}:00.0"
                gpus.append(Gpu(index, bdf, Evidence(quad // 2, "high"), quad // 2, root, (top, below), GEN5))
                links.append(Link(f"gpu{index}", "gpu_link", (index,), rates("line rate", 58.7, 58.7)))
    links += [Link(f"socket{s}", "socket", tuple(range(8 * s, 8 * s + 8))) for s in (0, 1)]
    nodes = (node(0), node(1, 1), node(9, None, "gpu"))
    return Machine(
        Source("live"),
        nodes=nodes,
        bridges=tuple(bridges),
        gpus=tuple(gpus),
        links=tuple(links),
        groups=tuple(groups),
        title="16 x GPU, 2 NUMA nodes",
    )


def text(machine: Machine, width: int = 80, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    draw(machine, Console(file=file, width=width, force_terminal=False))
    file.flush()
    return [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]


def test_one_gpu() -> None:
    assert text(one_gpu()) == [
        "1 x NVIDIA H200, 1 NUMA node",
        "                                                 in     out    both  GiB/s by",
        "Box [9], guest",
        "└─ socket 0, node 0, 512 GiB, CPUs 0-7            -       -       -  unknown",
        "   └─ GPU 0  Gen5 x16  05:00.0                 58.7    58.7   117.4  line rate",
        "GiB/s; in: host to device, both: in and out at once",
    ]


def test_eight_gpus_of_the_shipped_machine() -> None:
    lines = text(load_machine("seed-8xh200"))
    assert lines[1] == "from seed-8xh200: not this machine"
    assert [line.split()[-4:] for line in lines if "─ socket" in line] == [["-", "-", "155.0", "measured"]] * 2
    assert len([line for line in lines if "uplink" in line and " 52.0 " in line]) == 4
    assert len([line for line in lines if "GPU " in line and "Gen5 x16" in line]) == 8
    assert max(map(len, lines)) <= 80


def test_sixteen_gpus_fold_equal_neighbours() -> None:
    lines = text(sixteen())
    assert [line.split("GPUs ")[1].split()[0] for line in lines if "GPUs " in line][:3] == ["0-1", "2-3", "4-5"]
    assert len(lines) <= 30, "one screen"
    assert "│  ├─ uplink 10:00.0, shared                   50.0    50.0       -  measured" in lines
    assert "│  │  └─ uplink 12:00.0, shared                58.7    58.7       -  line rate" in lines
    assert "NUMA nodes 9: GPU memory, never bound to" in lines


@pytest.mark.parametrize("name", NAMES)
def test_every_described_machine_fits_80_columns_with_all_its_gpus(name: str, tmp_path: Path) -> None:
    machine = look(tmp_path, described(name))
    lines = text(machine)
    assert max(map(len, lines)) <= 80
    shown: set[int] = set()
    for line in lines:
        if found := re.search(r"─ GPUs? ([\d,-]+)", line):
            shown |= parse_cpulist(found[1])
    assert shown == {gpu.index for gpu in machine.gpus}


def test_a_slower_neighbour_keeps_its_own_line() -> None:
    machine = sixteen()
    links = [replace(link, pcie=Pcie(16.0, 16)) if link.id == "gpu1" else link for link in machine.links]
    lines = text(replace(machine, links=tuple(links)))
    assert any("GPU 0  Gen5 x16  40:00.0" in line for line in lines)
    assert any("GPU 1  Gen4 x16  41:00.0" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_any_width_keeps_the_columns(width: int) -> None:
    lines = text(sixteen(), width)
    rows = [line for line in lines if line.endswith(("line rate", "measured", "unknown", "by"))]
    assert max(map(len, rows)) <= min(width, 100)
    assert len({line.index("58.7") for line in rows if "58.7" in line}) == 1
    assert all(" 58.7    58.7 " in line for line in rows if "Gen5" in line)


def test_a_plain_terminal_gets_plain_lines() -> None:
    lines = text(one_gpu(), encoding="ascii")
    assert any(line.startswith("   `- GPU 0") for line in lines)


def test_without_a_gpu_sockets_and_nodes_are_shown() -> None:
    lines = text(Machine(Source("live"), nodes=(node(0), node(1, 1)), title="no GPU, 2 NUMA nodes"))
    assert lines == [
        "no GPU, 2 NUMA nodes",
        "host",
        "├─ socket 0, node 0, 512 GiB, CPUs 0-7",
        "└─ socket 1, node 1, 512 GiB, CPUs 8-15",
    ]


def test_nothing_known_is_no_error() -> None:
    assert text(Machine(Source("live"))) == ["a machine", "host"]


def test_gpus_whose_place_is_unknown_hang_below_unknown() -> None:
    gpus = tuple(Gpu(i, f"0000:00:1{i}.0", Evidence(None, "none"), None, "pci0000:00") for i in range(3))
    links = tuple(Link(f"gpu{i}", "gpu_link", (i,)) for i in range(3))
    flat = Group((0, 1, 2), "unverified", None, ("on the same root bus",))
    lines = text(Machine(Source("live"), nodes=(node(0),), gpus=gpus, links=links, groups=(flat,)))
    assert "└─ socket unknown, NUMA node unknown" in lines
    assert "   └─ root bus 00" in lines
    assert any(line.startswith("      ├─ GPU 0  link unknown  00:10.0") for line in lines)
    assert "GPUs 0-2 may share a way to the CPU (on the same root bus)" in lines


def test_several_nodes_of_a_socket_have_lines_of_their_own() -> None:
    gpus = tuple(Gpu(i, None, Evidence(i, "high"), 0, data_path="c2c") for i in (0, 1))
    links = tuple(Link(f"gpu{i}", "c2c", (i,), rates("measured", 346, at_least=True)) for i in (0, 1))
    between = Link("upi", "inter_socket", (0, 1), rates("measured", 100, 100, 150))
    lines = text(Machine(Source("live"), nodes=(node(0), node(1)), gpus=gpus, links=(*links, between)))
    assert {"│  ├─ node 0, 512 GiB, CPUs 0-7", "│  └─ node 1, 512 GiB, CPUs 8-15"} <= set(lines)
    assert any("GPU 1  C2C" in line and ">=346.0" in line for line in lines)
    assert any(line.startswith("└─ upi") and line.endswith("150.0  measured") for line in lines)
    assert lines[-1].endswith(">=: never seen to limit")


def test_figures_are_of_one_kind_and_claims_are_marked() -> None:
    mixed = Link("u", "uplink", (0,), rates("line rate", 58.7, 58.7, 117.4) + rates("measured", 52.0))
    assert figures(mixed) == ("52.0", "-", "-", "measured")
    claimed = Link("u", "uplink", (0,), rates("assumed", 14.7), emulated="AWS")
    assert figures(claimed) == ("14.7", "-", "-", "assumed?")
    assert figures(Link("u", "uplink", (0,))) == ("-", "-", "-", "unknown")
    assert figures(None) == ("", "", "", "")


def test_hidden_sharing_is_said_in_words() -> None:
    machine = one_gpu()
    two = replace(machine.gpus[0], index=1, bdf="0000:06:00.0")
    groups = (Group((0,), "unverified"), Group((1,), "unverified"))
    link = Link("gpu1", "gpu_link", (1,))
    of = replace(machine, gpus=(machine.gpus[0], two), groups=groups, links=(*machine.links, link))
    assert "which GPUs share an uplink is not visible here" in text(of)
