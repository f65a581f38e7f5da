"""Links and sharing on described machines: bridges real and emulated, chips, cards, speeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbench.topology import tree
from tests.topology.roots import codes, described, look, nodes, pairs


def test_pairs_below_one_switch_on_bare_metal_are_shared(tmp_path: Path) -> None:
    machine = look(tmp_path, described("8xh200-two-sockets"))
    assert pairs(machine, "shared") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert nodes(machine) == [0] * 4 + [1] * 4
    assert {gpu.numa.confidence for gpu in machine.gpus} == {"high"}
    assert [gpu.package for gpu in machine.gpus] == nodes(machine)
    uplink = machine.link("uplink 0000:15:01.0")
    rate = uplink.rate("in")
    assert rate is not None
    assert rate.kind == "line rate"
    assert rate.bytes_s == pytest.approx(63.015e9, rel=1e-4)
    assert not machine.link("socket0").rates, "nothing declares what a socket carries"
    assert "NVML" not in codes(machine)


def test_groups_nest_pairs_inside_quads(tmp_path: Path) -> None:
    machine = look(tmp_path, described("16xv100-quads"))
    shared = pairs(machine, "shared")
    assert [group for group in shared if len(group) == 4] == [tuple(range(q, q + 4)) for q in (0, 4, 8, 12)]
    assert [group for group in shared if len(group) == 2] == [(p, p + 1) for p in range(0, 16, 2)]
    quads = [branch for _, branch in tree(machine).walk() if branch.kind == "bridge" and len(branch.gpus) == 4]
    assert [len(quad.children) for quad in quads] == [2] * 4


def test_two_visible_levels_of_one_pex_chip_are_no_bottleneck(tmp_path: Path) -> None:
    text = described("16xv100-quads")
    text["pci"] = {
        path: [row[0], row[1].replace("10b5:9797", "1000:c030"), *row[2:]] for path, row in text["pci"].items()
    }
    machine = look(tmp_path, text)
    assert pairs(machine, "shared") == [tuple(range(q, q + 4)) for q in (0, 4, 8, 12)]


def test_root_ports_of_their_own_on_bare_metal_share_nothing(tmp_path: Path) -> None:
    machine = look(tmp_path, described("two-gpus-bare"))
    assert [(group.gpus, group.sharing) for group in machine.groups] == [((0,), "not_shared"), ((1,), "not_shared")]


@pytest.mark.parametrize("flags", ["hypervisor", "none"])
def test_root_ports_of_their_own_prove_nothing_in_a_guest_or_where_nobody_knows(flags: str, tmp_path: Path) -> None:
    text = {**described("two-gpus-bare"), "hypervisor": True}
    if flags == "none":
        text["cpuinfo"] = "none"
    assert {group.sharing for group in look(tmp_path, text).groups} == {"unverified"}


def test_a_flat_guest_suspects_its_root_bus(tmp_path: Path) -> None:
    machine = look(tmp_path, described("flat-guest"))
    assert pairs(machine, "unverified") == [tuple(range(8))]
    assert {"guest", "flat"} <= codes(machine)


def test_emulated_bridges_make_sharing_unverified(tmp_path: Path) -> None:
    machine = look(tmp_path, described("emulated-pairs-guest"))
    assert pairs(machine, "unverified") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert "emulated by AWS" in " ".join(machine.groups[0].evidence)
    assert machine.link("uplink 0000:44:00.0").emulated == "AWS"


def test_one_emulated_switch_per_gpu_proves_no_independence(tmp_path: Path) -> None:
    machine = look(tmp_path, described("hidden-pairs-guest"))
    assert [(group.gpus, group.sharing) for group in machine.groups] == [((i,), "unverified") for i in range(8)]
    rate = machine.link("gpu0").rate("in")
    assert rate is not None
    assert rate.bytes_s > 60e9, "2.5 GT/s x1 of an emulated bridge is no capacity"


def test_a_slow_virtual_root_port_is_shown_beside_the_link_of_the_gpu(tmp_path: Path) -> None:
    machine = look(tmp_path, described("emulated-pairs-guest"))
    link = machine.link("gpu0")
    own, least = link.rate("in"), link.path_min
    assert own is not None
    assert least is not None
    assert own.bytes_s == pytest.approx(63.0e9, rel=1e-3)
    assert least.bytes_s == pytest.approx(15.75e9, rel=1e-3)
    assert "0000:44:00.0" in least.source
    assert "emulated-speed" in codes(machine)
    uplink = machine.link("uplink 0000:44:00.0").rate("in")
    assert uplink is not None
    assert uplink.kind == "assumed"


def test_an_idle_link_is_not_its_capacity(tmp_path: Path) -> None:
    machine = look(tmp_path, described("8xh200-two-sockets"))
    assert machine.gpus[0].pcie.current_gt_s == 2.5
    rate = machine.link("gpu0").rate("out")
    assert rate is not None
    assert rate.bytes_s > 60e9
    assert "idle-link" in codes(machine)


def test_the_switch_on_an_amd_card_narrows_its_path_and_is_no_group(tmp_path: Path) -> None:
    machine = look(tmp_path, described("amd-on-card-switch"))
    assert [gpu.bdf for gpu in machine.gpus] == ["0000:03:00.0"]
    rate = machine.link("gpu0").rate("in")
    assert rate is not None
    assert rate.bytes_s == pytest.approx(15.75e9, rel=1e-3)
    assert [bridge.on_card for bridge in machine.bridges] == [False, True, True]
    assert not any(link.kind == "uplink" for link in machine.links)
    assert "rocm" in codes(machine)


@pytest.mark.parametrize(
    ("speed", "width"), [("Unknown", 16), ("32.0 GT/s PCIe", 0), ("32.0 GT/s PCIe", 255), ("", 8)]
)
def test_an_unknown_link_has_no_rate(speed: str, width: int, tmp_path: Path) -> None:
    text = described("flat-guest")
    text["pci"] = {path: [*row[:3], speed, width] for path, row in text["pci"].items()}
    machine = look(tmp_path, text)
    assert machine.link("gpu0").rates == ()
    assert "link-unknown" in codes(machine)


def test_nvml_gives_the_link_where_sysfs_is_hidden(tmp_path: Path) -> None:
    text = described("container")
    for row in text["nvml"]:
        row["gen"], row["width"] = 5, 16
    machine = look(tmp_path, text)
    rate = machine.link("gpu0").rate("in")
    assert rate is not None
    assert "NVML" in rate.source


def test_nvml_and_the_bus_that_differ_about_sharing_are_a_conflict(tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    text["levels"] = {"0,1": 40, "1,2": 10}
    machine = look(tmp_path, text)
    assert [note.code for note in machine.noted("conflict")] == ["sharing-conflict"] * 2
    assert (0, 1) in pairs(machine, "unverified")


def test_distances_across_host_bridges_prove_no_independence(tmp_path: Path) -> None:
    text = described("flat-guest")
    text["levels"] = {f"{i},{j}": 30 for i in range(8) for j in range(i + 1, 8)}
    assert {group.sharing for group in look(tmp_path, text).groups} == {"unverified"}
