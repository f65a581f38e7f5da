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
from offbench.planner.gather import Inputs, PlanOptions, gather
from offbench.planner.result import Span
from offbench.planner.simulate import simulate
from offbench.planner.whatif import WHAT_IFS, Outcome, chosen, outcome, setting
from offbench.topology.model import Machine, Source
from tests.planner.test_simulate import GIB, QWEN, SEED, SEED_LINKS, schedule

PLANNED = gather(PlanOptions(source="seed-8xh200"), lambda: Machine(Source("live")))


def under(name: str, inputs: Inputs = PLANNED) -> Outcome:
    what = next(what for what in WHAT_IFS if what.name == name)
    return outcome(name, what.change(inputs), 1.05)


def test_more_ranks_on_a_link_halve_what_each_gets() -> None:
    links = under("ranks").inputs.links
    assert (links.into, links.both) == pytest.approx((SEED_LINKS.into / 2, 38.75 * GIB / 2))
    assert under("remote").inputs.links.into == pytest.approx(0.8 * SEED_LINKS.into)


def test_another_pcie_generation_leaves_sockets_as_they_are() -> None:
    older, newer = under("gen4").inputs.links, under("gen6").inputs.links
    assert older.into == pytest.approx(13 * GIB)
    assert newer.into == newer.both == pytest.approx(38.75 * GIB)  # the socket binds, one way too
    given = replace(PLANNED, machine=None)
    assert under("gen6", given).inputs.links.both == pytest.approx(2 * 38.75 * GIB)


def test_a_c2c_link_needs_almost_no_state_on_the_gpu() -> None:
    found = under("c2c")
    assert found.least is not None
    assert found.least.budget <= 2 * GIB
    assert found.overlap.simulated.step_s < 1.02 * found.none.simulated.step_s


def test_longer_sequences_take_more_than_twice_the_compute_and_other_memory() -> None:
    longer, was = under("sequence"), outcome("as planned", PLANNED, 1.05)
    assert longer.inputs.compute.forward > 2.5 * SEED.forward  # attention grows faster than the tokens
    assert longer.inputs.compute.update == SEED.update
    assert longer.none.simulated.peak_bytes > was.none.simulated.peak_bytes
    assert longer.inputs.job.tokens_per_step == 2 * 131072
    bare = gather(
        PlanOptions(size="28GiB", forward=1.0, backward=2.0, one_way="26GiB/s"), lambda: Machine(Source("live"))
    )
    assert under("sequence", bare).inputs.compute.backward == 4.0


def test_accumulated_passes_leave_one_forward_after_the_update() -> None:
    found = under("accumulation").inputs
    assert found.compute.forward == SEED.forward
    assert found.compute.total == pytest.approx(4 * (SEED.forward + SEED.backward) + SEED.update)
    assert found.job.tokens_per_step == 4 * 131072


def test_bf16_moments_halve_the_bytes_and_say_that_they_are_inexact() -> None:
    what = next(what for what in WHAT_IFS if what.name == "bf16-moments")
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
    assert under("nodes").inputs.job.layout.nbytes == pytest.approx(QWEN.nbytes / 2, rel=1e-3)
    assert under("nodes").inputs.job.world == 16
    bare = replace(PLANNED, job=replace(PLANNED.job, model=None, state=28 * GIB))
    assert under("nodes", bare).inputs.job.layout.nbytes == pytest.approx(14 * GIB, rel=1e-4)


def test_the_section_has_a_row_and_an_assumption_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--from", "seed-8xh200", "--what-if", "gen4", "--what-if", "c2c"]) == 0
    shown = capsys.readouterr().out.splitlines()
    at = shown.index("What if")
    assert [line.split("  ")[0] for line in shown[at + 2 : at + 5]] == ["as planned", "gen4", "c2c"]
    assert any(line.startswith("c2c: CPU and GPU on one C2C link") for line in shown)
    slow = ["--one-way", "1GiB/s", "--bytes", "28GiB", "--forward", "0.1", "--backward", "0.1", "--target", "1"]
    assert cli.main(["plan", *slow, "--what-if", "bf16-moments", "--what-if", "nodes"]) == 0
    shown = capsys.readouterr().out
    assert chosen(("gen4", "all")) == list(WHAT_IFS)
    assert "bf16-moments (inexact)" in shown
    assert "none does" in shown  # with the target at none itself, a slow link leaves no budget


def texts(path: Path) -> list[str]:
    return [node.text or "" for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_figures_say_that_they_are_simulated_and_from_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--from", "seed-8xh200", "--plot", str(tmp_path / "new")]) == 0
    written = [Path(line.removeprefix("wrote ")) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == ["bound.svg", "memory.svg", "link.svg", "timeline.svg"]
    for path in written:
        said = " ".join(texts(path))
        assert "Simulated, not measured: qwen3-30b-a3b, 8 ranks, 28.4 GiB of state a rank" in said
        assert {"main", "chunked", "overlap", "stream", "bound"} & {word.strip(",:") for word in said.split()}


PAGE = Path(__file__).parent.parent.parent / "docs" / "how-fast-can-offload-be.md"


def test_the_pages_figures_are_those_that_the_command_makes(tmp_path: Path) -> None:
    shown = [line.split("](")[1].split(")")[0] for line in PAGE.read_text().splitlines() if line.startswith("![")]
    made = {path.name: path.read_text() for path in plots.write(tmp_path, PLANNED)}
    assert {Path(name).name for name in shown} == set(made)
    for name in shown:
        assert (PAGE.parent / name).read_text() == made[Path(name).name], (
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
