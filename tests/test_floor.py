from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbench.errors import UsageError
from offbench.floor import Capacity, Flow, least_time, of_launch, pipelined
from offbench.machine_floor import BETWEEN, HIDDEN, UNPLACED, dram_floor, floor_json, floors, measured_tree, path
from offbench.record import Link, Moved
from offbench.topology.links import Group, Rate
from offbench.topology.links import Link as MachineLink
from offbench.topology.model import Evidence, Gpu, Machine, Source

GIB = 2**30
SEED = 28.435 * GIB


def rates(kind: str = "measured", **figures: float) -> tuple[Rate, ...]:
    names = {"down": "in", "up": "out", "both": "both"}
    return tuple(Rate(names[key], value * GIB, kind, "test") for key, value in figures.items())  # type: ignore[arg-type]


def seed(socket: bool = True, data_path: str = "pcie") -> Machine:
    """Two sockets of two uplinks of two GPUs, capacities as measured on the published machine."""
    gpus = tuple(
        Gpu(i, f"0000:{i:02x}:00.0", Evidence(i // 4, "medium"), i // 4, data_path=data_path)  # type: ignore[arg-type]
        for i in range(8)
    )
    links = [MachineLink(f"gpu{i}", "gpu_link", (i,), rates("line rate", down=58.7, up=58.7)) for i in range(8)]
    links += [
        MachineLink(f"uplink{u}", "uplink", (2 * u, 2 * u + 1), rates(down=52, up=52) + rates("line rate", down=58.7))
        for u in range(4)
    ]
    if socket:
        links += [
            MachineLink(f"socket{s}", "socket", tuple(range(4 * s, 4 * s + 4)), rates(both=155.2)) for s in (0, 1)
        ]
    return Machine(Source("offbench"), gpus=gpus, links=tuple(links))


def test_the_published_machine() -> None:
    duplex, uplink, serial, line, _ = floors(seed(), SEED, SEED)
    assert duplex.seconds == pytest.approx(1.466, abs=1e-3)
    assert duplex.bound_by is not None
    assert (duplex.bound_by.link, duplex.bound_by.direction) == ("socket0", "both")
    assert duplex.rank_rate == pytest.approx(19.4 * GIB, rel=1e-2)
    assert uplink.seconds == pytest.approx(1.094, abs=1e-3)
    assert uplink.bound_by is not None
    assert uplink.bound_by.link == "uplink0"
    assert serial.seconds == pytest.approx(2.187, abs=1e-3)
    assert line.seconds == pytest.approx(0.969, abs=1e-3)
    assert all(floor.complete for floor in (duplex, uplink, serial))
    slack = {use.link: duplex.slack(use) for use in duplex.uses}
    assert slack["socket0"] == 0
    assert slack["uplink0"] == pytest.approx(0.254, abs=2e-3), "the uplink runs at 74 % of its rate"


def test_without_the_socket_limit_the_uplink_binds() -> None:
    duplex = floors(seed(socket=False), SEED, SEED)[0]
    assert duplex.seconds == pytest.approx(1.094, abs=1e-3)
    assert duplex.bound_by is not None
    assert duplex.bound_by.link.startswith("uplink")


def test_one_gpu_of_the_machine_is_bound_by_less() -> None:
    duplex, _, serial, *_ = floors(seed(), SEED, SEED, ranks=1)
    assert duplex.seconds == pytest.approx(28.435 / 52)
    assert serial.seconds == pytest.approx(1.094, abs=1e-3)


def test_exposed_copies_of_the_published_rows_over_the_floor() -> None:
    seconds = floors(seed(), SEED, SEED)[0].seconds
    assert seconds is not None
    assert [round(exposed / seconds, 2) for exposed in (2.64, 1.61, 1.26)] == [1.80, 1.10, 0.86]


def test_ranks_off_their_node_need_the_link_between_sockets() -> None:
    machine = seed()
    missing = floors(machine, SEED, SEED, remote=4)[-1]
    assert not missing.complete
    assert BETWEEN in missing.missing
    assert missing.seconds == pytest.approx(1.466, abs=1e-3)
    between = MachineLink("upi", "inter_socket", tuple(range(8)), rates(both=100))
    known = floors(replace(machine, links=(*machine.links, between)), SEED, SEED, remote=4)
    assert known[0].seconds == pytest.approx(1.466, abs=1e-3), "local ranks do not cross it"
    assert known[-1].seconds == pytest.approx(8 * 28.435 / 100)
    assert known[-1].bound_by is not None
    assert known[-1].bound_by.link == "upi"


def test_remote_ranks_use_the_other_memory() -> None:
    memory = [MachineLink(f"dram{s}", "dram", tuple(range(4 * s, 4 * s + 4))) for s in (0, 1)]
    machine = replace(seed(), links=(*seed().links, *memory))
    assert path(machine, machine.gpus[0])[-1] == "dram0"
    assert path(machine, machine.gpus[0], remote=True)[-2:] == (BETWEEN, "dram1")


def test_every_rank_remote_is_shown_where_the_link_between_sockets_was_measured() -> None:
    between = MachineLink("upi", "inter_socket", tuple(range(8)), rates(both=100))
    found = floors(replace(seed(), links=(*seed().links, between)), SEED, SEED)
    assert (found[-1].variant, found[-1].seconds) == ("remote 8", pytest.approx(8 * 2 * 28.435 / 100))
    assert "remote" not in {floor.variant.split()[0] for floor in floors(seed(), SEED, SEED)}


def test_the_ends_of_the_pipeline_of_the_published_machine() -> None:
    chunk = SEED / 33
    duplex, *_, pipeline = floors(seed(), SEED, SEED, chunk_bytes=chunk)
    assert pipeline.variant == "pipeline"
    assert pipeline.ends_s == pytest.approx(2 * 28.435 / 33 / 52), "in and out, each at the rate of one rank alone"
    assert pipeline.seconds == pytest.approx((duplex.seconds or 0) + 0.033, abs=1e-3)
    assert pipeline.bound_by == duplex.bound_by
    whole = floors(seed(), SEED, SEED, ranks=1, chunk_bytes=100 * SEED)[-1]
    assert whole.ends_s == pytest.approx(2 * 28.435 / 52), "no chunk is larger than what moves"
    unknown = pipelined(least_time([], duplex.flows), [], chunk)
    assert (unknown.seconds, unknown.ends_s) == (None, 0.0)


def test_cpus_that_step_need_host_memory_as_well() -> None:
    params = SEED / 8
    rate = Rate("both", 250 * GIB, "assumed", "--dram")
    found = dram_floor(seed(), SEED, SEED, params, rate, 8)
    assert found.variant == "DRAM"
    assert found.seconds == pytest.approx(4 * (2 * 28.435 + 16 * 28.435 / 8) / 250)
    assert found.bound_by is not None
    assert found.bound_by.link == "dram0"
    lost = replace(seed().gpus[0], numa=Evidence(None, "none"))
    nowhere = dram_floor(replace(seed(), gpus=(lost,)), SEED, SEED, params, rate, 1)
    assert (nowhere.seconds, nowhere.missing) == (None, (UNPLACED,))


def test_coherent_parts_do_not_cross_pcie() -> None:
    fast = MachineLink("c2c0", "c2c", (0,), rates(down=300))
    for data_path, expected in (("c2c", ("socket0", "c2c0")), ("pcie", ("gpu0", "uplink0", "socket0"))):
        machine = seed(data_path=data_path)
        assert path(replace(machine, links=(*machine.links, fast)), machine.gpus[0]) == expected


@pytest.mark.parametrize("groups", [((0, 1, 2),), ((0,), (1,), (2,))])
def test_sharing_that_cannot_be_seen_makes_a_floor_incomplete(groups: tuple[tuple[int, ...], ...]) -> None:
    links = tuple(MachineLink(f"gpu{i}", "gpu_link", (i,), rates("line rate", down=50, up=50)) for i in range(3))
    gpus = seed().gpus[:3]
    flat = Machine(Source("live"), gpus=gpus, links=links, groups=tuple(Group(g, "unverified") for g in groups))
    duplex, uplink, _, line, _ = floors(flat, GIB, GIB)
    assert (duplex.missing, uplink.missing, line.missing) == ((HIDDEN,),) * 3
    assert duplex.seconds == pytest.approx(1 / 50)
    proven = replace(flat, groups=tuple(Group((i,), "not_shared") for i in range(3)))
    assert floors(proven, GIB, GIB)[0].complete
    one = replace(flat, gpus=gpus[:1], links=links[:1], groups=(Group((0,), "unverified"),))
    assert floors(one, GIB, GIB)[0].complete, "one GPU shares with nobody"


def test_a_claim_of_an_emulated_bridge_is_no_capacity() -> None:
    claimed = MachineLink("uplink0", "uplink", (0,), rates("assumed", down=14.7, up=14.7), emulated="AWS")
    machine = replace(seed(socket=False), links=(seed().links[0], claimed))
    floor = floors(machine, SEED, SEED, ranks=1)[0]
    assert floor.missing == ("uplink0",)
    assert floor.seconds == pytest.approx(28.435 / 58.7)


def test_a_level_that_did_not_bind_when_measured_cannot_bind() -> None:
    loose = Rate("both", 60.0, "measured", "test", at_least=True)
    capacities = [Capacity.of("gpu0", 50.0, 50.0), Capacity("socket0", both=loose)]
    floor = least_time(capacities, [Flow(0, 100.0, 100.0, ("gpu0", "socket0"))])
    assert (floor.seconds, floor.complete) == (2.0, True)
    assert floor.bound_by is not None
    assert floor.bound_by.link == "gpu0"


def test_unknown_capacity_is_a_partial_floor_never_infinity() -> None:
    flows = [Flow(0, 100.0, 50.0, ("a", "b", "c"))]
    floor = least_time([Capacity.of("a", down=10.0, up=10.0), Capacity.of("b", down=5.0)], flows)
    assert floor.seconds == 20.0
    assert floor.missing == ("b", "c")
    nothing = least_time([], flows)
    assert (nothing.seconds, nothing.bound_by, nothing.complete) == (None, None, False)
    assert (floor_json(nothing)["seconds"], floor_json(nothing)["ends_s"]) == (None, None)
    assert least_time([], [Flow(0, 0.0, 0.0, ("a",))]).seconds == 0.0


def test_json_has_every_key_with_units() -> None:
    found = floor_json(floors(seed(), SEED, SEED)[0])
    assert found["bound_by"] == {"link": "socket0", "direction": "both"}
    assert found["ranks"] == 8
    assert found["per_rank_gib_s"] == pytest.approx(19.4, rel=1e-2)
    first = found["slack"][0]  # type: ignore[index]
    assert (first["kind"], first["slack"]) == ("measured", 0.0)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="9 ranks do not fit: this machine has 8 GPUs"):
        floors(seed(), 1, 1, ranks=9)
    with pytest.raises(UsageError, match="there are only 2 ranks"):
        floors(seed(), 1, 1, ranks=2, remote=3)


def test_a_launch_carries_the_floor_of_its_own_link() -> None:
    moved = Moved(in_bytes_per_step=SEED, out_bytes_per_step=SEED)
    link = Link(in_bytes_per_s=50.2 * GIB, out_bytes_per_s=50.8 * GIB, both_bytes_per_s=90.4 * GIB)
    row = of_launch(moved, link)
    assert row.seconds == pytest.approx(2 * 28.435 / 90.4)
    assert row.bound_by == "gpu_link duplex"
    assert row.serial_seconds == pytest.approx(28.435 / 50.2 + 28.435 / 50.8)
    assert row.pipeline_seconds is None, "no chunk was told"
    chunked = of_launch(moved, link, chunk_bytes=GIB)
    assert chunked.pipeline_seconds == pytest.approx((row.seconds or 0) + 1 / 50.2 + 1 / 50.8)


def test_shared_links_raise_the_floor_of_a_launch() -> None:
    moved = Moved(in_bytes_per_step=SEED, out_bytes_per_step=SEED)
    link = Link(in_bytes_per_s=50 * GIB, out_bytes_per_s=50 * GIB, both_bytes_per_s=90 * GIB)
    row = of_launch(moved, link, measured_tree(seed(), 8))
    assert row.seconds == pytest.approx(1.466, abs=1e-3)
    assert row.bound_by == "socket0 duplex"
    assert of_launch(moved, link, measured_tree(seed(), 1)).bound_by == "gpu_link duplex"


def test_a_launch_without_copies_or_rates_has_no_floor() -> None:
    link = Link(in_bytes_per_s=1.0, out_bytes_per_s=1.0, both_bytes_per_s=1.0)
    for moved, rate in ((Moved(), link), (Moved(in_bytes_per_step=0.0, out_bytes_per_step=0.0), link)):
        assert of_launch(moved, rate).seconds is None
    row = of_launch(Moved(in_bytes_per_step=1.0, out_bytes_per_step=1.0), Link())
    assert (row.seconds, row.bound_by) == (None, None)


NAMES = ("a", "b", "c", "d")
figure = st.floats(1.0, 1e3)
maybe = st.none() | figure
capacity = st.builds(Capacity.of, st.sampled_from(NAMES), maybe, maybe, maybe)
capacity_sets = st.lists(capacity, max_size=4, unique_by=lambda found: found.link)
flow = st.builds(
    Flow,
    st.integers(0, 9),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e4),
    st.lists(st.sampled_from(NAMES), unique=True).map(tuple),
)
flows_of_ranks = st.lists(flow, min_size=1, max_size=6)
serial = st.booleans()


