"""Every exception offbench raises on purpose.

OffbenchError               the base: one clear line, what, where, what to do
├── UsageError              bad input; the command line exits with code 2 before anything starts
├── RecordError             a results file that cannot be read or written
└── ScheduleError           a schedule that breaks an ordering or memory rule
"""

from __future__ import annotations


class OffbenchError(Exception):
    """Base of all errors raised on purpose; its text is meant for a person."""


class UsageError(OffbenchError):
    """Input that cannot be run: unknown arm, impossible world size, unwritable path."""


class RecordError(OffbenchError):
    """A results file that cannot be read or written."""


class ScheduleError(OffbenchError):
    """A schedule that would read or write memory before it is allowed to."""
