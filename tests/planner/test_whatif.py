"""What-ifs, and the figures of a plan."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from offbench import cli
from offbench.planner import plots
from offbench.planner.chart import ticks
from offbench.planner.choose import at_budget
from offbench.planner.gather import Inputs, gather
from offbench.planner.options import PlanOptions
from offbench.planner.result import Span
from offbench.planner.simulate import simulate
from offbench.planner.whatif import WHAT_IFS, WhatIf, chosen, outcome, setting
from offbench.topology.model import Machine, Source
from tests.planner.test_command import NATIVE
from tests.planner.test_simulate import GIB, QWEN, SEED, SEED_LINKS, schedule

PLANNED = gather(PlanOptions(source="seed-8xh200"), lambda: Machine(Source("live")))


def what_if(name: str) -> WhatIf:
    return next(what for what in WHAT_IFS if what.name == name)


def under(name: str, inputs: Inputs = PLANNED) -> Inputs:
    return what_if(name).change(inputs)


def none_peak(inputs: Inputs) -> int:
    return at_budget(setting(inputs), "none", 0).simulated.peak_bytes


def test_more_ranks_on_a_link_halve_what_each_gets() -> None:
    links = under("ranks").links
    assert (links.into, links.both) == pytest.approx((SEED_LINKS.into / 2, 38.75 * GIB / 2))
    assert under("remote").links.into == pytest.approx(0.8 * SEED_LINKS.into)


def test_another_pcie_generation_leaves_sockets_as_they_are() -> None:
    older, newer = under("gen4").links, under("gen6").links
    assert older.into == pytest.approx(13 * GIB)
    assert newer.into == newer.both == pytest.approx(38.75 * GIB)  # the socket binds, one way too
    given = replace(PLANNED, machine=None)
    assert under("gen6", given).links.both == pytest.approx(2 * 38.75 * GIB)
    assert what_if("gen6").assumes(PLANNED).endswith("Gen5 by its description; its sockets and memory as they are")
    assert "taken for Gen5: nothing says" in what_if("gen6").assumes(given)
    recorded = gather(PlanOptions(record=NATIVE), lambda: Machine(Source("live")))
    assert "the planned one is Gen5; all of its rates" in what_if("gen6").assumes(recorded)
    assert under("gen6", replace(recorded, pcie=6)).links == recorded.links


def test_the_generation_is_the_described_machines() -> None:
    assert PLANNED.machine
    gpus = tuple(replace(gpu, pcie=replace(gpu.pcie, max_gt_s=16.0)) for gpu in PLANNED.machine.gpus)
    older = replace(PLANNED, machine=replace(PLANNED.machine, gpus=gpus))
    assert under("gen4", older).links == PLANNED.links
    assert "is Gen4 by its description" in what_if("gen4").assumes(older)
    unknown = replace(gpus[0], pcie=replace(gpus[0].pcie, max_gt_s=None))
    silent = replace(PLANNED, machine=replace(PLANNED.machine, gpus=(unknown,)))
    assert "taken for Gen5: nothing says" in what_if("gen4").assumes(silent)
    sockets = tuple(link for link in PLANNED.machine.links if link.kind == "socket")
    coherent = replace(PLANNED, machine=replace(PLANNED.machine, links=sockets))
    assert under("gen6", coherent).links == under("gen4", coherent).links
    assert "nothing changes" in what_if("gen6").assumes(coherent)


def test_every_what_if_says_what_it_assumes_of_compute_and_bytes() -> None:
    bare = replace(PLANNED, job=replace(PLANNED.job, model=None, state=28 * GIB))
    said = {what.name: (what.assumes(PLANNED), what.assumes(bare)) for what in WHAT_IFS}
    assert "the loss with tokens" in said["sequence"][0]
    assert "twice as long" in said["sequence"][1]
    assert "gradients add up unsharded" in said["accumulation"][0]
    assert "gradients stay sharded" in said["accumulation"][1]
    assert "20 bytes a parameter instead of 28" in said["bf16-moments"][0]
    assert "as if the network hid its collectives" in said["nodes"][0]
    assert all(len(text) > 40 for texts in said.values() for text in texts)


def test_a_c2c_link_needs_almost_no_state_on_the_gpu() -> None:
    found = outcome("c2c", under("c2c"), 1.05)
    assert found.least is not None
    assert found.least.budget <= 2 * GIB
    assert found.overlap.simulated.step_s < 1.02 * found.none.simulated.step_s


def test_longer_sequences_take_more_than_twice_the_compute_and_other_memory() -> None:
    longer = under("sequence")
    assert longer.compute.forward > 2.5 * SEED.forward  # attention grows faster than the tokens
    assert (longer.compute.update, longer.compute.loss) == (SEED.update, 2 * PLANNED.compute.loss)
    assert none_peak(longer) > none_peak(PLANNED)
    assert longer.job.tokens_per_step == 2 * 131072
    bare = gather(
        PlanOptions(size="28GiB", forward=1.0, backward=2.0, one_way="26GiB/s"), lambda: Machine(Source("live"))
    )
    assert under("sequence", bare).compute.backward == 4.0


def test_accumulated_passes_leave_one_forward_after_the_update() -> None:
    found = under("accumulation")
    assert (found.compute.forward, found.compute.loss) == (SEED.forward, PLANNED.compute.loss)
    assert found.compute.total == pytest.approx(4 * (SEED.forward + SEED.backward) + SEED.update)
    assert found.job.tokens_per_step == 4 * 131072


def test_bf16_moments_halve_the_bytes_and_say_that_they_are_inexact() -> None:
    what = what_if("bf16-moments")
    assert not what.exact
    assert what.said.startswith("inexact")
    found = what.change(PLANNED)
    # Each moment is padded to 512 bytes, of some small ones a larger share now.
    assert found.job.layout.nbytes == pytest.approx(QWEN.nbytes / 2, rel=1e-5)
    assert found.job.layout.gradients == 1.0
    bare = what.change(replace(PLANNED, job=replace(PLANNED.job, model=None, state=28 * GIB))).job.layout
    assert (bare.nbytes, bare.gradients) == (pytest.approx(14 * GIB, rel=1e-4), 1.0)
    assert all(other.exact for other in WHAT_IFS if other is not what)


def test_a_second_node_halves_a_ranks_state() -> None:
    assert under("nodes").job.layout.nbytes == pytest.approx(QWEN.nbytes / 2, rel=1e-3)
    assert under("nodes").job.world == 16
    bare = replace(PLANNED, job=replace(PLANNED.job, model=None, state=28 * GIB))
    assert under("nodes", bare).job.layout.nbytes == pytest.approx(14 * GIB, rel=1e-4)


def test_the_section_has_a_row_and_an_assumption_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--one-way", "1GiB/s", "--bytes", "28GiB", "--layers", "8", "--forward", "0.1", "--backward", "0.1"]
    slow += ["--target", "1", "--state-budget", "0GiB"]
    assert cli.main(["plan", *slow, "--what-if", "bf16-moments", "--what-if", "c2c"]) == 0
    shown = capsys.readouterr().out.splitlines()
    at = shown.index("What if")
    assert [line.split("  ")[0] for line in shown[at + 2 : at + 5]] == ["as planned", "bf16-moments (inexact)", "c2c"]
    assert any(line.startswith("c2c: CPU and GPU on one C2C link") for line in shown)
    assert any("none does" in line for line in shown)  # with the target at none itself, a slow link leaves no budget
    assert chosen(("gen4", "all")) == list(WHAT_IFS)


def texts(path: Path) -> list[str]:
    return [node.text or "" for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


PAGE = Path(__file__).parent.parent.parent / "docs" / "how-fast-can-offload-be.md"


def test_the_pages_figures_are_those_that_the_command_makes_and_say_from_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--from", "seed-8xh200", "--plot", str(tmp_path / "new")]) == 0
    written = [Path(line.removeprefix("wrote ")) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == ["bound.svg", "memory.svg", "link.svg", "timeline.svg"]
    for path in written:
        said = " ".join(texts(path))
        assert "Simulated, not measured: qwen3-30b-a3b, 8 ranks, 28.4 GiB of state a rank" in said
        assert {"main", "chunked", "overlap", "stream", "bound"} & {word.strip(",:") for word in said.split()}
    shown = [line.split("](")[1].split(")")[0] for line in PAGE.read_text().splitlines() if line.startswith("![")]
    assert {Path(name).name for name in shown} == {path.name for path in written}
    for name in shown:
        assert (PAGE.parent / name).read_text() == (tmp_path / "new" / Path(name).name).read_text(), (
            "make it again: offbench plan --from seed-8xh200 --plot docs/figures"
        )


def test_spans_cover_the_step_without_gaps() -> None:
    spans: list[Span] = []
    found = simulate(schedule("overlap"), QWEN, SEED, SEED_LINKS, spans=spans)
    assert spans[0].start == pytest.approx(0, abs=1e-9)
    assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(spans))
    assert spans[-1].end == pytest.approx(found.step_s)
    waits = sum(span.end - span.start for span in spans if span.compute in {"move_in", "slot", "write_back", "small"})
    assert waits == pytest.approx(found.waits.total)
    lanes = {lane.name: lane.spans for lane in plots.lanes(spans)}
    busy = sum(end - start for start, end, _ in lanes["in"])
    assert busy >= QWEN.nbytes / SEED_LINKS.into


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.9, 1.33, [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]),
        (33, 62, [30, 35, 40, 45, 50, 55, 60, 65]),
        (5, 5, None),
    ],
)
def test_ticks_are_round_and_cover(low: float, high: float, found: list[float] | None) -> None:
    made = ticks(low, high)
    assert made[0] <= low <= high <= made[-1]
    if found is not None:
        assert made == pytest.approx(found)


def test_a_setting_is_simulated_as_the_plan_is() -> None:
    assert setting(PLANNED).layout == QWEN