def seconds(capacities: list[Capacity], flows: list[Flow], serial: bool) -> float:
    return least_time(capacities, flows, serial=serial).seconds or 0.0


@given(capacity_sets, flows_of_ranks, flow, serial)
def test_more_bytes_never_lower_the_floor(c: list[Capacity], f: list[Flow], more: Flow, s: bool) -> None:
    assert seconds(c, [*f, more], s) >= seconds(c, f, s)


@given(capacity_sets, flows_of_ranks, capacity, serial)
def test_another_link_never_lowers_the_floor(c: list[Capacity], f: list[Flow], other: Capacity, s: bool) -> None:
    added = replace(other, link="new")
    longer = [replace(flow, path=(*flow.path, "new")) for flow in f]
    assert seconds([*c, added], longer, s) >= seconds(c, f, s)


@given(capacity_sets, flows_of_ranks, st.sampled_from([0.25, 0.5, 2.0, 8.0]), serial)
def test_scaling_capacities_divides_the_floor(c: list[Capacity], f: list[Flow], k: float, s: bool) -> None:
    def scaled(rate: Rate | None) -> Rate | None:
        return rate and replace(rate, bytes_s=rate.bytes_s * k)

    faster = [Capacity(x.link, scaled(x.down), scaled(x.up), scaled(x.both)) for x in c]
    assert seconds(faster, f, s) == pytest.approx(seconds(c, f, s) / k)


