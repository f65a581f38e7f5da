"""The machine a copy between host and GPU crosses: detected, imported, saved and nested, as plain data.

`detect` looks at this host; `load_machine` reads a shipped machine or a file; `to_json` and `from_json` write and read
the documented form; `tree` nests a machine for drawing. The data itself is in `offbench.topology.model` and
`offbench.topology.links`.
"""

from offbench.topology.compare import with_claims
from offbench.topology.detect import detect
from offbench.topology.imports import load_machine, machine_names, read_machine
from offbench.topology.links import Bridge, Direction, Group, Link, Pcie, Rate, RateKind
from offbench.topology.model import (
    Claim,
    Evidence,
    Gpu,
    Host,
    Machine,
    Measurement,
    Note,
    NumaNode,
    PageBytes,
    Process,
    Source,
)
from offbench.topology.schema import SCHEMA, anonymous, from_json, to_dict, to_json
from offbench.topology.tree import Branch, tree

__all__ = [
    "SCHEMA",
    "Branch",
    "Bridge",
    "Claim",
    "Direction",
    "Evidence",
    "Gpu",
    "Group",
    "Host",
    "Link",
    "Machine",
    "Measurement",
    "Note",
    "NumaNode",
    "PageBytes",
    "Pcie",
    "Process",
    "Rate",
    "RateKind",
    "Source",
    "anonymous",
    "detect",
    "from_json",
    "load_machine",
    "machine_names",
    "read_machine",
    "to_dict",
    "to_json",
    "tree",
    "with_claims",
]
