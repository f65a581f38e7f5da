"""The page on two GPUs says what its records and tables say."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from offbench.planner.reality import against
from offbench.record import RunRecord
from offbench.results_file import read_records
from offbench.units import GIB

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "two-gpus.md").read_text()
RECORDS = [r for r in read_records([ROOT / "results" / "h200-x2-real.jsonl"]).records if r.status == "ok"]
CUT = [r for r in read_records([ROOT / "results" / "h200-x2-cut.jsonl"]).records if r.status == "ok"]


def steps(arm: str, kind: str, numa: bool = False, records: list[RunRecord] = RECORDS) -> list[float]:
    chosen = [r for r in records if (r.spec.arm.name, r.spec.mode.kind, r.spec.arm.numa) == (arm, kind, numa)]
    return sorted(r.step_s for r in chosen if r.step_s is not None)


def test_real_and_rehearsed_steps_are_those_of_the_records() -> None:
    none, rehearsed_none = statistics.median(steps("none", "real")), steps("none", "rehearsal")[0]
    page = PAGE[: PAGE.index("## With large parameters")]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \(([\d.]+)-([\d.]+)\) \| (.*) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == ["none", "main", "chunked", "overlap", "stream"]
    for arm, *real, rest in rows:
        found = steps(arm, "real")
        step_s = statistics.median(found)
        assert len(found) == 3
        assert real == [f"{value:.3f}" for value in (step_s, found[0], found[-1])]
        cells = [f"{step_s / none:.2f}"]
        if rehearsed := steps(arm, "rehearsal"):
            (short,) = rehearsed
            cells += [f"{short:.3f}", f"{short / rehearsed_none:.2f}", f"{100 * (1 - short / step_s):.1f} %"]
        assert rest.split(" | ") == (cells + 3 * ["-"])[:4]
    bound = ", ".join(
        f"{arm} {steps(arm, 'real', numa=True)[0]:.3f}" for arm in ("main", "chunked", "overlap", "stream")
    )
    assert f"{bound} s" in " ".join(PAGE.split())
    assert f"A step of `none` is {none - rehearsed_none:.3f} s longer with it" in " ".join(PAGE.split())


def test_steps_with_large_parameters_in_pieces_are_those_of_the_records() -> None:
    page = PAGE[PAGE.index("## With large parameters") : PAGE.index("## What bounds")]
    rows = re.findall(r"^\| (\w+) \| (.*) \| ([\d.]+) \| ([\d.-]+) \| ([\d.-]+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == ["none", "stream", "overlap", "zerocopy"]
    none = statistics.median(steps("none", "real", records=CUT))
    none_before = statistics.median(steps("none", "real"))
    for arm, said, ratio, ideal, before in rows:
        found = steps(arm, "real", records=CUT)
        step_s = statistics.median(found)
        assert said == f"{step_s:.3f}" + (f" ({found[0]:.3f}-{found[-1]:.3f})" if len(found) == 3 else "")
        assert ratio == f"{step_s / none:.2f}"
        simulated = [row.simulated_s for row in against(CUT)[0] if row.name.startswith(arm)]
        assert ideal == ("-" if arm == "none" else f"{statistics.median(simulated):.3f}")
        assert before == (f"{statistics.median(steps(arm, 'real')) / none_before:.2f}" if steps(arm, "real") else "-")
    rates = sorted(both_ways(r) for r in CUT if r.spec.arm.name == "zerocopy")
    first, second, third = (f"{rate:.1f}" for rate in rates)
    assert f"moved {first}, {second} and {third} GiB/s a GPU both ways" in " ".join(PAGE.split())


def test_what_bounds_the_steps_is_what_the_records_say_of_rank_0() -> None:
    cells = {}
    for line in PAGE[PAGE.index("## What bounds") :].splitlines():
        if found := re.fullmatch(r"\| ([^|]+) \| ([\d.]+), [\d.]+ \| ([\d.]+), [\d.]+ \|", line):
            cells[found[1]] = found[2], found[3]
    names = {
        "step": ["step_s"],
        "computing, with dispatch and combine": ["compute_s"],
        "waits for move-in": ["move_in_s"],
        "tail: waits for write-back": ["tail_s"],
        "waits for FSDP2's collectives": ["gather_s"],
        "AdamW": ["update_s"],
        "launch-bound, between kernels, unexplained": ["launch_s", "between_s", "unexplained_s"],
    }
    splits = {record.spec.arm.name: record.split.total for record in CUT if record.split}
    assert cells == {
        name: tuple(f"{sum(getattr(splits[arm], field) for field in fields):.3f}" for arm in ("overlap", "stream"))
        for name, fields in names.items()
    }


def both_ways(record: RunRecord) -> float:
    moved = record.moved
    assert moved.in_bytes_per_step
    assert moved.out_bytes_per_step
    assert moved.copy_busy_s
    return (moved.in_bytes_per_step + moved.out_bytes_per_step) / moved.copy_busy_s / GIB


def test_rates_of_copies_are_those_of_the_records() -> None:
    found: dict[str, list[float]] = {"real": [], "rehearsal": []}
    for record in RECORDS:
        if record.spec.arm.name == "overlap" and not record.spec.arm.numa:
            found[record.spec.mode.kind].append(both_ways(record))
    text = " ".join(PAGE.split())
    assert len(found["real"]) == 3
    assert f"made {found['rehearsal'][0]:.1f} GiB/s a GPU both ways, rehearsed" in text
    first, second, third = (f"{rate:.1f}" for rate in sorted(found["real"]))
    assert f"and {first}, {second} and {third} in the three real launches" in text


def test_the_proof_is_that_of_the_tables() -> None:
    pair, alone = ((ROOT / "results" / f"h200-{name}.txt").read_text() for name in ("x2-verify", "verify"))
    said = "296 of 296 cells equal torch.optim.AdamW bit for bit"
    assert said in pair.splitlines()
    assert said in PAGE
    assert "152 of 160 cells equal torch.optim.AdamW bit for bit; 8 n/a" in alone.splitlines()
    for table in (pair, alone):
        rows = [line for line in table.splitlines() if re.match(r"\d ranks?, ", line)]
        words = [word for row in rows for word in re.split(r"\s{2,}", row)[1:]]
        assert set(words) <= {"pass", "n/a (EP 2 on 1 rank)"}
        assert words.count("pass") == int(re.search(r"(\d+) of", table)[1])  # type: ignore[index]
