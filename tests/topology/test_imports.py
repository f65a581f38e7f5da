"""`--from`: names, formats told from content, and one clear line for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbench.errors import UsageError
from offbench.topology import load_machine, machine_names, to_json
from offbench.topology.imports import MOST_BYTES
from offbench.units import GIB
from tests.topology.roots import described, look

SMI = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tNODE\tSYS\tSYS\t0-7\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tSYS\tSYS\t0-7\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\tSYS\t0-7\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tPIX\t8-15\t1\t\tN/A
NIC0\tSYS\tSYS\tSYS\tPIX\t X
"""
NCCL = """<system version="1">
  <cpu numaid="1" affinity="0000000f,00000000" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:10:00.0" class="0x060400"
     vendor="0x8086" device="0x352a" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="1"/></pci>
      <pci busid="0000:12:00.0" class="0x030200" link_speed="" link_width="0"><gpu dev="0"/></pci>
    </pci>
  </cpu>
</system>
"""


def written(folder: Path, text: str, name: str = "m.txt") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_the_seed_machine_holds_what_was_published() -> None:
    machine = load_machine("seed-8xh200")
    assert len(machine.gpus) == 8
    uplinks = [link for link in machine.links if link.kind == "uplink"]
    assert [link.gpus for link in uplinks] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    for link in uplinks:
        for rate in (link.rate("in"), link.rate("out")):
            assert rate is not None
            assert (rate.bytes_s, rate.kind) == (52 * GIB, "measured")
            assert "by others" in rate.source
            assert "prime-rl#4427" in rate.source
    sockets = [link for link in machine.links if link.kind == "socket"]
    assert [link.gpus for link in sockets] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all((rate := link.rate("both")) is not None and rate.bytes_s == 155 * GIB for link in sockets)
    assert all(link.rate("in", ("measured",)) is None for link in machine.links if link.kind == "gpu_link")
    assert machine.pair_or_socket == "not_separated"


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_machine_loads(name: str) -> None:
    assert load_machine(name).title


def test_a_name_nearly_right_is_pointed_out() -> None:
    with pytest.raises(UsageError, match="did you mean seed-8xh200"):
        load_machine("seed-8xH20")


