"""The JSON form: exact both ways for any machine, and strict about what it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbench.topology import Link, Machine, Rate, anonymous, from_json, to_dict, to_json
from offbench.topology.links import Bridge, Group
from offbench.topology.model import Evidence, Gpu, Host, Measurement, Note, NumaNode, Process, Source
from tests.topology.roots import described, look


def machines() -> st.SearchStrategy[Machine]:
    """Any values of the right types; indices and ids in order, as every machine has them."""
    rate = st.builds(Rate, bytes_s=st.floats(1, 1e13))
    parts = st.fixed_dictionaries(
        {
            "gpus": st.lists(st.builds(Gpu, index=st.just(0), numa=st.builds(Evidence)), max_size=3),
            "links": st.lists(
                st.builds(Link, gpus=st.just(()), rates=st.lists(rate, max_size=3).map(tuple)), max_size=3
            ),
            "bridges": st.lists(st.builds(Bridge), max_size=2),
            "nodes": st.lists(st.builds(NumaNode), max_size=2),
            "groups": st.lists(st.builds(Group), max_size=2),
            "notes": st.lists(st.builds(Note), max_size=2),
            "measurements": st.lists(st.builds(Measurement), max_size=2),
        }
    )
    return st.builds(_machine, parts, st.builds(Source), st.builds(Host), st.none() | st.builds(Process))


def _machine(parts: dict[str, list[Any]], source: Source, host: Host, process: Process | None) -> Machine:
    gpus = [Gpu(**{**vars(gpu), "index": index}) for index, gpu in enumerate(parts.pop("gpus"))]
    links = [Link(**{**vars(link), "id": f"l{index}"}) for index, link in enumerate(parts.pop("links"))]
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
        (("links", 0, "rates", 0, "bytes_s"), 0, "above zero"),
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
