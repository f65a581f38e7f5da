"""Groups of rows as a terminal table, Markdown, CSV or JSON. Machine formats name units; a missing figure is null,
empty or `-`, never zero."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from offbench import condition_table, gap_table, reserved_table
from offbench.compare import Group, Row, Spread
from offbench.naming import describe
from offbench.record import SmallCopies
from offbench.units import gib

MISSING = "-"
WHOLE_RUN = "*"
"""Marks a peak over the whole run where first step and window were not told apart."""


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return MISSING
    middle = format(spread.median, form)
    return middle if spread.n == 1 else f"{middle} ({spread.low:{form}}-{spread.high:{form}})"


def _bytes(value: int | None) -> str:
    return MISSING if value is None else gib(value)


def _x_none(row: Row) -> str:
    if row.x_none is None:
        return MISSING
    if row.x_none_interval is not None:  # says more than the noise floor does
        low, high = row.x_none_interval
        return f"{row.x_none:.3f} ({low:.3f}-{high:.3f})"
    return "same" if row.same else f"{row.x_none:.2f}"


def _first_peak(row: Row) -> str:
    if row.first_peak_bytes is None and row.run_peak_bytes is not None:
        return gib(row.run_peak_bytes) + WHOLE_RUN
    return _bytes(row.first_peak_bytes)


def _ranks_remote(row: Row) -> str:
    return MISSING if row.ranks_remote is None else f"{row.ranks_remote}/{row.ranks_pinned}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "arm": lambda row: row.label or row.arm,
    "axes": lambda row: row.axes or MISSING,
    "tok/s": lambda row: _spread(row.tok_s, ".0f"),
    "step s": lambda row: _spread(row.step_s, ".3f"),
    "x none": _x_none,
    "exposed s": lambda row: MISSING if row.exposed_s is None else f"{row.exposed_s:.3f}",
    "floor s": lambda row: MISSING if row.floor_s is None else f"{row.floor_s:.3f}",
    "x floor": lambda row: MISSING if row.x_floor is None else f"{row.x_floor:.2f}",
    "ideal s": lambda row: MISSING if row.ideal_s is None else f"{row.ideal_s:.3f}",
    "gap s": lambda row: MISSING if row.gap_s is None else f"{row.gap_s:z.3f}",
    "peak GiB, first step": _first_peak,
    "peak GiB, steady": lambda row: _bytes(row.steady_peak_bytes),
    "pinned GiB": lambda row: _bytes(row.pinned_bytes),
    "ranks remote": _ranks_remote,
    "RSS GiB": lambda row: _bytes(row.rss_bytes),
    "n": lambda row: str(row.launches),
    "status": lambda row: row.status,
}
TEXT_COLUMNS = {"arm", "axes", "status", "throttled by"}
SPREAD_COLUMNS = {"tok/s", "step s", "x none"}
"""On a terminal these show the spread below the median."""
TIMES = ("arm", "axes", "tok/s", "step s", "x none", "exposed s", "n")
LEAST = ("floor s", "x floor", "ideal s", "gap s")
BOUNDS = ("arm", "axes", "step s", "exposed s", *LEAST)
MEMORY = ("arm", "axes", "peak GiB, first step", "peak GiB, steady", "pinned GiB", "ranks remote", "RSS GiB", "status")
"""The tables that stand in for one where the terminal is too narrow for all columns."""


def headers(group: Group) -> list[str]:
    """Column heads; tok/s of a rehearsal is marked, since it is a model of the whole job, not a measurement."""
    modelled = group.caption["mode"]["kind"] == "rehearsal"
    return ["tok/s, modelled" if name == "tok/s" and modelled else name for name in COLUMNS]


def cells(group: Group) -> list[list[str]]:
    """The table's text, a list a row."""
    return [[show(row) for show in COLUMNS.values()] for row in group.rows]


def remarks(group: Group) -> list[str]:
    """Lines below a table: marks, noise floor, failures, notes."""
    lines = []
    if any(_first_peak(row).endswith(WHOLE_RUN) for row in group.rows):
        lines.append(f"{WHOLE_RUN} over the whole run, first step included")
    if group.noise is not None:
        lines.append(f"noise floor {group.noise:.1%}: the widest spread between launches of one row")
    if pairs := sorted({row.pairs for row in group.rows if row.x_none_interval is not None}):
        counts = " or ".join(map(str, pairs))
        lines.append(f"x none (in brackets: 95 % interval of the mean of {counts} pairs with a launch of none each)")
    lines += [f"not counted: {failure}" for failure in group.failures]
    lines += condition_table.notes(group) + reserved_table.notes(group)
    return lines + gap_table.notes(group) + group.without_ideal + [f"note: {note}" for note in group.notes]


