"""What `offbench plan` does once the command line is parsed. No torch, no CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from offbench.planner import plots, whatif
from offbench.planner.choose import budgets_of, candidates, choose, least_stream, pareto
from offbench.planner.gather import PlanOptions, gather
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
    inputs = gather(options, look)
    if options.plot is not None:
        yield from (f"wrote {path}" for path in plots.write(options.plot, inputs))
        return
    setting = whatif.setting(inputs)
    given = sorted({parse_size("--state-budget", text) for text in options.budgets})
    found = candidates(setting, given or budgets_of(setting.nbytes))
    limit = options.target * found[0].simulated.step_s * (1 + 1e-9)
    least = None if given else least_stream(setting, limit)
    found += [least] if least and least not in found else []
    yield from plan_lines(inputs, found, pareto(found), choose(found, options.target))
    if what_ifs:
        planned = whatif.outcome("as planned", inputs, options.target)
        others = [(what, whatif.outcome(what.name, what.change(inputs), options.target)) for what in what_ifs]
        yield ""
        yield from what_if_lines(planned, others, options.target)


def comparison(options: PlanOptions) -> Iterator[str]:
    """The lines of `--against`, a block per file."""
    for path in options.against:
        read = read_records([path])
        yield f"{path}: simulated from its own inputs"
        yield from reality_lines(*against(read.records))
        yield from (f"warning: {problem}" for problem in read.problems)


def this_host() -> Machine:
    """This machine, with the rates measured here before."""
    return topo_cache.recall(detect())
