"""Detection on described machines: what real hosts do wrong, one test each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbench.topology import detect, load_machine, tree
from tests.topology.roots import NAMES, FakeNvml, codes, cuda_silent, described, look, nodes, pairs, put, write_root


@pytest.mark.parametrize("name", NAMES)
def test_every_gpu_is_in_a_group_on_a_link_and_in_the_drawing(name: str, tmp_path: Path) -> None:
    machine = look(tmp_path, described(name))
    every = {gpu.index for gpu in machine.gpus}
    assert {index for group in machine.groups for index in group.gpus} == every
    assert {index for link in machine.links for index in link.gpus} == every
    drawn = [branch.gpu.index for _, branch in tree(machine).walk() if branch.gpu is not None]
    assert sorted(drawn) == sorted(every)
    assert all(note.text and note.todo for note in machine.notes)


def test_minus_one_is_unknown_and_never_node_0(tmp_path: Path) -> None:
    machine = look(tmp_path, described("flat-guest"))
    assert nodes(machine) == [None] * 8
    assert machine.gpus[0].numa.confidence == "none"
    assert [(claim.source, claim.value) for claim in machine.gpus[0].numa.claims] == [("sysfs numa_node", "-1")]
    assert "numa-unknown" in codes(machine)


def test_minus_one_is_node_0_where_only_one_node_has_cpus(tmp_path: Path) -> None:
    text = described("laptop")
    text["nvml"][0]["node"] = None
    machine = look(tmp_path, text)
    assert nodes(machine) == [0]
    assert machine.gpus[0].numa.confidence == "medium"


def test_the_next_source_speaks_where_sysfs_does_not(tmp_path: Path) -> None:
    text = described("flat-guest")
    for index, row in enumerate(text["nvml"]):
        row["node"] = index // 4
    machine = look(tmp_path, text)
    assert nodes(machine) == [0] * 4 + [1] * 4
    assert {gpu.numa.confidence for gpu in machine.gpus} == {"medium"}


@pytest.mark.parametrize(("place", "value", "node"), [("0000:97:01.0", "1", 1), ("", "0-3", 0), ("", "0-7", None)])
def test_a_bridge_above_or_a_cpu_list_stands_in(place: str, value: str, node: int | None, tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    text["pci"] = {path: [*row[:2], -1, *row[3:]] for path, row in text["pci"].items()}
    text["nvml"] = []
    write_root(tmp_path, text)
    gpu = tmp_path / "sys/bus/pci/devices/0000:99:00.0"
    name = "numa_node" if place else "local_cpulist"
    put((gpu.parent / place if place else gpu) / name, value)
    machine = detect({}, tmp_path / "sys", tmp_path / "proc", FakeNvml(text), cuda_silent)
    assert [g.numa.value for g in machine.gpus if g.bdf == "0000:99:00.0"] == [node]


def test_sources_that_differ_are_shown_and_the_most_trusted_is_used(tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    text["nvml"][2]["node"] = 1
    machine = look(tmp_path, text)
    gpu = machine.gpus[2]
    assert (gpu.numa.value, gpu.numa.confidence) == (1, "conflict")
    assert {claim.value for claim in gpu.numa.claims} == {"0", "1"}
    [note] = machine.noted("conflict")
    assert "sysfs numa_node says 0" in note.text
    assert "NVML memory affinity says 1" in note.text


@pytest.mark.parametrize(("name", "count"), [("laptop", 1), ("no-gpu", 0)])
def test_audio_functions_and_on_board_vga_are_no_gpus(name: str, count: int, tmp_path: Path) -> None:
    assert len(look(tmp_path, described(name)).gpus) == count


def test_several_functions_of_a_slot_are_one_card(tmp_path: Path) -> None:
    text = described("two-gpus-bare")
    text["pci"]["pci0000:00/0000:00:01.1/0000:01:00.1"] = ["0302", "10de:26b9", 0, "16.0 GT/s PCIe", 16]
    assert len(look(tmp_path, text).gpus) == 2


def test_gpu_memory_nodes_are_listed_and_never_a_home(tmp_path: Path) -> None:
    machine = look(tmp_path, described("grace-hopper"))
    assert [node.kind for node in machine.nodes] == ["cpu", "gpu"] + ["memory_only"] * 7
    assert nodes(machine) == [0]
    assert machine.gpus[0].memory_node == 1


def test_nvml_naming_cpu_and_memory_nodes_means_the_cpu_node(tmp_path: Path) -> None:
    class Mixed(FakeNvml):
        def nvmlDeviceGetMemoryAffinity(self, handle: Any, words: int, scope: int) -> list[int]:
            return [0b11]  # the CPU node and the GPU's own

    text = described("grace-hopper")
    machine = look(tmp_path, text, nvml=Mixed(text))
    assert (machine.gpus[0].numa.value, machine.gpus[0].numa.confidence) == (0, "high")


def test_pcie_is_not_the_path_of_a_coherent_part(tmp_path: Path) -> None:
    machine = look(tmp_path, described("grace-hopper"))
    link = machine.link("gpu0")
    assert (link.kind, link.rates) == ("c2c", ())
    assert "not the data path" in (link.note or "")
    assert "not-pcie" in codes(machine)


def test_sockets_come_from_packages_not_from_nodes(tmp_path: Path) -> None:
    machine = look(tmp_path, described("nps4-irregular"))
    sockets = [link for link in machine.links if link.kind == "socket"]
    assert [link.id for link in sockets] == ["socket0", "socket1"]
    assert sorted(machine.gpus[index].numa.value for index in sockets[0].gpus) == [1, 1, 3, 3]  # type: ignore[type-var]
    assert machine.nodes[0].distances[:5] == (10, 12, 12, 12, 32)


def test_a_cpuset_without_the_node_is_said_and_the_node_kept(tmp_path: Path) -> None:
    machine = look(tmp_path, {**described("8xh200-two-sockets"), "allowed": "0-1"})
    assert machine.nodes[0].cpus_allowed == (0, 1)
    assert machine.nodes[1].cpus_allowed == ()
    assert nodes(machine) == [0] * 4 + [1] * 4
    assert "cpuset" in codes(machine)


def test_an_offline_cpu_in_the_list_of_a_node_is_left_out(tmp_path: Path) -> None:
    machine = look(tmp_path, {**described("8xh200-two-sockets"), "online": "0-6"})
    assert machine.nodes[1].cpus == (4, 5, 6)


def test_interleaved_cpu_numbers(tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    text["nodes"]["0"]["cpus"], text["nodes"]["1"]["cpus"] = "0,2,4,6", "1,3,5,7"
    for index, row in enumerate(text["nvml"]):
        row["node"], row["cpus"] = None, "0,2" if index < 4 else "1,3"
    machine = look(tmp_path, text)
    assert nodes(machine) == [0] * 4 + [1] * 4
    assert {gpu.numa.confidence for gpu in machine.gpus} == {"high"}


def test_an_empty_affinity_from_nvml_is_no_word(tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    for row in text["nvml"]:
        row["cpus"] = ""
    machine = look(tmp_path, text)
    assert {gpu.numa.confidence for gpu in machine.gpus} == {"high"}


def test_more_sockets_than_nodes_is_said(tmp_path: Path) -> None:
    text = described("laptop")
    write_root(tmp_path, text)
    put(tmp_path / "sys/devices/system/cpu/cpu7/topology/physical_package_id", "1")
    machine = detect({}, tmp_path / "sys", tmp_path / "proc", FakeNvml(text), cuda_silent)
    assert "sockets-without-nodes" in codes(machine)
    assert machine.nodes[0].package is None


def test_a_container_without_pci_shows_what_nvml_knows(tmp_path: Path) -> None:
    machine = look(tmp_path, described("container"))
    assert nodes(machine) == [0, 0, 1, 1]
    assert pairs(machine, "unverified") == [(0, 1), (2, 3)]
    assert "no-sysfs" in codes(machine)


def test_without_nvml_the_kernel_alone_speaks(tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    machine = look(tmp_path, text, nvml=FakeNvml(text, broken="Driver Not Loaded"))
    assert nodes(machine) == [0] * 4 + [1] * 4
    assert {gpu.numa.confidence for gpu in machine.gpus} == {"medium"}
    [note] = [note for note in machine.notes if note.code == "no-nvml"]
    assert "Driver Not Loaded" in note.text


def test_wsl_has_no_topology_and_says_so(tmp_path: Path) -> None:
    text = {**described("container"), "kernel": "5.15.90.1-microsoft-standard-WSL2", "nodes": {}, "levels": {}}
    text["nvml"] = [{**text["nvml"][0], "node": None}]
    machine = look(tmp_path, text)
    assert "wsl" in codes(machine)
    assert nodes(machine) == [None]


def test_an_empty_root_is_no_error(tmp_path: Path) -> None:
    machine = detect({}, tmp_path / "sys", tmp_path / "proc", FakeNvml({"nvml": []}), cuda_silent)
    assert machine.gpus == ()
    assert {"no-gpu", "no-sysfs", "no-numa"} <= codes(machine)


def test_addresses_above_16_bits_of_domain(tmp_path: Path) -> None:
    text = described("two-gpus-bare")
    old = list(text["pci"].items())
    text["pci"] = {path.replace("0000:40", "10000:40").replace("0000:41", "10000:41"): row for path, row in old}
    text["nvml"][1]["bdf"] = "10000:41:00.0"
    machine = look(tmp_path, text)
    assert [gpu.bdf for gpu in machine.gpus] == ["0000:01:00.0", "10000:41:00.0"]
    assert machine.gpus[1].root == "pci10000:40"


def test_a_copied_root_is_read_as_the_kernel_of_that_host(tmp_path: Path) -> None:
    write_root(tmp_path, described("8xh200-two-sockets"))
    machine = load_machine(str(tmp_path))
    assert machine.source.kind == "root"
    assert pairs(machine, "shared") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {gpu.cuda_ordinal for gpu in machine.gpus} == {None}


def test_this_host_answers_in_under_a_second_and_loads_no_cuda() -> None:
    code = (
        "import time, offbench.topology as t; began = time.process_time(); t.detect();"
        "print(time.process_time() - began, 'libcuda' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.split()
    assert float(seconds) < 1.0
    assert loaded == "False"