@given(capacity_sets, flows_of_ranks, st.floats(0.01, 1.0), st.sampled_from(["down", "up", "both"]), serial)
def test_less_capacity_never_lowers_the_floor(c: list[Capacity], f: list[Flow], k: float, which: str, s: bool) -> None:
    def slower(found: Capacity) -> Capacity:
        rate = getattr(found, which)
        return found if rate is None else replace(found, **{which: replace(rate, bytes_s=rate.bytes_s * k)})

    assert seconds([slower(found) for found in c], f, s) >= seconds(c, f, s)


@given(capacity_sets, flows_of_ranks, capacity_sets, flows_of_ranks, serial)
def test_independent_halves_change_nothing(
    c: list[Capacity], f: list[Flow], other_c: list[Capacity], other_f: list[Flow], s: bool
) -> None:
    theirs = [replace(found, link=found.link * 2) for found in other_c]
    moved = [replace(flow, path=tuple(link * 2 for link in flow.path)) for flow in other_f]
    whole = seconds([*c, *theirs], [*f, *moved], s)
    assert whole == max(seconds(c, f, s), seconds(theirs, moved, s))


@given(capacity_sets, flows_of_ranks, figure, figure)
def test_the_ends_grow_with_the_chunk_and_never_make_a_floor_lower(
    c: list[Capacity], f: list[Flow], chunk: float, more: float
) -> None:
    plain = least_time(c, f)
    short, long = pipelined(plain, c, chunk), pipelined(plain, c, chunk + more)
    assert (plain.seconds or 0.0) <= (short.seconds or 0.0) <= (long.seconds or 0.0)


@given(capacity_sets, flows_of_ranks)
def test_one_way_at_a_time_is_never_faster_and_every_link_keeps_up(c: list[Capacity], f: list[Flow]) -> None:
    duplex = least_time(c, f)
    assert seconds(c, f, True) >= (duplex.seconds or 0.0) * (1 - 1e-12)
    assert all(0 <= duplex.slack(use) <= 1 for use in duplex.uses)
    assert not any(use.seconds == float("inf") for use in duplex.uses)