def to_table(groups: Sequence[Group], console: Console) -> None:
    """Print each group for a person at a terminal; where it is too narrow, times and memory one below the other, and
    where it is narrower still, lines longer than it: a number is never cut."""
    for group in groups:
        for line in describe(group.caption):
            console.print(line, markup=False, highlight=False)
        empty = [name for name in (*LEAST, "ranks remote") if not _known(group, name)]
        tables = [_table(group, [name for name in COLUMNS if name not in empty], ", ")]
        if _least_width(tables[0], console) > console.width:
            narrow = (TIMES, *([BOUNDS] if not set(LEAST) <= set(empty) else []), MEMORY)
            tables = [_table(group, [name for name in names if name not in empty], " ") for names in narrow]
        for table in (*tables, *_more_tables(group)):
            least = _least_width(table, console)
            table.width = least if least > console.width else None
            console.print(table, markup=False, crop=False)
        for line in remarks(group):
            console.print(line, markup=False, highlight=False)
        console.print()


def _known(group: Group, column: str) -> bool:
    """Whether any row of the group has a figure in that column."""
    return any(COLUMNS[column](row) != MISSING for row in group.rows)


def _least_width(table: Table, console: Console) -> int:
    """Columns of a terminal below which a number or a word would be cut."""
    return Measurement.get(console, console.options.update(width=10_000), table).minimum


def _table(group: Group, names: Iterable[str], break_heads_at: str) -> Table:
    """Some of the group's columns. Text wraps at words where room is short, numbers never."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    heads = dict(zip(COLUMNS, headers(group), strict=True))
    rows = [dict(zip(COLUMNS, line, strict=True)) for line in cells(group)]
    chosen = list(names)
    for name in chosen:
        text = name in TEXT_COLUMNS
        longest = max((len(word) for row in rows for word in row[name].split()), default=None) if text else None
        side: Literal["left", "right"] = "left" if text else "right"
        head = heads[name].replace(", ", "\n").replace(break_heads_at, "\n")
        table.add_column(head, justify=side, overflow="fold", no_wrap=not text, min_width=longest)
    for row in rows:
        spread = {name: row[name].replace(" (", "\n(") for name in SPREAD_COLUMNS}
        table.add_row(*((row | spread)[name] for name in chosen))
    return table


def _more_tables(group: Group) -> list[Table]:
    """The tables of conditions, reserved memory and causes, where some row has them: a column a row of the group, as
    heads are many."""
    found = []
    for heads, rows in _more(group):
        table = Table("", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for arm, axes, *_ in rows:
            table.add_column(arm if axes == MISSING else f"{arm}\n{axes.replace(', ', chr(10))}", justify="right")
        for i, head in enumerate(heads[2:], start=2):
            table.add_row(head, *(row[i] for row in rows))
        found.append(table)
    return found


def _more(group: Group) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Heads and lines of the tables below the first one."""
    tables = (
        (condition_table.heads(group), condition_table.lines(group)),
        (reserved_table.HEADS, reserved_table.lines(group)),
        (gap_table.HEADS, gap_table.lines(group)),
    )
    return [(heads, rows) for heads, rows in tables if rows]


