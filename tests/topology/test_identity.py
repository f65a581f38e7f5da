"""CUDA's order of GPUs: from CUDA, from rules without doubt, or from nobody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offbench.topology import Machine
from offbench.topology.facts import GpuFacts
from offbench.topology.identity import CudaDevice, ask_cuda, parse_cuda, patience
from tests.topology.roots import cuda_says, described, look

MIXED: dict[str, Any] = described("two-gpus-bare")
MIXED["nvml"][1]["name"] = "NVIDIA H200"
FIRST, SECOND = (row["uuid"] for row in MIXED["nvml"])


def ordinals(machine: Machine) -> list[tuple[str | None, int | None]]:
    return [(gpu.bdf, gpu.cuda_ordinal) for gpu in machine.gpus]


def cuda(ordinal: int, bdf: str, uuid: str = "0" * 32, numa: int | None = None) -> CudaDevice:
    return CudaDevice(ordinal, bdf, uuid, "NVIDIA L40S", numa)


def test_cuda_decides_the_order(tmp_path: Path) -> None:
    answer = cuda_says(cuda(0, "0000:41:00.0"), cuda(1, "0000:01:00.0"))
    machine = look(tmp_path, MIXED, cuda=answer)
    assert ordinals(machine) == [("0000:41:00.0", 0), ("0000:01:00.0", 1)]
    assert machine.gpus[0].name == "NVIDIA H200", "NVML's facts are joined by address"


def test_gpus_cuda_does_not_see_come_last_without_a_number(tmp_path: Path) -> None:
    machine = look(tmp_path, MIXED, {"CUDA_VISIBLE_DEVICES": "1"}, cuda=cuda_says(cuda(0, "0000:41:00.0")))
    assert ordinals(machine) == [("0000:41:00.0", 0), ("0000:01:00.0", None)]
    assert "hidden-gpus" in {note.code for note in machine.notes}


def test_mixed_cards_without_cuda_have_no_order(tmp_path: Path) -> None:
    machine = look(tmp_path, MIXED)
    assert [number for _, number in ordinals(machine)] == [None, None]
    assert "cuda-order" in {note.code for note in machine.notes}


@pytest.mark.parametrize(
    ("env", "numbers"),
    [
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [("0000:01:00.0", 0), ("0000:41:00.0", 1)]),
        ({"CUDA_VISIBLE_DEVICES": f"{SECOND},{FIRST}"}, [("0000:41:00.0", 0), ("0000:01:00.0", 1)]),
        ({"CUDA_VISIBLE_DEVICES": SECOND[:16]}, [("0000:41:00.0", 0), ("0000:01:00.0", None)]),
        (
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"},
            [("0000:41:00.0", 0), ("0000:01:00.0", 1)],
        ),
        (
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ""},
            [("0000:01:00.0", None), ("0000:41:00.0", None)],
        ),
    ],
)
def test_rules_that_leave_no_doubt(env: dict[str, str], numbers: list[tuple[str, int | None]], tmp_path: Path) -> None:
    assert ordinals(look(tmp_path, MIXED, env)) == numbers


def test_nvmls_index_decides_nothing(tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    text["nvml"].reverse()
    text["levels"] = {}
    machine = look(tmp_path, text)
    assert [gpu.cuda_ordinal for gpu in machine.gpus] == list(range(8))
    assert [gpu.bdf for gpu in machine.gpus] == sorted(row["bdf"] for row in text["nvml"])


def test_irregular_nodes_follow_cudas_order(tmp_path: Path) -> None:
    text = described("nps4-irregular")
    answer = cuda_says(*(cuda(place, row["bdf"]) for place, row in enumerate(text["nvml"])))
    machine = look(tmp_path, text, cuda=answer)
    assert [gpu.numa.value for gpu in machine.gpus] == [3, 3, 1, 1, 7, 7, 5, 5]


def test_cudas_own_word_on_the_node_is_the_last_of_the_live_ones(tmp_path: Path) -> None:
    text = described("container")
    for row in text["nvml"]:
        row["node"] = None
    answer = cuda_says(*(cuda(place, row["bdf"], numa=place // 2) for place, row in enumerate(text["nvml"])))
    machine = look(tmp_path, text, cuda=answer)
    assert [(gpu.numa.value, gpu.numa.confidence) for gpu in machine.gpus] == [(0, "medium")] * 2 + [(1, "medium")] * 2


def mig_machine(tmp_path: Path, env: dict[str, str], **given: Any) -> Machine:
    text = described("two-gpus-bare")
    text["nvml"][0]["mig"] = [
        {"uuid": f"MIG-{n}aaaaaaa-1111-2222-3333-444444444444", "name": "NVIDIA L40S MIG 1g"} for n in (1, 2)
    ]
    text["levels"] = {}
    return look(tmp_path, text, env, **given)


@pytest.mark.parametrize("by", ["cuda", "rule"])
def test_a_mig_instance_has_the_link_of_its_parent(by: str, tmp_path: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "MIG-2aaaaaaa-1111-2222-3333-444444444444"}
    given = {}
    if by == "cuda":
        given["cuda"] = cuda_says(cuda(0, "0000:01:00.0", "2aaaaaaa111122223333444444444444"))
    machine = mig_machine(tmp_path, env, **given)
    gpu = machine.gpus[0]
    assert (gpu.bdf, gpu.cuda_ordinal) == ("0000:01:00.0", 0)
    assert gpu.mig_parent == FIRST
    assert len(machine.gpus) == 2, "instances nobody sees are not listed"
    assert "other MIG instances" in (machine.link("gpu0").note or "")
    assert "mig" in {note.code for note in machine.notes}


def test_two_mig_instances_of_one_gpu_share_its_link(tmp_path: Path) -> None:
    names = ",".join(f"MIG-{n}aaaaaaa-1111-2222-3333-444444444444" for n in (1, 2))
    machine = mig_machine(tmp_path, {"CUDA_VISIBLE_DEVICES": names})
    assert machine.link("gpu0").gpus == (0, 1)
    assert [group.gpus for group in machine.groups if group.sharing == "shared"] == [(0, 1)]


def test_the_child_asks_and_answers_or_says_nothing() -> None:
    answer = ask_cuda(os.environ)(5.0)
    assert answer is None or all(device.ordinal == place for place, device in enumerate(answer))


def test_a_child_that_hangs_is_given_up() -> None:
    assert ask_cuda(os.environ)(0.0) is None


def test_cuda_is_waited_for_where_nobody_else_knows_the_order() -> None:
    alike = [GpuFacts("0000:01:00.0", name="A"), GpuFacts("0000:02:00.0", name="A")]
    mixed = [alike[0], GpuFacts("0000:02:00.0", name="B")]
    assert patience(alike, {}) < 1.0 < patience(mixed, {})
    assert patience(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) < 1.0
    assert patience([], {}) > 1.0


def test_what_the_child_prints_is_read() -> None:
    line = '{"ordinal": 0, "bdf": "0000:1A:00.0", "uuid": "00ff", "name": "NVIDIA H200", "host_numa": -1}\n'
    assert parse_cuda(line) == (CudaDevice(0, "0000:1a:00.0", "00ff", "NVIDIA H200", -1),)
