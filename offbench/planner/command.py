"""What `offbench plan` does once the command line is parsed. No torch, no CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from offbench.planner.choose import candidates, choose, pareto
from offbench.planner.gather import PlanOptions, gather
from offbench.planner.reality import against
from offbench.planner.text import plan_lines, reality_lines
from offbench.record import read_records
from offbench.topo import cache as topo_cache
from offbench.topology.detect import detect
from offbench.topology.model import Machine


def plan_command(options: PlanOptions, look: Callable[[], Machine] | None = None) -> int:
    """Simulate and print; returns the exit code.

    Raises UsageError or RecordError for input that cannot be used.
    """
    for line in comparison(options) if options.against else plan(options, look or this_host):
        print(line)
    return 0


def plan(options: PlanOptions, look: Callable[[], Machine]) -> Iterator[str]:
    """The plan's lines."""
    inputs = gather(options, look)
    found = candidates(inputs.job.layout, inputs.compute, inputs.links, inputs.job.chunk_bytes)
    yield from plan_lines(inputs, found, pareto(found), choose(found, options.target))


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