def to_markdown(groups: Sequence[Group]) -> str:
    """Each group as its caption, a table, and its remarks."""
    blocks = []
    for group in groups:
        tables = [_markdown(headers(group), list(COLUMNS), cells(group))]
        tables += [_markdown(heads, heads, rows) for heads, rows in _more(group)]
        caption = "  \n".join(describe(group.caption))
        blocks.append("\n\n".join(filter(None, [caption, *tables, "\n".join(f"- {line}" for line in remarks(group))])))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _markdown(heads: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---" if name in TEXT_COLUMNS else "---:" for name in names]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *escaped])


def figures(row: Row) -> dict[str, Any]:
    """One row for machines: units in the names, null for what is not known."""

    def of(spread: Spread | None, name: str) -> dict[str, float | None]:
        low, high = (spread.low, spread.high) if spread else (None, None)
        return {name: spread.median if spread else None, f"{name}_min": low, f"{name}_max": high}

    budget = row.spec.arm.state_budget
    least, most = row.auto_budget_bytes or (None, None)
    return {
        "arm": row.arm,
        "label": row.label,
        "axes": row.axes,
        "numa": row.spec.arm.numa,
        "fsdp_copies": row.spec.arm.fsdp_copies,
        "readbacks": row.spec.arm.readbacks,
        "gradient_pool": row.spec.arm.gradient_pool,
        "memory_limit": row.spec.arm.memory_limit,
        "activation_copies": row.spec.arm.activation_copies,
        "activation_offload": row.activation_offload,
        "first_step": row.spec.arm.first_step,
        "chunk_bytes": row.spec.arm.chunk_bytes,
        "pieces": row.spec.arm.pieces,
        "slots": row.spec.arm.slots,
        "state_budget_bytes": most if budget == "auto" else budget,
        "state_budget_bytes_min": least if budget == "auto" else budget,
        "staging_bytes": row.spec.arm.staging_bytes,
        "loss_bytes": row.spec.arm.loss_bytes,
        "lead": row.spec.arm.lead,
        "ahead": row.spec.arm.ahead,
        **of(row.tok_s, "tok_per_s"),
        **of(row.step_s, "step_s"),
        "x_none": row.x_none,
        "x_none_low": row.x_none_interval[0] if row.x_none_interval else None,
        "x_none_high": row.x_none_interval[1] if row.x_none_interval else None,
        "pairs": row.pairs,
        "same_as_none": row.same,
        "exposed_s": row.exposed_s,
        "floor_s": row.floor_s,
        "x_floor": row.x_floor,
        "bound_by": row.bound_by,
        "ideal_s": row.ideal_s,
        "gap_s": row.gap_s,
        **gap_table.figures(row),
        **condition_table.figures(row),
        **reserved_table.figures(row),
        **_small_copies(row),
        "run_peak_bytes": row.run_peak_bytes,
        "first_step_peak_allocated_bytes": row.first_peak_bytes,
        "steady_peak_allocated_bytes": row.steady_peak_bytes,
        "pinned_bytes": row.pinned_bytes,
        "ranks_remote": row.ranks_remote,
        "ranks_pinned": row.ranks_pinned,
        "rss_bytes": row.rss_bytes,
        "launches": row.launches,
        "status": row.status,
    }


def _small_copies(row: Row) -> dict[str, Any]:
    """`small_uploads_per_step`, `small_longest_wait_s` and the like."""
    found = row.small_copies or SmallCopies()
    return {f"small_{name}": getattr(found, name) for name in SmallCopies.model_fields}


def to_json(groups: Sequence[Group], problems: Sequence[str]) -> str:
    """Everything the tables say, and what could not be read."""
    body = [
        {
            "caption": group.caption,
            "rows": [figures(row) | _splits(row) for row in group.rows],
            "noise_relative": group.noise,
            "failures": group.failures,
            "notes": group.notes,
            "without_ideal": group.without_ideal,
        }
        for group in groups
    ]
    return json.dumps({"groups": body, "problems": list(problems)}, indent=2) + "\n"


def _splits(row: Row) -> dict[str, Any]:
    """By phase, too; of the gap there are no phases, since the ideal is not split by them."""
    named = {"split": row.split, "above_none": row.apart, "ideal_parts": row.ideal_parts, "gap": row.gap}
    return {name: found.model_dump() if found is not None else None for name, found in named.items()}


def _workload_columns(w: dict[str, Any], known: bool) -> dict[str, Any]:
    """The workload a column each; empty where a trainer of its own described itself in `job`."""
    columns = {key: value for key, value in w.items() if key != "betas"}
    columns |= {f"beta{i}": value for i, value in enumerate(w["betas"], start=1)}
    return columns if known else dict.fromkeys(columns)


def to_csv(groups: Sequence[Group]) -> str:
    """One line a row; `group` numbers the groups, whose caption repeats in every line. Nothing known is empty."""
    out = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for number, group in enumerate(groups, start=1):
        caption, w, mode = group.caption, group.caption["workload"], group.caption["mode"]
        shared = {
            "group": number,
            **{
                key: caption[key] for key in ("source", "reference", "gpu", "cpu_model", "torch", "offbench", "driver")
            },
            "job": None if caption["job"] is None else json.dumps(caption["job"], sort_keys=True),
            **_workload_columns(w, known=caption["job"] is None),
            **caption["window"],
            "mode": mode["kind"],
            **{key: mode[key] for key in ("device", "world", "nproc")},
            "emulated_link_bytes_per_s": mode["emulate_link"],
        }
        for row in group.rows:
            line = shared | figures(row)
            if writer is None:
                writer = csv.DictWriter(out, fieldnames=list(line), lineterminator="\n")
                writer.writeheader()
            writer.writerow(line)
    return out.getvalue()
