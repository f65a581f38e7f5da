"""Ranks' answers to verdicts, and verdicts to a table or JSON. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbench.units import count
from offbench.verify.cases import Case, Variant

ORDER = ("not judgeable", "FAIL", "started", "pass", "n/a")
"""The worst answer of any rank is the cell's: a job that does not repeat itself proves nothing, either way."""


@dataclass(frozen=True)
class Answer:
    """What one rank says about one cell; `started` when it said nothing more."""

    case: str
    arm: str
    rank: int
    verdict: str
    text: str = ""
    difference: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Cell:
    """One arm in one case, all ranks taken together."""

    case: Case
    variant: Variant
    rehearsed: bool
    verdict: str
    """pass, FAIL, not judgeable, n/a, or `not run`: a rank had ended before."""
    text: str = ""
    difference: Mapping[str, Any] | None = None


def judge(
    cases: Sequence[Case],
    variants: Sequence[Variant],
    answers: Sequence[Answer],
    rehearsed: bool,
    failure: str | None = None,
    interrupted: bool = False,
) -> list[Cell]:
    """A verdict for each cell. failure: why the ranks ended early; the cell they were in then fails with it, unless
    they were interrupted: what was not answered by then was not run."""
    by_cell: dict[tuple[str, str], dict[int, Answer]] = {}
    for answer in answers:  # the last word of each rank
        by_cell.setdefault((answer.case, answer.arm), {})[answer.rank] = answer
    cells = []
    for case in cases:
        for variant in variants:
            said = by_cell.get((case.name, variant.name), {})
            worst = min(said.values(), key=lambda answer: ORDER.index(answer.verdict), default=None)
            ranks = 1 if rehearsed else case.world
            unsaid = worst is None or worst.verdict == "started" or (worst.verdict == "pass" and len(said) < ranks)
            if interrupted and unsaid:
                cells.append(Cell(case, variant, rehearsed, "not run", "interrupted"))
            elif worst is None:
                cells.append(Cell(case, variant, rehearsed, "not run", f"the ranks had ended: {failure}"))
            elif worst.verdict == "started":
                cells.append(Cell(case, variant, rehearsed, "FAIL", f"the ranks ended: {failure}"))
            else:
                cells.append(Cell(case, variant, rehearsed, worst.verdict, worst.text, worst.difference))
    return cells


def exit_code(cells: Sequence[Cell]) -> int:
    """1 when any cell fails or was not reached, or when nothing at all could be proven; else 0."""
    verdicts = {cell.verdict for cell in cells}
    return 1 if verdicts & {"FAIL", "not run"} or "pass" not in verdicts else 0


def to_table(cells: Sequence[Cell]) -> list[str]:
    """A line a case, a column an arm; below it what differs, and what the words mean."""
    columns = list(dict.fromkeys(cell.variant.name for cell in cells))
    rows: dict[tuple[str, bool], dict[str, str]] = {}
    for cell in cells:
        verdict = f"n/a ({cell.text})" if cell.verdict == "n/a" else cell.verdict
        rows.setdefault((cell.case.name, cell.rehearsed), {})[cell.variant.name] = verdict
    lines = [["case", *columns]]
    for (name, rehearsed), row in rows.items():
        shown = [row[column] for column in columns]
        if shown[0].startswith("n/a"):  # the whole row, for one reason
            shown = [shown[0], *("" for _ in columns[1:])]
        lines.append([f"{name}, rehearsed" if rehearsed else name, *shown])
    # A reason may run on over the columns to its right, which are then empty.
    widths = [max(len(line[i]) for line in lines if not line[i].startswith("n/a")) for i in range(len(columns) + 1)]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return [*table, "", *_remarks(cells)]


def _remarks(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for cell in cells:
        if cell.verdict in ("FAIL", "not judgeable"):
            lines.append(f"{cell.verdict}: {cell.variant.name}, {cell.case.name}: {cell.text}")
    not_run: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.verdict == "not run":
            not_run.setdefault(cell.text, []).append(cell)
    for why, (first, *others) in not_run.items():
        more = f" and {count(len(others), 'more cell')}" if others else ""
        lines.append(f"not run: {first.variant.name}, {first.case.name}{more}: {why}")
    if any(cell.variant.name.endswith("/whole") for cell in cells):
        lines.append(
            "/whole: the first step holds all state on the device at once, later ones have a slot for each chunk"
        )
    lines.append(summary(cells))
    return lines


def summary(cells: Sequence[Cell]) -> str:
    """How many cells passed, and what the others are."""
    passed = sum(cell.verdict == "pass" for cell in cells)
    others = [
        f"{sum(cell.verdict == verdict for cell in cells)} {verdict}"
        for verdict in ("FAIL", "not judgeable", "not run", "n/a")
        if any(cell.verdict == verdict for cell in cells)
    ]
    text = f"{passed} of {count(len(cells), 'cell')} equal torch.optim.AdamW bit for bit"
    return f"{text}; {', '.join(others)}" if others else text


def to_json(cells: Sequence[Cell], device: str, torch_version: str) -> str:
    """Every cell with its case, options and first difference; null where there is none."""
    body = [
        {
            "arm": cell.variant.arm,
            "options": dict(cell.variant.options),
            "ranks": cell.case.world,
            "rehearsed": cell.rehearsed,
            "case": cell.case.job,
            "verdict": cell.verdict,
            "reason": cell.text or None,
            "difference": cell.difference and {key: _plain(value) for key, value in cell.difference.items()},
        }
        for cell in cells
    ]
    return json.dumps({"device": device, "torch": torch_version, "cells": body}, indent=2)


def _plain(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: those become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
