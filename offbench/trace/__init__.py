"""Where the time of a profiled step went: copies, small copies and what they waited for, idle compute, host waits."""

from offbench.trace.summary import TraceSummary, summarize

__all__ = ["TraceSummary", "summarize"]
