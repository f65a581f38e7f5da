"""The JSON form: exact both ways for any machine, and strict about what it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbench.topology import Link, Machine, Rate, anonymous, from_json, load_machine, to_dict, to_json
from offbench.topology.links import Bridge, Group
from offbench.topology.model import Evidence, Gpu, Host, Measurement, Note, NumaNode, Process, Source
from tests.topology.roots import DATA, described, look

GUEST = "measured-1xh200-guest"


def machines() -> st.SearchStrategy[Machine]:
    """Any values of the right types; indices and ids in order, as every machine has them."""
    rate = st.builds(Rate, bytes_s=st.floats(1, 1e13))
    parts = st.fixed_dictionaries(
        {
            "gpus": st.lists(st.builds(Gpu, index=st.just(0), numa=st.builds(Evidence)), max_size=3),
            "links": st.lists(
                st.builds(Link, gpus=st.just(()), rates=st.lists(rate, max_size=3).map(tuple)), max_size=3
            ),
            "bridges": st.lists(st.builds(Bridge, gpus=st.just(())), max_size=2),
            "nodes": st.lists(st.builds(NumaNode), max_size=2),
            "groups": st.lists(st.builds(Group, gpus=st.just(())), max_size=2),
            "notes": st.lists(st.builds(Note), max_size=2),
            "measurements": st.lists(
                st.builds(Measurement, gpus=st.just((0,)), per_gpu_bytes_s=st.tuples(st.floats())), max_size=2
            ),
        }
    )
    return st.builds(_machine, parts, st.builds(Source), st.builds(Host), st.none() | st.builds(Process))


def _machine(parts: dict[str, list[Any]], source: Source, host: Host, process: Process | None) -> Machine:
    gpus = [Gpu(**{**vars(gpu), "index": index}) for index, gpu in enumerate(parts.pop("gpus"))]
    links = [Link(**{**vars(link), "id": f"l{index}"}) for index, link in enumerate(parts.pop("links"))]
    parts["measurements"] = parts["measurements"] if gpus else []
    bare = Machine(source, host, process, gpus=tuple(gpus), links=tuple(links))
    return Machine(**{**vars(bare), **{name: tuple(items) for name, items in parts.items()}})


def finite(machine: Machine) -> bool:
    return "NaN" not in to_json(machine) and "Infinity" not in to_json(machine)


@settings(max_examples=60, deadline=None)
@given(machines().filter(finite))
def test_a_machine_comes_back_as_it_was(machine: Machine) -> None:
    assert from_json(to_json(machine)) == machine


def test_every_key_is_there_and_units_are_in_the_names(tmp_path: Path) -> None:
    machine = look(tmp_path, described("emulated-pairs-guest"))
    data = to_dict(machine, "2026-01-01T00:00:00Z")
    assert {
        "schema",
        "tool_version",
        "time",
        "source",
        "degraded",
        "warnings",
        "host",
        "process",
        "numa",
    } <= data.keys()
    assert {"gpus", "links", "groups", "pair_or_socket", "measurements", "floors", "bridges"} <= data.keys()
    assert data["gpus"][0]["link"]["expected_gib_s"] == pytest.approx(58.7, abs=0.1)
    assert data["gpus"][0]["link"]["path_min_gib_s"] == pytest.approx(14.7, abs=0.1)
    assert data["links"][-1]["measured_gib_s"] == {"in": None, "out": None, "both": None}
    assert data["links"][-1]["arithmetic_gib_s"] is None, "unknown is null, never zero"
    assert data["degraded"]


@pytest.mark.parametrize(
    ("name", "vendor", "ranks"),
    [
        ("8xh200-two-sockets", "NVIDIA", list(range(8))),
        ("container", "NVIDIA", list(range(4))),  # by name: no PCI id is shown
        ("amd-on-card-switch", "AMD", [None]),  # which one HIP calls 0 is not known
    ],
)
def test_a_gpu_has_a_vendor_and_the_rank_it_serves(
    name: str, vendor: str, ranks: list[int | None], tmp_path: Path
) -> None:
    machine = look(tmp_path, described(name))
    gpus = to_dict(machine)["gpus"]
    assert {gpu["vendor"] for gpu in gpus} == {vendor}
    assert [gpu["rank"] for gpu in gpus] == ranks, "as a launch here counts"
    first = to_dict(machine, floors=[{"ranks": 1}])["gpus"]
    assert [gpu["rank"] for gpu in first] == [0, *[None] * (len(gpus) - 1)], "of the job the floor is of"


def test_another_vendor_is_its_pci_id_and_an_unknown_one_is_null() -> None:
    arc = Gpu(0, "0000:03:00.0", Evidence(0, "medium"), 0, vendor_device="8086:56c1", name="Arc")
    bare = Gpu(1, None, Evidence(0, "medium"), 0, name="GPU1")
    assert [gpu["vendor"] for gpu in to_dict(Machine(Source("smi"), gpus=(arc, bare)))["gpus"]] == ["8086", None]


def test_what_was_measured_says_whether_it_limits() -> None:
    guest, published = (to_dict(load_machine(name)) for name in (str(DATA / f"{GUEST}.json"), "seed-8xh200"))
    link, socket = guest["links"]
    assert (link["speed_gt_s"], link["width"], link["bound"], link["limits"]) == (32.0, 16, "exact", True)
    assert (socket["speed_gt_s"], socket["width"], socket["bound"], socket["limits"]) == (None, None, ">=", False)
    assert guest["gpus"][0]["link"]["read_under_load"] is True
    assert [node["has_cpu"] for node in guest["numa"]] == [True]
    unmeasured = [link for link in published["links"] if link["kind"] == "gpu_link"]
    assert {(link["bound"], link["limits"]) for link in unmeasured} == {(None, None)}
    assert {gpu["link"]["read_under_load"] for gpu in published["gpus"]} == {False}


def test_a_snapshot_for_others_names_no_device(tmp_path: Path) -> None:
    text = described("laptop")
    uuid = text["nvml"][0]["uuid"]
    machine = look(tmp_path, text, {"CUDA_VISIBLE_DEVICES": uuid})
    assert uuid in to_json(machine)
    assert uuid not in to_json(anonymous(machine))
    assert anonymous(machine).links == machine.links


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("gpus", 0, "index"), 5, "numbered from 0"),
        (("gpus", 0, "numa", "confidence"), "sure", "machine.gpus.0..numa.confidence"),
        (("gpus", 0, "numa", "value"), "0", "not int"),
        (("links", 0, "gpus"), [7], "not listed"),
        (("links", 0, "gpus"), 7, "not a list"),
        (("links", 0, "gpus"), [0, 0], "link gpu0 names a GPU twice"),
        (("groups", 0, "gpus"), [1], "groups.0. names a GPU that is not listed"),
        (("links", 0, "rates", 0, "bytes_s"), 0, "above zero"),
        (("links", 0, "rates", 0, "bytes_s"), float("nan"), "bytes_s is not a finite number"),
        (("links", 0, "rates", 0, "bytes_s"), 10**400, "bytes_s is not a finite number"),
        (("schema",), "1", "schema '1'; this offbench"),
        (("links", 1, "id"), "gpu0", "same id"),
        (("host",), [], "not an object"),
        (("process", "visible"), [["a"]], "has 1 items"),
    ],
)
def test_a_file_edited_wrongly_is_named(path: tuple[Any, ...], value: Any, reason: str, tmp_path: Path) -> None:
    data = json.loads(to_json(look(tmp_path, described("laptop"))))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=reason):
        from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [((), "has not one rate"), ((0, 0), "names a GPU twice"), ((1,), "names a GPU that is not listed")],
)
def test_a_measurement_has_one_rate_for_each_of_its_gpus(gpus: tuple[int, ...], reason: str) -> None:
    row = Measurement("alone", (0,), "in", (1.0,), 1.0, 1.0, 1)
    whole = Machine(Source("live"), gpus=(Gpu(0, None, Evidence(None, "none"), None),), measurements=(row,))
    assert from_json(to_json(whole)) == whole
    with pytest.raises(ValueError, match=rf"measurements\[0\] {reason}"):
        from_json(to_json(replace(whole, measurements=(replace(row, gpus=gpus),))))


def test_the_most_trusted_rate_of_a_link() -> None:
    rates = (
        Rate("in", 63e9, "line rate", "arithmetic"),
        Rate("in", 50e9, "measured", "first"),
        Rate("in", 52e9, "measured", "second"),
        Rate("out", 16e9, "assumed", "claim"),
    )
    link = Link("gpu0", "gpu_link", (0,), rates)
    assert link.rate("in") == rates[2], "each measurement is a lower bound"
    assert link.rate("in", ("line rate",)) == rates[0]
    assert link.rate("out") == rates[3]
    assert link.rate("both") is None
