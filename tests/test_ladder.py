from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbench.errors import OffbenchError
from offbench.ladder.copy_window import IN_FLIGHT, Way, bytes_between, copy_bytes, copy_for
from offbench.ladder.crew import PIECE_BYTES, ProcessCrew, region_bytes, remote_node, task_of, worker_env
from offbench.ladder.findings import explain, layout, learn
from offbench.ladder.plan import Layout, Outcome, Rung, Sample, climb, estimate_s, plan
from offbench.ladder.worker import LinkHealth, Reading, elsewhere, serve
from offbench.machine_floor import floors
from offbench.topology.links import Group, Link, Pcie
from offbench.topology.model import Evidence, Gpu, Machine, Note, NumaNode, PageBytes, Source
from tests.hosts import NVMLError

GIB = 2**30


def machine(groups: Iterable[Group] = (), gpus: int = 8, sockets: int = 2) -> Machine:
    """GPUs spread evenly over sockets, one NUMA node each; capacities unknown."""
    share = gpus // sockets
    cards = tuple(
        Gpu(i, f"0000:{i + 1:02x}:00.0", Evidence(i // share, "medium"), i // share, pcie=Pcie(32.0, 16))
        for i in range(gpus)
    )
    nodes = tuple(NumaNode(s, "cpu", (s,), (s,), package=s) for s in range(sockets))
    halves = [tuple(range(s * share, (s + 1) * share)) for s in range(sockets)]
    links = [Link(f"gpu{i}", "gpu_link", (i,)) for i in range(gpus)]
    links += [Link(f"uplink {g.gpus[0]}", "uplink", g.gpus) for g in groups if g.link]
    links += [Link(f"socket{s}", "socket", half) for s, half in enumerate(halves)]
    given = list(groups) or [Group((i,), "unverified") for i in range(gpus)]
    return Machine(Source("live"), nodes=nodes, gpus=cards, links=tuple(links), groups=tuple(given))


PAIRS = [Group((i, i + 1), "unverified", f"uplink {i}") for i in (0, 2, 4, 6)]


class Fabric:
    """A crew over a made-up machine: links of (GPUs, each-way GiB/s, both-ways GiB/s), shared fairly."""

    def __init__(self, *links: tuple[Sequence[int], float, float], remote: float = 1.0) -> None:
        self.links, self.remote = links, remote
        self.ran: list[Rung] = []

    def run(self, rung: Rung) -> list[Sample]:
        self.ran.append(rung)
        ways: list[Way] = ["in", "out"] if rung.direction == "both" else [rung.direction]  # type: ignore[list-item]
        rates = self._fair([(gpu, way) for gpu in rung.gpus for way in ways])
        factor = self.remote if rung.buffers == "remote" else 1.0
        if rung.each_way_bytes is not None:
            slowest = rung.each_way_bytes / min(rates.values())
            done = dict.fromkeys(ways, float(rung.each_way_bytes))
            return [Sample(gpu, done, slowest) for gpu in rung.gpus]
        return [Sample(g, {way: factor * rates[g, way] for way in ways}, 1.0, "Gen5 x16", 0) for g in rung.gpus]

    def _fair(self, flows: list[tuple[int, Way]]) -> dict[tuple[int, Way], float]:
        """Raise all rates together; whoever crosses a full link stops."""
        limits: list[tuple[set[tuple[int, Way]], float]] = []
        for gpus, each, both in self.links:
            crossing = {flow for flow in flows if flow[0] in gpus}
            limits += [({f for f in crossing if f[1] == way}, each * GIB) for way in ("in", "out")]
            limits.append((crossing, both * GIB))
        rates, free, level = dict.fromkeys(flows, 0.0), set(flows), 0.0
        while free:
            room = [
                (cap - sum(rates[f] for f in members - free)) / len(members & free)
                for members, cap in limits
                if members & free
            ]
            level = min(room)
            for flow in free:
                rates[flow] = level
            full = [m for m, cap in limits if m & free and sum(rates[f] for f in m) >= cap * (1 - 1e-9)]
            free -= set().union(*full)
        return rates


def cards(each: float = 50.0, both: float = 88.0, gpus: int = 8) -> list[tuple[Sequence[int], float, float]]:
    return [((i,), each, both) for i in range(gpus)]


def pairs(each: float, both: float) -> list[tuple[Sequence[int], float, float]]:
    return [((i, i + 1), each, both) for i in (0, 2, 4, 6)]


def socket_halves(each: float, both: float) -> list[tuple[Sequence[int], float, float]]:
    return [(range(4), each, both), (range(4, 8), each, both)]


def measured(of: Machine, fabric: Fabric) -> Machine:
    rungs = plan(layout(of), 4 * GIB)
    return learn(of, list(climb(rungs, fabric, lambda number, rung: None)))


def figures(of: Machine, link: str) -> dict[str, tuple[float, bool]]:
    return {r.direction: (round(r.bytes_s / GIB, 1), r.at_least) for r in of.link(link).rates if r.kind == "measured"}


def test_the_socket_limit_survives_when_a_pair_alone_is_faster() -> None:
    found = measured(machine(PAIRS), Fabric(*cards(), *pairs(52, 104), *socket_halves(104, 155)))
    assert found.pair_or_socket == "socket"
    assert "the socket limits" in explain(found)
    assert figures(found, "gpu0")["both"] == (88.0, False)
    assert figures(found, "uplink 0")["in"] == (52.0, False)
    assert figures(found, "socket0") == {"in": (104.0, True), "out": (104.0, True), "both": (155.0, False)}
    assert {group.sharing for group in found.groups} == {"shared"}
    assert {link.sharing for link in found.links if link.kind == "uplink"} == {"shared"}
    assert "together 52%" in found.groups[0].evidence[-1]
    bound = floors(found, 28.435 * GIB, 28.435 * GIB)[0]
    assert bound.seconds == pytest.approx(8 * 28.435 / 155, rel=1e-3)
    assert bound.bound_by is not None
    assert bound.bound_by.link.startswith("socket")


def test_the_pair_limit_survives_when_a_pair_alone_is_no_faster() -> None:
    found = measured(machine(PAIRS), Fabric(*cards(both=70), *pairs(52, 77.6), *socket_halves(200, 400)))
    assert found.pair_or_socket == "pair"
    assert figures(found, "uplink 0")["both"] == (77.6, False)
    assert figures(found, "socket0")["both"] == (155.2, True)
    bound = floors(found, 28.435 * GIB, 28.435 * GIB)[0]
    assert bound.bound_by is not None
    assert bound.bound_by.link.startswith("uplink")


def test_nothing_is_blamed_where_nothing_limits() -> None:
    found = measured(machine(PAIRS), Fabric(*cards()))
    assert found.pair_or_socket == "not_separated"
    assert {group.sharing for group in found.groups} == {"not_shared"}
    assert all(rate.at_least for rate in found.link("socket0").rates)
    bound = floors(found, GIB, GIB)[0].bound_by
    assert bound is not None
    assert bound.link.startswith("gpu")


def test_the_matrix_finds_groups_that_nobody_declared() -> None:
    hidden = machine()
    assert layout(hidden).hidden
    crew = Fabric(*cards(), ((0, 5), 52, 104), ((2, 3), 52, 104))
    found = measured(hidden, crew)
    shared = [group.gpus for group in found.groups if group.sharing == "shared"]
    assert shared == [(0, 5), (2, 3)]
    assert {g.sharing for g in found.groups if len(g.gpus) == 1} == {"not_shared"}
    assert figures(found, "uplink of GPUs 0,5")["in"] == (52.0, False)
    assert len([rung for rung in crew.ran if rung.kind == "matrix"]) == 28 * 2


def test_pair_or_socket_is_answered_for_pairs_the_matrix_found() -> None:
    found = measured(machine(), Fabric(*cards(), *pairs(52, 104), *socket_halves(104, 155)))
    assert [group.gpus for group in found.groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert found.pair_or_socket == "socket"


def test_gpus_hidden_from_this_process_are_left_alone() -> None:
    of = machine(PAIRS)
    shown = tuple(replace(gpu, cuda_ordinal=gpu.index - 1 if gpu.index in (1, 2, 3) else None) for gpu in of.gpus)
    found = layout(replace(of, gpus=shown))
    assert found.gpus == (1, 2, 3)
    assert found.groups == ((2, 3),)
    assert found.sockets == ((1, 2, 3),)
    partly = measured(replace(of, gpus=shown), Fabric(*cards()))
    assert not partly.link("socket0").rates, "three of its four GPUs do not measure a socket"


def test_memory_on_the_other_socket_has_its_price() -> None:
    found = measured(machine(PAIRS), Fabric(*cards(), *pairs(52, 104), remote=0.5))
    assert figures(found, "socket0 to others")["in"] == (52.0, False)
    near, far = floors(found, GIB, GIB, remote=4)[0], floors(found, GIB, GIB, remote=4)[-1]
    assert far.complete
    assert far.seconds is not None
    assert far.seconds > (near.seconds or 0.0)
    free = measured(machine(PAIRS), Fabric(*cards(), *pairs(52, 104)))
    assert figures(free, "socket0 to others")["in"][1], "no loss: the link between the sockets carries this or more"


def test_one_gpu_as_fast_to_either_socket_is_no_verdict_on_all_of_them() -> None:
    alone = replace(machine([Group((0,), "not_shared")], gpus=2), gpus=machine(gpus=2).gpus[:1])
    alone = replace(alone, links=tuple(link for link in alone.links if link.gpus == (0,)))
    single = measured(alone, Fabric(((0,), 50, 88)))
    assert figures(single, "socket0 to others") == {"in": (50.0, True), "out": (50.0, True), "both": (88.0, True)}
    wide = measured(machine(PAIRS), Fabric(*cards(), *pairs(52, 104), remote=0.5))
    ran = [row for row in wide.measurements if row.rung == "remote"]
    assert {len(row.gpus) for row in ran} == {8}, "all at once: there the loss shows"
    assert not any(at_least for _, at_least in figures(wide, "socket0 to others").values())


def test_one_gpu_tries_the_memory_of_every_other_node() -> None:
    nodes = tuple(NumaNode(i, "cpu", (i,), (i,), package=i // 2) for i in range(4))
    of = replace(machine(PAIRS), nodes=nodes)
    assert layout(of).nodes == (1, 2, 3)
    rungs = [rung for rung in plan(layout(of), GIB) if rung.kind == "node"]
    assert {rung.gpus for rung in rungs} == {(0,)}
    assert [rung.buffers for rung in rungs] == [f"node {n}" for n in (1, 2, 3) for _ in range(3)]
    found = measured(of, Fabric(*cards()))
    assert [row.buffer_node for row in found.measurements if row.rung == "node"][::3] == ["1", "2", "3"]
    assert figures(found, "gpu0")["in"] == (50.0, False), "far memory is not the rate of a link"
    task = task_of(of, "cuda", GIB, PIECE_BYTES, True, layout(of).nodes)
    assert task["gpus"]["0"]["others"] == [[1, [1]], [2, [2]], [3, [3]]]
    assert task["gpus"]["1"]["others"] == []
    assert region_bytes(80 * GIB, 8, remote=True, nodes=5) == GIB
    unknown = replace(of, gpus=tuple(replace(gpu, numa=Evidence(None, "none")) for gpu in of.gpus))
    assert layout(unknown).nodes == ()


def test_a_later_and_slower_measurement_does_not_lower_what_was_seen() -> None:
    first = measured(machine(PAIRS), Fabric(*cards(50, 88)))
    again = measured(first, Fabric(*cards(45, 90)))
    assert figures(again, "gpu0") == {"in": (50.0, False), "out": (50.0, False), "both": (90.0, False)}
    assert len([rate for rate in again.link("gpu0").rates if rate.kind == "measured"]) == 3
    bound = floors(again, GIB, GIB)[0].bound_by
    assert bound is not None
    assert bound.rate.bytes_s == pytest.approx(90 * GIB)


def test_both_ways_keep_each_direction_too() -> None:
    uneven = Outcome(Rung("alone", (0,), "both"), ((Sample(0, {"in": 11.0, "out": 25.0}, 1.0),),))
    row = learn(machine(PAIRS), [uneven]).measurements[0]
    assert (row.in_bytes_s, row.out_bytes_s, row.aggregate_bytes_s) == (11.0, 25.0, 36.0)
    single = Outcome(Rung("alone", (0,), "in"), ((Sample(0, {"in": 26.0}, 1.0),),))
    assert learn(machine(PAIRS), [single]).measurements[0].out_bytes_s is None


def test_measurements_are_kept_with_their_spread() -> None:
    samples = [tuple(Sample(gpu, {"in": rate}, 1.0, None, 1) for gpu in (0, 1)) for rate in (10.0, 12.0, 11.0)]
    outcome = Outcome(Rung("group", (0, 1), "in"), tuple(samples))
    assert (outcome.aggregate, outcome.per_gpu, outcome.replays) == (22.0, {0: 11.0, 1: 11.0}, 6)
    assert outcome.spread == pytest.approx(4 / 22)
    assert outcome.way("in") == 22.0
    row = learn(machine(PAIRS), [outcome]).measurements[0]
    assert (row.rung, row.per_gpu_bytes_s, row.repeats, row.buffer_node) == ("group", (11.0, 11.0), 3, "own")


def test_a_slow_gpu_replays_and_a_flapping_link_are_warned_about() -> None:
    slow = Fabric(*cards()[:7], ((7,), 14.0, 28.0))
    notes = measured(machine(PAIRS), slow).noted("warning")
    assert [note.code for note in notes] == ["slow-gpu"] * 3
    assert "GPU 7 alone carries 14.0 GiB/s in, the median GPU 50.0" in notes[0].text
    flapping = [(Sample(0, {"in": 1.0}, 1.0, link, 2),) for link in ("Gen5 x16", "Gen5 x8")]
    codes = [n.code for n in learn(machine(PAIRS), [Outcome(Rung("alone", (0,), "in"), tuple(flapping))]).notes]
    assert codes == ["link-below-max", "replays", "link-flaps"]


def test_the_link_under_load_replaces_an_idle_reading() -> None:
    of = machine(PAIRS)
    idle = Note("warning", "idle-link", "GPUs 0-7: below their maximum", "read it under load")
    found = measured(replace(of, notes=(idle,)), Fabric(*cards()))
    assert found.notes == ()
    assert {(gpu.pcie.current_gt_s, gpu.pcie.current_width) for gpu in found.gpus} == {(32.0, 16)}
    assert found.gpus[0].pcie.source == "NVML under load"
    blind = [Outcome(Rung("alone", (0,), "in"), ((Sample(0, {"in": 1.0}, 1.0),),))]
    assert learn(replace(of, notes=(idle,)), blind).notes == (idle,)


def test_a_host_that_carries_less_than_its_sockets_is_said() -> None:
    notes = measured(machine(PAIRS), Fabric(*cards(), (range(8), 100, 200))).noted("warning")
    assert {note.code for note in notes} == {"host-limit"}


def test_one_gpu_climbs_three_rungs_and_the_workload() -> None:
    alone = machine([Group((0,), "not_shared")], gpus=1, sockets=1)
    rungs = plan(layout(alone), GIB)
    assert [rung.kind for rung in rungs] == ["alone"] * 3 + ["equal"]
    assert 30 < estimate_s(rungs) < 60
    found = measured(alone, Fabric(((0,), 50, 88)))
    assert figures(found, "gpu0") == {"in": (50.0, False), "out": (50.0, False), "both": (88.0, False)}
    assert figures(found, "socket0")["both"] == (88.0, True), "one GPU cannot find the socket's limit"


def test_the_plan_measures_each_set_once_and_nested_groups_too() -> None:
    nested = Layout((0, 1, 2, 3), ((0, 1), (2, 3), (0, 1, 2, 3)), ((0, 1, 2, 3),), remote=True)
    rungs = plan(nested, GIB)
    local = [(r.gpus, r.direction) for r in rungs if r.buffers == "local" and r.kind != "equal"]
    assert len(local) == len(set(local)) == 3 * 7
    assert not [r for r in rungs if r.kind == "node"]
    assert [r.title for r in rungs if r.kind == "remote"] == [
        f"remote, GPUs 0,1,2,3, {d}" for d in ("in", "out", "both")
    ]
    assert rungs[-1].each_way_bytes == GIB
    more = plan(replace(nested, hidden=True), GIB)
    assert estimate_s(more) > estimate_s(rungs)


class Pipe:
    """A copier whose pieces take a fixed time each, in order, on a clock that moves a little with every look."""

    piece_bytes = 100

    def __init__(self, piece_s: Mapping[Way, float], look_s: float = 1e-3) -> None:
        self.piece_s, self.look_s, self.now = piece_s, look_s, 0.0
        self.free_at: dict[Way, float] = {"in": 0.0, "out": 0.0}
        self.most = 0
        self.flying: list[float] = []

    def clock(self) -> float:
        self.now += self.look_s
        return self.now

    def submit(self, way: Way) -> float:
        self.free_at[way] = max(self.free_at[way], self.now) + self.piece_s[way]
        self.flying = [*(at for at in self.flying if at > self.now), self.free_at[way]]
        self.most = max(self.most, len(self.flying))
        return self.free_at[way]

    def arrived(self, ticket: float) -> bool:
        self.now += self.look_s / 10
        return ticket <= self.now


def test_copies_fill_the_window_at_the_links_rate() -> None:
    pipe, looks = Pipe({"in": 0.02, "out": 0.05}), list[float]()
    arrivals = copy_for(pipe, ["in", "out"], 3.0, pipe.clock, lambda: looks.append(pipe.now))
    assert bytes_between(arrivals["in"], 100, 1.0, 2.0) == pytest.approx(5000, rel=0.02)
    assert bytes_between(arrivals["out"], 100, 1.0, 2.0) == pytest.approx(2000, rel=0.02)
    assert looks == [pytest.approx(1.5, abs=0.05)]
    assert pipe.most <= 2 * IN_FLIGHT
    assert all(at <= pipe.now for at in pipe.flying), "nothing is left in flight"


def test_a_number_of_bytes_is_copied_in_whole_pieces_and_no_more() -> None:
    pipe, looks = Pipe({"in": 0.02, "out": 0.01}), list[float]()
    arrivals = copy_bytes(pipe, ["in", "out"], 1050, pipe.clock, lambda: looks.append(pipe.now))
    assert [len(times) for times in arrivals.values()] == [11, 11]
    assert max(arrivals["in"]) == pytest.approx(11 * 0.02, abs=0.01)
    assert len(looks) == 1


def test_a_window_with_hardly_any_arrival_counts_whole_pieces() -> None:
    assert bytes_between([], 100, 0.0, 1.0) == 0
    assert bytes_between([0.5], 100, 0.0, 1.0) == 100
    assert bytes_between([0.5, 0.5], 100, 0.0, 1.0) == 200


def order(**fields: Any) -> dict[str, Any]:
    return {"ways": ["in"], "window_s": 1.0, "each_way_bytes": None, "start": 0.5, **fields}


def test_a_rung_is_served_from_its_start_and_the_link_is_read_under_load() -> None:
    pipe = Pipe({"in": 0.02, "out": 0.02})
    ask = iter([Reading("Gen5 x16", 7, 100, 900), Reading("Gen5 x16", 8), Reading("Gen5 x16", 9, 8100, 50)])
    found = serve(order(), pipe, lambda: next(ask), pipe.clock, lambda s: None)
    assert found["nbytes"]["in"] == pytest.approx(5000, rel=0.02)
    assert (found["seconds"], found["link"], found["replays"]) == (1.0, "Gen5 x16", 2)
    assert found["copied"]["in"] > found["nbytes"]["in"], "settling and the tail are copied as well"
    assert found["counted"] == {"in": 8000, "out": None}, "a counter that went back counts nothing"
    pipe = Pipe({"in": 0.02, "out": 0.04})
    found = serve(order(ways=["in", "out"], each_way_bytes=1000), pipe, None, pipe.clock, lambda s: None)
    assert found["nbytes"] == {"in": 1000.0, "out": 1000.0}
    assert found["seconds"] == pytest.approx(0.4, abs=0.02), "until the slower direction is done"
    assert (found["link"], found["replays"]) == (None, None)
    assert found["copied"] == {"in": 1000.0, "out": 1000.0}
    assert found["counted"] == {"in": None, "out": None}


def test_link_health_says_none_for_what_nvml_lacks() -> None:
    def refuse(handle: Any) -> int:
        raise NVMLError("Not Supported")

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bdf: bdf,
        nvmlDeviceGetCurrPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda handle: 16,
        nvmlDeviceGetPcieReplayCounter=refuse,
    )
    assert LinkHealth("0000:01:00.0", nvml).read() == ("Gen5 x16", None, None, None)
    assert LinkHealth(None, nvml).read() == Reading()
    nvml.nvmlDeviceGetFieldValues = lambda handle, fields: refuse(handle)
    assert LinkHealth("0000:01:00.0", nvml).read().received_bytes is None
    nvml.nvmlInit = lambda: refuse(0)
    assert LinkHealth("0000:01:00.0", nvml).read() == Reading()


@pytest.mark.parametrize(
    ("kind", "code", "seen"),
    [(2, 0, (198000, 197000)), (3, 0, (198000, 197000)), (1, 0, (None, None)), (3, 3, (None, None))],
    ids=["unsigned long", "unsigned long long", "32 bits wrap", "not supported"],
)
def test_bytes_are_counted_by_the_gpu_in_both_directions(
    kind: int, code: int, seen: tuple[int | None, int | None]
) -> None:
    def fields(handle: Any, ids: list[int]) -> list[Any]:
        value = [SimpleNamespace(ullVal=field * 1000) for field in ids]
        return [SimpleNamespace(nvmlReturn=code, valueType=kind, value=one) for one in value]

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bdf: bdf,
        nvmlDeviceGetFieldValues=fields,
    )
    found = LinkHealth("0000:01:00.0", nvml).read()
    assert (found.received_bytes, found.sent_bytes) == seen, "what a GPU receives came in"


def counting(factor: float | None, placement: dict[str, int] | None = None) -> Outcome:
    """Two repeats of one GPU that copied 100 GiB in, its counter off by a factor."""
    seen = None if factor is None else factor * 100 * GIB
    sample = Sample(0, {"in": 50.0 * GIB}, 1.0, copied={"in": 100.0 * GIB}, counted={"in": seen}, placement=placement)
    return Outcome(Rung("alone", (0,), "in"), ((sample,), (sample,)))


def test_counted_bytes_confirm_what_was_copied_or_are_shown() -> None:
    of = machine(PAIRS)
    kept = learn(of, [counting(1.125)])
    assert kept.notes == (), "headers and requests are counted too"
    assert (kept.measurements[0].bytes_copied, kept.measurements[0].bytes_counted) == (200 * GIB, 225 * GIB)
    for factor, text in ((0.5, "saw 100.0 GiB in, 200.0 were copied"), (1.5, "saw 300.0 GiB in, 200.0")):
        (note,) = learn(of, [counting(factor)]).notes
        assert (note.code, text in note.text) == ("bytes-counted", True)
    silent = learn(of, [counting(None)])
    assert (silent.notes, silent.measurements[0].bytes_counted) == ((), None)
    bare = [Outcome(Rung("alone", (0,), "in"), ((Sample(0, {"in": 1.0}, 1.0),),))]
    assert learn(of, bare).measurements[0].bytes_copied is None


def test_a_measurement_says_where_its_buffers_were() -> None:
    place = {"local_bytes": 3, "same_socket_bytes": 0, "remote_bytes": 1, "unknown_bytes": 0}
    samples = [replace(counting(None, place).repeats[0][0], gpu=gpu) for gpu in (0, 1)]
    pair = Outcome(Rung("group", (0, 1), "in"), (tuple(samples),))
    assert learn(machine(PAIRS), [pair]).measurements[0].placement == PageBytes(6, 0, 2, 0)
    half = replace(pair, repeats=((samples[0], replace(samples[1], placement=None)),))
    assert learn(machine(PAIRS), [half]).measurements[0].placement is None


def test_buffers_that_missed_their_node_are_warned_about(tmp_path: Path) -> None:
    crew = ProcessCrew(machine(PAIRS), tmp_path, {})
    place = {"local_bytes": 1, "same_socket_bytes": 0, "remote_bytes": 3, "unknown_bytes": 0}

    def ready(**places: dict[str, int] | None) -> list[str]:
        crew.warnings.clear()
        crew._note_start(machine(PAIRS).gpus[0], {"numa": "not applicable", "placement": places})
        return list(crew.warnings)

    assert ready(local=place) == ["GPU 0: only 25% of its local buffers are on its own NUMA node"]
    assert ready(remote=place) == ["GPU 0: only 75% of its remote buffers are on the other NUMA node"]
    assert ready(local=place | {"remote_bytes": 0, "unknown_bytes": 9}, remote=None) == [], "unknown is no verdict"


def test_buffers_are_large_unless_memory_is_short() -> None:
    assert region_bytes(1 << 40, 8, remote=True) == 2 * GIB
    assert region_bytes(64 * GIB, 8, remote=True) == GIB
    with pytest.raises(OffbenchError, match="32 buffers of 256 MiB and as much again to spare; 1024 MiB"):
        region_bytes(GIB, 8, remote=True)


def test_remote_buffers_go_to_another_package_before_another_node() -> None:
    nodes = tuple(NumaNode(i, "cpu", (i,), (i,), package=i // 2) for i in range(4))
    of = replace(machine(PAIRS), nodes=nodes)
    far = remote_node(of, replace(of.gpus[0], package=0))
    assert far is not None
    assert far.id == 2
    task = task_of(of, "cuda", GIB, PIECE_BYTES, remote=True)
    assert task["gpus"]["0"]["remote_node"] == 2
    assert task["gpus"]["0"]["remote_cpus"] == [2]
    assert task_of(of, "cuda", GIB, PIECE_BYTES, remote=False)["gpus"]["0"]["remote_node"] is None


def test_each_process_sees_its_own_gpu_only() -> None:
    gpu = machine(PAIRS).gpus[3]
    assert worker_env(replace(gpu, uuid="GPU-abc"), {})["CUDA_VISIBLE_DEVICES"] == "GPU-abc"
    assert worker_env(gpu, {})["CUDA_VISIBLE_DEVICES"] == "3"
    listed = worker_env(replace(gpu, cuda_ordinal=1), {"CUDA_VISIBLE_DEVICES": "4,6"})
    assert listed["CUDA_VISIBLE_DEVICES"] == "6"
    assert listed["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_memory_elsewhere_leaves_the_mask_as_it_was() -> None:
    before = os.sched_getaffinity(0)
    with elsewhere(0, [min(before)], None):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def on_this_cpu(gpus: int = 2) -> Machine:
    cards = tuple(Gpu(i, None, Evidence(None, "none"), None) for i in range(gpus))
    return Machine(Source("live"), gpus=cards)


def test_two_processes_copy_at_the_same_time(tmp_path: Path) -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    of = replace(on_this_cpu(), nodes=(NumaNode(0, "cpu", cpus, cpus),))
    with ProcessCrew(of, tmp_path, task_of(of, "cpu", 1 << 22, 1 << 20, remote=False, nodes=[0])) as crew:
        pids = [json.loads((tmp_path / f"ready-{gpu}.json").read_text())["pid"] for gpu in (0, 1)]
        both = crew.run(Rung("all", (0, 1), "both", window_s=0.2))
        one = crew.run(Rung("alone", (1,), "in", window_s=0.2))
        equal = crew.run(Rung("equal", (0, 1), "both", each_way_bytes=10_000_000))
        near = crew.run(Rung("node", (0,), "out", "node 0", window_s=0.2))
        assert crew.warnings == []
    assert [sample.gpu for sample in both] == [0, 1]
    assert both[0].copied["in"] >= both[0].nbytes["in"]
    assert sum((both[0].placement or {}).values()) == 2 << 22, "both of its buffers"
    assert near[0].nbytes["out"] > 0
    assert [sample.gpu for sample in one] == [1]
    assert all(set(sample.nbytes) == {"in", "out"} and sample.rate > 0 for sample in both)
    assert set(one[0].nbytes) == {"in"}
    assert all(sample.nbytes == {"in": 10 << 20, "out": 10 << 20} and sample.seconds > 0 for sample in equal)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left behind"


def test_a_process_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    of = on_this_cpu()
    task = task_of(of, "cpu", 1 << 22, 1 << 20, remote=False)
    del task["gpus"]["1"]["bdf"]
    with pytest.raises(OffbenchError, match="copy process of GPU 1 ended: KeyError: 'bdf'"):
        ProcessCrew(of, tmp_path, task).__enter__()


def test_a_worker_ends_when_told_to(tmp_path: Path) -> None:
    of = on_this_cpu(1)
    (tmp_path / "task.json").write_text(json.dumps(task_of(of, "cpu", 1 << 20, 1 << 20, remote=False)))
    (tmp_path / "stop").touch()
    words = [sys.executable, "-m", "offbench.ladder.worker", str(tmp_path), "0"]
    assert subprocess.run(words, timeout=120, check=False).returncode == 0
