"""PCIe arithmetic against the published table, and evidence for NUMA nodes as a rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbench.topology.capacity import (
    GENERATIONS,
    gt_of_generation,
    lesser,
    line_rate,
    of_gigabytes,
    parse_speed,
    parse_width,
    rates_of,
    slowest,
)
from offbench.topology.evidence import weigh
from offbench.topology.facts import NodeClaim
from offbench.topology.links import Pcie
from offbench.topology.model import NumaNode
from offbench.topology.sysfs import parse_cpumask


@pytest.mark.parametrize(("generation", "gb_s"), [(1, 4.0), (2, 8.0), (3, 15.75), (4, 31.5), (5, 63.0), (6, 121.0)])
def test_sixteen_lanes_of_each_generation(generation: int, gb_s: float) -> None:
    rate = line_rate(gt_of_generation(generation), 16)
    assert rate is not None
    assert rate / 1e9 == pytest.approx(gb_s, rel=2e-3)


@pytest.mark.parametrize(
    ("text", "gt_s"),
    [
        ("32.0 GT/s PCIe", 32.0),
        ("16 GT/s", 16.0),
        ("8.0 GT/s", 8.0),
        ("2.5 GT/s PCIe", 2.5),
        ("Unknown", None),
        ("", None),
        (None, None),
        ("7 GT/s", None),
    ],
)
def test_speeds_as_files_write_them(text: str | None, gt_s: float | None) -> None:
    assert parse_speed(text) == gt_s


@pytest.mark.parametrize(("text", "width"), [("16", 16), ("0", None), ("255", None), ("", None), (None, None)])
def test_widths_as_files_write_them(text: str | None, width: int | None) -> None:
    assert parse_width(text) == width


@given(st.sampled_from(sorted(GENERATIONS)), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_rate_in_gigabytes_finds_a_link_of_that_rate(gt_s: float, width: int) -> None:
    rate = line_rate(gt_s, width)
    assert rate is not None
    found = of_gigabytes(rate / 1e9)
    assert found is not None
    again = line_rate(*found)
    assert again == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("gb_s", [0.0, 7.0, 300.0])
def test_a_rate_no_link_has_is_unknown(gb_s: float) -> None:
    assert of_gigabytes(gb_s) is None


def test_a_link_is_the_lesser_of_its_ends() -> None:
    assert lesser(Pcie(32.0, 8), Pcie(16.0, 16)) == Pcie(16.0, 8)
    assert lesser(Pcie(32.0, 16), Pcie()) == Pcie(32.0, 16)


def test_a_path_is_its_slowest_known_link() -> None:
    assert slowest([Pcie(32.0, 16), Pcie(), Pcie(16.0, 8)]) == Pcie(16.0, 8)
    assert slowest([Pcie()]) is None


def test_both_directions_add_up() -> None:
    by_way = {rate.direction: rate.bytes_s for rate in rates_of(Pcie(16.0, 4))}
    assert by_way["both"] == by_way["in"] + by_way["out"]
    assert rates_of(Pcie(16.0, None)) == ()


@given(st.frozensets(st.integers(0, 200)))
def test_cpu_masks_of_32_bit_words(cpus: frozenset[int]) -> None:
    words = [f"{sum(1 << cpu % 32 for cpu in cpus if cpu // 32 == word):08x}" for word in range(7)]
    assert parse_cpumask(",".join(reversed(words))) == cpus


NODES = tuple(NumaNode(number, "cpu", (number,), (number,)) for number in range(3))
SOURCES = ("NVML memory affinity", "sysfs numa_node", "sysfs local_cpulist", "CUDA host_numa_id", "NCCL XML")


@given(
    st.lists(
        st.tuples(st.sampled_from(SOURCES), st.frozensets(st.integers(0, 2), max_size=3)), unique_by=lambda c: c[0]
    )
)
def test_evidence_keeps_every_word_and_invents_none(said: list[tuple[str, frozenset[int]]]) -> None:
    evidence = weigh([NodeClaim(source, nodes) for source, nodes in said], NODES)
    assert sorted(claim.source for claim in evidence.claims) == sorted(source for source, _ in said)
    sure = {next(iter(nodes)) for _, nodes in said if len(nodes) == 1}
    assert (evidence.value is None) == (not sure)
    assert evidence.value is None or evidence.value in sure
    assert (evidence.confidence == "conflict") == (len(sure) > 1)


def test_two_files_of_one_witness_are_one_source() -> None:
    same = [NodeClaim("sysfs numa_node", frozenset({1})), NodeClaim("sysfs local_cpulist", frozenset({1}))]
    assert weigh(same, NODES).confidence == "medium"
    assert weigh([*same, NodeClaim("NVML CPU affinity", frozenset({1}))], NODES).confidence == "high"


def test_the_most_trusted_of_differing_sources_is_used() -> None:
    said = [NodeClaim("NCCL XML", frozenset({0})), NodeClaim("sysfs numa_node", frozenset({2}))]
    evidence = weigh(said, NODES)
    assert (evidence.value, evidence.confidence) == (2, "conflict")
