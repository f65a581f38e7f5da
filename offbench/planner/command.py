"""What `offbench plan` does once the command line is parsed. No torch, no CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from offbench.errors import UsageError
from offbench.planner import plots, whatif
from offbench.planner.choose import budgets_of, candidates, choose, fullest_stream, least_memory, pareto
from offbench.planner.gather import gather, readable
from offbench.planner.options import PlanOptions
from offbench.planner.reality import against
from offbench.planner.text import plan_lines, reality_lines, what_if_lines
from offbench.results_file import read_records
from offbench.topo import cache as topo_cache
from offbench.topology.detect import detect
from offbench.topology.model import Machine
from offbench.units import parse_size


def plan_command(options: PlanOptions, look: Callable[[], Machine] | None = None) -> int:
    """Simulate and print; returns the exit code.

    Raises UsageError or RecordError for input that cannot be used.
    """
    for line in comparison(options) if options.against else plan(options, look or this_host):
        print(line)
    return 0


def plan(options: PlanOptions, look: Callable[[], Machine]) -> Iterator[str]:
    """The plan's lines."""
    what_ifs = whatif.chosen(options.what_if)
    if options.plot is not None and not options.plot.strip():
        raise UsageError("--plot: names no folder; give one to write figures into, as in docs/figures")
    shown = {"--what-if": what_ifs, "--state-budget": options.budgets, "--memory-limit": options.memory_limit}
    if options.plot is not None and (unused := [flag for flag, given in shown.items() if given]):
        raise UsageError(f"{unused[0]}: the figures of --plot do not show it; ask for the table without --plot")
    most = None if options.memory_limit is None else parse_size("--memory-limit", options.memory_limit)
    inputs = gather(options, look)
    if options.plot is not None:
        yield from (f"wrote {path}" for path in plots.write(Path(options.plot), inputs))
        return
    setting = whatif.setting(inputs)
    given = sorted({parse_size("--state-budget", text, least=0) for text in options.budgets})
    found = candidates(setting, given or budgets_of(setting.nbytes))
    limit = options.target * found[0].simulated.step_s * (1 + 1e-9)
    least = None if given else least_memory(setting, limit)
    found += [least] if least and least not in found else []
    if most is not None and not given and (least is None or least.simulated.peak_bytes > most):
        fullest = fullest_stream(setting, most)
        found += [fullest] if fullest and fullest not in found else []
    yield from plan_lines(inputs, found, pareto(found), choose(found, options.target, most), most)
    if what_ifs:
        planned = whatif.outcome("as planned", inputs, options.target)
        others = [(what, whatif.outcome(what.name, what.change(inputs), options.target)) for what in what_ifs]
        yield ""
        yield from what_if_lines(planned, others, options.target)


def comparison(options: PlanOptions) -> Iterator[str]:
    """The lines of `--against`, a block per file."""
    if given := sorted({field.name for field in fields(options) if _given(options, field.name)} - {"against"}):
        flag = FLAGS.get(given[0], given[0].replace("_", "-"))
        raise UsageError(f"--against simulates rows as they ran, so --{flag} changes nothing; leave it out")
    found = {path: (readable(path, "--against"), read_records([path]).problems) for path in options.against}
    for path, (records, problems) in found.items():
        yield f"{path}: simulated from its own inputs"
        yield from reality_lines(*against(records))
        yield from (f"warning: skipped {problem}" for problem in problems)


FLAGS = {"size": "bytes", "source": "from", "budgets": "state-budget"}
"""Options that `PlanOptions` calls otherwise."""


def _given(options: PlanOptions, name: str) -> bool:
    return bool(getattr(options, name) != getattr(PlanOptions(), name))


def this_host() -> Machine:
    """This machine, with the rates measured here before."""
    return topo_cache.recall(detect())
