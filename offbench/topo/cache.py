"""Measured capacities of machines, kept under the user's cache folder and found again by what the machine is made of.

Kept: the whole machine as `topo --json` writes it. Taken from it later: measured figures only, onto a fresh detection.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from offbench.floor import Tree
from offbench.machine_floor import measured_tree
from offbench.topology.links import Link
from offbench.topology.model import Machine
from offbench.topology.schema import from_json, to_json


def folder(env: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/offbench/topo`, by default below ~/.cache. Raises OSError where there is no home folder either,
    as for a user id without an entry in a container."""
    try:
        base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise OSError("no home folder; set XDG_CACHE_HOME") from None
    return Path(base) / "offbench" / "topo"


def identity(machine: Machine) -> str:
    """16 hex digits that stay the same as long as GPUs, their order, their ways to the CPU and the nodes do."""
    gpus = [(gpu.uuid, gpu.bdf, gpu.name, gpu.root, gpu.chain, gpu.numa.value, gpu.package) for gpu in machine.gpus]
    nodes = [(node.id, node.kind, node.cpus) for node in machine.nodes]
    made_of = [machine.host.vendor, machine.host.product, machine.host.cpu_model, gpus, nodes]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]


def keep(machine: Machine, time: str, env: Mapping[str, str] = os.environ) -> Path:
    """Write a measured machine into the cache; returns the file. `time`: ISO 8601, UTC.

    Raises OSError where the folder cannot be written.
    """
    path = folder(env) / f"{identity(machine)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(to_json(machine, time), encoding="utf-8")
    temporary.replace(path)
    return path


def kept(name: str, env: Mapping[str, str] = os.environ) -> Machine | None:
    """The machine of that identity as it was when it was measured; None when it never was, or an older version of the
    layout wrote it."""
    try:
        return from_json((folder(env) / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def recall(machine: Machine, env: Mapping[str, str] = os.environ) -> Machine:
    """The detected machine with what was measured on it before; as it is when nothing was, or an older version of
    the layout wrote it."""
    past = kept(identity(machine), env)
    if past is None:
        return machine
    known = {link.id: link for link in past.links}
    links = [_joined(link, known.pop(link.id, None)) for link in machine.links]
    found = [link for link in known.values() if any(rate.kind == "measured" for rate in link.rates)]
    return replace(
        machine,
        links=(*links, *found),
        groups=past.groups,
        measurements=past.measurements,
        pair_or_socket=past.pair_or_socket,
    )


def _joined(link: Link, past: Link | None) -> Link:
    measured = [rate for rate in past.rates if rate.kind == "measured"] if past else []
    return replace(link, rates=(*measured, *link.rates), sharing=past.sharing) if past and measured else link


def launch_tree(machine: Machine, ranks: int) -> Tree | None:
    """What `offbench.floor.of_launch` can use of a machine that was measured; None when it was not."""
    return measured_tree(machine, ranks) if machine.measurements else None
