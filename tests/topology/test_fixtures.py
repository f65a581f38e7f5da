"""Descriptions of real machines against facts that were derived from them by other means."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from offbench.errors import UsageError
from offbench.topology import Machine, from_json, load_machine, to_json, with_claims
from tests.topology.fixtures import expected, fixture

FACTS = expected()
ONE_CARD = {"hwloc/32em64t-2n8c2t-pci-normalio.xml", "hwloc/32em64t-2n8c2t-pci-wholeio.xml"}
"""Their last two GPUs are functions 0 and 1 of one slot: one card, so one GPU fewer and no group."""


def load(name: str) -> Machine:
    return load_machine(str(fixture(name)))


def without_second_functions(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [gpu for gpu in facts["gpus"] if gpu["bdf"].endswith(".0")]


@pytest.mark.parametrize("name", FACTS)
def test_gpus_nodes_and_groups_are_those_of_the_file(name: str) -> None:
    machine, facts = load(name), FACTS[name]
    listed = without_second_functions(facts) if name in ONE_CARD else facts["gpus"]
    assert [gpu.bdf for gpu in machine.gpus] == [gpu["bdf"] for gpu in listed]
    known = [gpu["numa"][0] if len(gpu["numa"]) == 1 else None for gpu in listed]
    assert [gpu.numa.value for gpu in machine.gpus] == known
    assert [list(gpu.chain) for gpu in machine.gpus] == [gpu["chain"] for gpu in listed]
    bdfs = [gpu["bdf"] for gpu in facts["gpus"]]
    told = {(group["bridge"], tuple(bdfs[i] for i in group["gpus"])) for group in facts["shared_uplink_groups"]}
    if name in ONE_CARD:
        told = set()
    found = {
        (machine.link(group.link).bdf, tuple(machine.gpus[i].bdf for i in group.gpus))
        for group in machine.groups
        if group.link is not None
    }
    assert found == told
    assert {node.id for node in machine.nodes} == set(facts["numa_nodes"])


@pytest.mark.parametrize("name", FACTS)
def test_a_file_proves_no_sharing_and_says_what_it_cannot_tell(name: str) -> None:
    machine = load(name)
    assert {group.sharing for group in machine.groups} <= {"unverified"}
    assert all("known from a file only" in group.evidence for group in machine.groups)
    assert machine.noted("limit")
    if FACTS[name]["emulated_bridges"]:
        assert "emulated-bridges" in {note.code for note in machine.notes}


@pytest.mark.parametrize("name", FACTS)
def test_every_machine_survives_being_saved(name: str) -> None:
    machine = load(name)
    assert from_json(to_json(machine)) == machine


NODES: dict[str, list[int | None]] = {
    "8x4090_pix4.nccl-tests-307": [0, 0, 0, 0, 1, 1, 1, 1],
    "8xA10G_g5.48xlarge_flat.nccl-1298": [None] * 8,
    "8gpu_pix_pairs_phb.nccl-1439": [0, 0, 0, 0, 1, 1, 1, 1],
    "8gpu_pix_pairs_node.public-md": [0, 0, 0, 0, 1, 1, 1, 1],
    "8gpu_pix4_8nic.nccl-1405.gpurows": [0, 0, 0, 0, 1, 1, 1, 1],
    "8xA100_pxb_pairs.nvbandwidth-53": [0, 0, 0, 0, 1, 1, 1, 1],
    "8xH100_nvswitch_9nic.nccl-1453.gpurows": [0, 0, 0, 0, 1, 1, 1, 1],
    "8xH100_sys_nics_10nic.nccl-1264.gpurows": [0, 0, 0, 0, 1, 1, 1, 1],
    "8gpu_allsys_2numa.public-md": [0, 0, 0, 0, 1, 1, 1, 1],
    "8x4090_allsys_2numa.go-gpuallocator-17": [0, 0, 0, 0, 1, 1, 1, 1],
    "8xH200_kvm_guest.simllm": [0, 0, 0, 0, 1, 1, 1, 1],
    "8xA100_nps4_3311775x.nccl-1435.gpu0-6": [3, 3, 1, 1, 7, 7, 5],
    "8gpu_snc_irregular.sglang-13973.gpu0-5": [0, 0, 0, 1, 2, 2],
    "8gpu_unbalanced_6_2.public-txt": [0, 0, 0, 0, 0, 0, 1, 1],
    "8gpu_topo_mp_nopairs.deepep-60.gpu0-3": [0, 0, 0, 0],
    "8gpu_cpuset_interleaved.mooncake-2039.gpu0-4": [0, 0, 0, 0, 1],
    "3gpu_slurm_cpuset.nccl-tests-320": [1, 1, 1],
    "8xA100_nv12_nicsys.public-md.gpu0-6": [0, 0, 0, 0, 1, 1, 1],
    "8xB200_gpu2_nvlink_down.vllm-16336.gpu0-5": [0, 0, 0, 0, 1, 1],
    "4xL40S_2socket.miss-alignment-106": [0, 0, 1, 1],
    "4gpu_vm_phb_8nic.public-md.gpurows": [0, 0, 0, 0],
    "4gpu_old_driver_nonuma_nv3.public-txt": [0, 0, 1, 1],
    # One CPU list for all GPUs may be a node or the whole host: unknown is the right answer.
    "4xV100_old_driver_nonuma.public-txt": [None] * 4,
    "1xGH200.nvbandwidth-23": [0],
    "1gpu_on_node1_2nic.vllm-env": [1],
    "1gpu_docker_cpuset.public-md": [0],
    "2gpu_phb_workstation.vllm-env": [0, 0],
    "2x5090_threadripper.club-3090-1229": [0, 0],
    "2gpu_node_desktop.club-3090-1125": [0, 0],
}
"""Of each table of nvidia-smi, the node of each GPU."""
PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
QUADS = [(0, 1, 2, 3), (4, 5, 6, 7)]
BELOW_ONE_SWITCH = {
    "8x4090_pix4.nccl-tests-307": QUADS,
    "8gpu_pix4_8nic.nccl-1405.gpurows": QUADS,
    "8gpu_pix_pairs_phb.nccl-1439": PAIRS,
    "8gpu_pix_pairs_node.public-md": PAIRS,
    "8xA100_pxb_pairs.nvbandwidth-53": PAIRS,
}
"""Groups that those tables show; the others show none, or NVLink hides them."""


@pytest.mark.parametrize("name", NODES)
def test_nodes_and_groups_in_nvidia_smi_text(name: str) -> None:
    machine = load(f"smi/{name}.txt")
    assert [gpu.numa.value for gpu in machine.gpus] == NODES[name]
    assert [group.gpus for group in machine.groups if len(group.gpus) > 1] == BELOW_ONE_SWITCH.get(name, [])
    assert {group.sharing for group in machine.groups} == {"unverified"}, "a file proves neither"
    assert from_json(to_json(machine)) == machine


def test_nvlink_hides_the_pcie_distance_and_that_is_said() -> None:
    assert "nvlink-hides-pcie" in {note.code for note in load("smi/8xH200_kvm_guest.simllm.txt").notes}


def test_a_coherent_part_in_text_is_not_on_pcie() -> None:
    machine = load("smi/1xGH200.nvbandwidth-23.txt")
    assert (machine.gpus[0].data_path, machine.gpus[0].memory_node) == ("c2c", 1)


@pytest.mark.parametrize(("name", "claimed"), [(2.0, None), (63.0, 63.0)])
def test_an_idle_reading_in_a_file_is_no_capacity(name: float, claimed: float | None) -> None:
    machine = load("nixl/g5.48xl-topo.xml" if name == 2.0 else "nixl/p5.48xl-topo.xml")
    rate = machine.link("gpu0").rate("in")
    assert (None if rate is None else round(rate.bytes_s / 1e9)) == claimed


def test_the_chain_of_a_p5_is_narrower_than_its_gpu() -> None:
    link = load("nixl/p5.48xl-topo.xml").link("gpu0")
    assert link.path_min is not None
    assert round(link.path_min.bytes_s / 1e9, 2) == 15.75
    assert "0000:44:00.0" in link.path_min.source


def test_empty_speeds_are_unknown_not_zero() -> None:
    assert not any(link.rates for link in load("azure/ncv4-topo.xml").links)


def test_nvlink_to_the_cpu_and_unified_memory_are_not_pcie() -> None:
    assert {gpu.data_path for gpu in load("hwloc/power8gpudistances.xml").gpus} == {"nvlink"}
    assert {gpu.data_path for gpu in load("rccl/topo_4p_940.xml").gpus} == {"unified"}


def test_a_wrong_file_is_a_conflict_with_the_machine() -> None:
    live, claimed = load("nixl/p5.48xl-topo.xml"), load("aws/p5.48xl-topo.79565c0e.xml")
    machine = with_claims(live, claimed)
    assert [gpu.numa.value for gpu in machine.gpus] == [0] * 4 + [1] * 4
    assert any("0000:4f:00.0" in note.text for note in machine.noted("conflict"))


def test_a_file_fills_in_groups_a_flat_guest_hides_as_a_conflict_to_settle() -> None:
    machine = with_claims(load("nixl/p4d.24xl-topo.xml"), load("aws/p4d-24xl-topo.xml"))
    assert {gpu.numa.confidence for gpu in machine.gpus} == {"high"}
    assert len([note for note in machine.noted("conflict") if note.code == "sharing-conflict"]) == 4


def test_a_graph_file_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="graph file, not a topology") as caught:
        load("azure/ncv4-graph.xml")
    assert "\n" not in str(caught.value)


UNREAD = re.compile(
    r"/sys/devices/system/(node/node\d+/memory\d+|cpu/cpu\d+/(cache|cpufreq|cpuidle|thermal_throttle))"
)
"""Most of what such a root holds: blocks of memory and of caches, which `detect` has no use for."""


def unpacked(name: str, folder: Path) -> Machine:
    with tarfile.open(fixture(f"hwloc/{name}.tar.bz2")) as archive:
        wanted = [member for member in archive if not UNREAD.search(member.name)]
        archive.extractall(folder, wanted, filter="data")
    return load_machine(str(next(folder.iterdir())))


def test_gpu_memory_nodes_of_a_real_power9(tmp_path: Path) -> None:
    machine = unpacked("nvidiagpunumanodes", tmp_path)
    assert [node.id for node in machine.nodes if node.kind == "cpu"] == [0, 8]
    assert [node.id for node in machine.nodes if node.kind == "gpu"] == list(range(250, 256))
    assert [gpu.numa.value for gpu in machine.gpus] == [0, 0, 0, 8, 8, 8]
    assert [gpu.memory_node for gpu in machine.gpus] == [255, 254, 253, 252, 251, 250]
    assert {gpu.data_path for gpu in machine.gpus} == {"nvlink"}
    assert [len(node.distances) for node in machine.nodes] == [8] * 8


@pytest.mark.parametrize(
    "name",
    [
        "16amd64-8n2c-cpusets",
        "2pa-pcidomain32bits",
        "32amd64-4s2n4c-cgroup2",
        "32em64t-2n8c+dax+nvme+mic+dimms",
        "40intel64-2g2n4c+pcilocality",
        "40intel64-4n10c+pci-conflicts",
        "fakepcilocalities",
        "nvidia-dgx-gb10",
    ],
)
def test_real_roots_without_a_gpu_are_read_and_say_so(name: str, tmp_path: Path) -> None:
    machine = unpacked(name, tmp_path)
    assert machine.gpus == ()
    assert machine.nodes
    assert "no-gpu" in {note.code for note in machine.notes}
