"""Snapshots of measured machines (`offbench topo --measure --save`), each as a machine to test with.

Whatever lies beside the descriptions and carries a `schema` is picked up. The one called synthetic was never measured:
its rates were made up, so that these tests have something to hold.
"""

from __future__ import annotations

import re

import pytest

from offbench.floor import of_launch
from offbench.machine_floor import floors, measured_tree
from offbench.planner.sources import links_of_machine
from offbench.record import Link, Moved
from offbench.topology import Machine, Rate, load_machine, to_json, tree
from offbench.units import GIB
from tests.topology.roots import DATA, SNAPSHOTS

STATE = 28.435 * GIB
"""AdamW's moments of qwen3-30b-a3b over 8 ranks, each way."""
PCIE_X16_GEN6 = 121e9
"""Bytes/s one way: no GPU of today measures more over PCIe."""


@pytest.fixture(params=SNAPSHOTS)
def machine(request: pytest.FixtureRequest) -> Machine:
    return load_machine(str(DATA / f"{request.param}.json"))


def measured(machine: Machine, link: str) -> dict[str, Rate]:
    return {rate.direction: rate for rate in machine.link(link).rates if rate.kind == "measured"}


def test_there_is_a_snapshot() -> None:
    assert SNAPSHOTS


def test_it_names_nobody_and_survives_being_saved(machine: Machine) -> None:
    assert all(gpu.uuid is None for gpu in machine.gpus)
    assert not re.search(r"GPU-[0-9a-f]{8}-", to_json(machine))


def test_every_gpu_has_a_place_in_the_tree_and_was_measured_alone(machine: Machine) -> None:
    drawn = [branch.gpus for _, branch in tree(machine).walk() if branch.kind == "gpu"]
    assert sorted(drawn) == [(gpu.index,) for gpu in machine.gpus]
    alone = {row.gpus for row in machine.measurements if row.rung == "alone"}
    assert alone == {(gpu.index,) for gpu in machine.gpus}
    assert [row.rung for row in machine.measurements][-1] == "equal"


def test_rates_are_those_of_a_link_and_repeat(machine: Machine) -> None:
    for gpu in machine.gpus:
        rates = measured(machine, f"gpu{gpu.index}")
        into, out, both = (rates[way].bytes_s for way in ("in", "out", "both"))
        line = machine.link(f"gpu{gpu.index}").rate("in", ("line rate",))
        most = line.bytes_s if line is not None else PCIE_X16_GEN6
        assert most / 4 < into < most, "above 30 GB/s on Gen5 x16, never above the arithmetic"
        assert most / 4 < out < most
        assert max(into, out) < both <= 1.02 * (into + out)
    for row in machine.measurements:
        assert row.aggregate_bytes_s == pytest.approx(sum(row.per_gpu_bytes_s), rel=0.05)
        assert row.spread is None or row.spread < 0.2
        assert not row.replays
        if row.bytes_copied is not None and row.bytes_counted is not None:
            assert 0.95 <= row.bytes_counted / row.bytes_copied <= 1.3
        if row.placement is not None and row.buffer_node == "own":
            assert row.placement.remote_bytes == 0


def test_one_h200_carries_what_its_kind_does() -> None:
    """50 GiB/s one way, 85 to 91 both ways, seen on other H200 guests at other times."""
    machine = load_machine(str(DATA / "measured-1xh200-guest.json"))
    rates = {way: rate.bytes_s / GIB for way, rate in measured(machine, "gpu0").items()}
    assert (rates["in"], rates["out"]) == (pytest.approx(50, rel=0.05), pytest.approx(50, rel=0.05))
    assert 0.95 * 85 <= rates["both"] <= 1.05 * 91
    assert {(row.rung, row.direction) for row in machine.measurements} == {
        *(("alone", way) for way in ("in", "out", "both")),
        ("equal", "both"),
    }
    for row in machine.measurements:
        assert row.placement is not None
        assert (row.placement.local_bytes, row.placement.total, row.replays) == (4 * GIB, 4 * GIB, 0)
        assert row.bytes_copied is not None
        assert row.bytes_copied > row.aggregate_bytes_s * row.seconds * row.repeats * 0.99


def test_the_floor_of_one_h200_is_that_of_its_link(machine: Machine) -> None:
    if "H200" not in (machine.gpus[0].name or ""):
        pytest.skip("another GPU")
    duplex = floors(machine, STATE, STATE, ranks=1)[0]
    assert duplex.seconds == pytest.approx(0.63, rel=0.08), "85 to 91 GiB/s both ways"
    assert duplex.bound_by is not None
    assert (duplex.bound_by.link, duplex.bound_by.direction) == ("gpu0", "both")
    both = measured(machine, "gpu0")["both"].bytes_s
    assert duplex.seconds == pytest.approx(2 * STATE / both)


def test_launches_and_plans_take_its_rates(machine: Machine) -> None:
    links, said = links_of_machine(machine, 1)
    rates = measured(machine, "gpu0")
    assert (links.into, links.both) == (rates["in"].bytes_s, rates["both"].bytes_s), said
    own = Link(
        in_bytes_per_s=rates["in"].bytes_s,
        out_bytes_per_s=rates["out"].bytes_s,
        both_bytes_per_s=rates["both"].bytes_s,
    )
    moved = Moved(in_bytes_per_step=STATE, out_bytes_per_step=STATE)
    ranks = len(machine.gpus)
    row = of_launch(moved, own, measured_tree(machine, ranks), chunk_bytes=GIB)
    assert row.seconds is not None
    assert row.seconds >= 2 * STATE / rates["both"].bytes_s * (1 - 1e-9)
    assert row.pipeline_seconds is not None
    assert row.pipeline_seconds > row.seconds


def test_the_time_of_equal_bytes_is_near_the_formula(machine: Machine) -> None:
    row = machine.measurements[-1]
    each_way = row.aggregate_bytes_s * row.seconds / len(row.gpus) / 2
    formula = floors(machine, each_way, each_way)[0].seconds
    assert formula is not None
    assert row.seconds == pytest.approx(formula, rel=0.15)