def test_a_name_far_off_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"known machines: .*seed-8xh200"):
        load_machine("toaster")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "unknown format"),
        ("", "unknown format"),
        ("{", "broken JSON"),
        ("{}", "no key `schema`"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1}', "no key source"),
        ('{"schema": true}', "schema True"),
        ('{"schema": 1, "gpus": ' + "[" * 100_000, "nested too deeply"),
        (
            '<system><cpu numaid="0">' + '<pci busid="0000:01:00.0">' * 2000 + "</pci>" * 2000 + "</cpu></system>",
            "nested",
        ),
        ("<a", "m.txt"),
        ("<html/>", "<html>"),
        ("<graphs version='1'/>", "graph file"),
        ('<system version="1"><cpu numaid="0"><pci busid="what"/></cpu></system>', "no PCI address"),
        ('<topology version="2.0"/>', "without any object"),
        ("GPU0 GPU1\nGPU0 X", "distance"),
        (SMI.replace("8-15", "64-" + 23 * "9"), "no CPU or node has a number above 65535"),
        (SMI.replace("SYS\tSYS\t0-7\t0", "SYS\tSYS\t0-7\t65536"), "no CPU or node has a number above 65535"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_file(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        load_machine(written(tmp_path, text))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cpus", ["64-" + 23 * "9", "0-x"])
def test_a_bad_cpu_list_in_a_copied_root_is_one_line(cpus: str, tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(f"{cpus}\n")
    with pytest.raises(UsageError, match=f"{cpus}' is no CPU list") as caught:
        load_machine(str(tmp_path))
    assert str(caught.value).startswith(f"--from {tmp_path}: ")
    assert "\n" not in str(caught.value)


def test_a_folder_without_sys_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without sys/"):
        load_machine(str(tmp_path))
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not text"):
        load_machine(str(tmp_path / "b"))


def test_a_checkpoint_given_by_mistake_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(UsageError, match="larger than 64MiB; give"):
        load_machine(str(tmp_path / "large"))


def test_nccl_order_links_and_affinity(tmp_path: Path) -> None:
    machine = load_machine(written(tmp_path, NCCL))
    assert [gpu.bdf for gpu in machine.gpus] == ["0000:12:00.0", "0000:11:00.0"], "as NCCL numbers them"
    assert machine.nodes[0].cpus == (32, 33, 34, 35), "words of 32 bits, the high one first"
    assert [gpu.cuda_ordinal for gpu in machine.gpus] == [None, None]
    uplink = machine.link("uplink 0000:10:00.0")
    rate = uplink.rate("in")
    assert rate is not None
    assert rate.bytes_s == pytest.approx(31.5e9, rel=1e-3)
    assert uplink.sharing == "unverified"
    assert machine.link("gpu0").rates == ()
    assert machine.link("socket of node1").rates == (), "a node is not a socket"


def test_switches_written_by_hand_share_no_root_bus(tmp_path: Path) -> None:
    def switch(number: int, *gpus: str) -> str:
        below = "".join(f'<pci busid="{gpu}" class="0x030200" vendor="0x10de" device="0x2330"/>' for gpu in gpus)
        return f'<pci busid="ffff:ff:{number:02x}.0" class="0x060400" vendor="0x0000" device="0x0000">{below}</pci>'

    nodes = [
        switch(1, "0001:00:00.0") + switch(2, "0002:00:00.0"),
        switch(3, "0003:00:00.0") + switch(4, "0004:00:00.0", "0005:00:00.0"),
    ]
    cpus = "".join(f'<cpu numaid="{number}">{inside}</cpu>' for number, inside in enumerate(nodes))
    machine = load_machine(written(tmp_path, f'<system version="1">{cpus}</system>'))
    assert [(group.gpus, group.sharing) for group in machine.groups] == [
        ((0,), "unverified"), ((1,), "unverified"), ((2,), "unverified"), ((3, 4), "unverified"),
    ]  # fmt: skip
    assert {gpu.root for gpu in machine.gpus} == {None}
    assert "emulated-bridges" in {note.code for note in machine.notes}


def test_smi_text_gives_nodes_and_suspected_groups(tmp_path: Path) -> None:
    machine = load_machine(written(tmp_path, SMI))
    assert [gpu.numa.value for gpu in machine.gpus] == [0, 0, 0, 1]
    assert [group.gpus for group in machine.groups if len(group.gpus) > 1] == [(0, 1)]
    assert machine.nodes[1].cpus == tuple(range(8, 16))
    assert machine.noted("limit")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\t", "  "),
        ("GPU0", "\x1b[4mGPU0\x1b[0m"),
        ("CPU Affinity\tNUMA Affinity\tGPU NUMA ID", "CPU AffinityNUMA AffinityGPU NUMA ID"),
        ("NIC0\tCPU", "NIC0CPU"),
        ("\t\tN/A", ""),
        ("NIC0", "mlx5_0"),
    ],
)
def test_smi_text_as_people_paste_it(old: str, new: str, tmp_path: Path) -> None:
    machine = load_machine(written(tmp_path, SMI.replace(old, new)))
    assert [gpu.numa.value for gpu in machine.gpus] == [0, 0, 0, 1]
    assert [group.gpus for group in machine.groups if len(group.gpus) > 1] == [(0, 1)]


def test_smi_text_without_a_numa_column(tmp_path: Path) -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-3\nGPU1\tSYS\t X \t4-7\n"
    machine = load_machine(written(tmp_path, text))
    assert [gpu.numa.value for gpu in machine.gpus] == [0, 1]
    assert "node-numbers" in {note.code for note in machine.notes}


def test_nvlink_that_is_down_says_nothing_about_nodes(tmp_path: Path) -> None:
    up = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
    for text, hides in ((up, True), (up.replace("NV18", "SYS"), False), (up.replace("NV18", "NODE"), False)):
        machine = load_machine(written(tmp_path, text))
        assert [gpu.numa.value for gpu in machine.gpus] == [None, None]
        assert {group.sharing for group in machine.groups} == {"unverified"}
        assert ("nvlink-hides-pcie" in {note.code for note in machine.notes}) == hides


def test_smi_text_with_every_node_is_unknown(tmp_path: Path) -> None:
    text = SMI.replace("0-7\t0\t", "0-15\t0-1\t").replace("8-15\t1\t", "0-15\t0-1\t")
    assert [gpu.numa.value for gpu in load_machine(written(tmp_path, text)).gpus] == [None] * 4


def test_a_saved_machine_comes_back_as_a_claim(tmp_path: Path) -> None:
    machine = look(tmp_path / "host", described("8xh200-two-sockets"))
    again = load_machine(written(tmp_path, to_json(machine, "2026-01-01T00:00:00Z"), "saved.json"))
    assert again.source.kind == "offbench"
    assert again.source.name == "saved.json"
    assert again.links == machine.links
    assert again.groups == machine.groups
    assert "saved" in {note.code for note in again.noted("limit")}
