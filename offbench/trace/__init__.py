"""Where the time of a profiled step went: causes of idle compute, copies, small copies and what they waited for."""

from offbench.trace.events import parse
from offbench.trace.summary import TraceSummary, summarize
from offbench.trace.timeline import difference, split

__all__ = ["TraceSummary", "difference", "parse", "split", "summarize"]
