"""`--from`: a named machine, a saved `topo --json`, an hwloc or NCCL file, `nvidia-smi topo` text, or a copied root.

What is read is a claim about some machine: notes of kind `limit` say what the file cannot tell.
"""

from __future__ import annotations

import difflib
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib import resources
from pathlib import Path

from offbench.errors import UsageError
from offbench.topology.detect import read_root
from offbench.topology.imports_hwloc import read_hwloc
from offbench.topology.imports_nccl import read_nccl
from offbench.topology.imports_smi import looks_like_smi, read_smi
from offbench.topology.model import Machine, Note, Source
from offbench.topology.schema import from_json
from offbench.units import show_size

FORMATS = "a saved `offbench topo --json`, hwloc XML, NCCL XML, `nvidia-smi topo -m` text, or a folder with sys/"

MOST_BYTES = 64 << 20
"""No description is as large; a checkpoint or a trace given by mistake is, and a device never ends."""


def machine_names() -> list[str]:
    """Names of the machines shipped with the package, sorted."""
    folder = resources.files("offbench") / "machines"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def load_machine(name_or_path: str) -> Machine:
    """A shipped machine by name, else the file or folder of that path.

    Raises UsageError, one line, for an unknown name (with the nearest one) and for a file that cannot be read.
    """
    names = machine_names()
    if not name_or_path:
        raise UsageError(f"--from is empty; give a machine ({', '.join(names)}) or {FORMATS}")
    if name_or_path in names:
        text = (resources.files("offbench") / "machines" / f"{name_or_path}.json").read_text(encoding="utf-8")
        return from_json(text)
    path = Path(name_or_path)
    if path.exists():
        return read_machine(path)
    near = difflib.get_close_matches(name_or_path, names, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"known machines: {', '.join(names)}"
    raise UsageError(f"--from {name_or_path}: no such machine or file; {hint}")


def read_machine(path: Path) -> Machine:
    """The machine a file or folder describes, its format told from its content.

    Raises UsageError, one line with the file and the reason.
    """
    try:
        return _read_folder(path) if path.is_dir() else _parse(_text(path), path)
    except (ValueError, ET.ParseError) as error:
        raise UsageError(f"--from {path}: {error}") from None
    except RecursionError:
        raise UsageError(f"--from {path}: nested too deeply to describe a machine; give {FORMATS}") from None


def _read_folder(path: Path) -> Machine:
    if not (path / "sys").is_dir():
        raise UsageError(f"--from {path}: a folder without sys/ in it; give {FORMATS}")
    return read_root(path)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"--from {path}: larger than {show_size(MOST_BYTES)}; give {FORMATS}")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"--from {path}: cannot be read: {why}; give {FORMATS}") from None


def _parse(text: str, path: Path) -> Machine:
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return _saved(from_json(start), path.name)
    if start.startswith("<"):
        return _parse_xml(start, path)
    if looks_like_smi(text):
        return read_smi(text, path.name)
    raise ValueError(f"unknown format; give {FORMATS}")


def _saved(machine: Machine, name: str) -> Machine:
    """A saved description is a claim too: it says what was true then."""
    was = f"saved; first seen as {machine.source.kind}"
    text = "a saved description: what has changed on the machine since, and what this host has, is not in it"
    note = Note("limit", "saved", text, "compare with the machine itself: offbench topo")
    return replace(machine, source=Source("offbench", name, was), notes=(*machine.notes, note))


def _parse_xml(text: str, path: Path) -> Machine:
    root = ET.fromstring(text)
    if root.tag == "topology":
        return read_hwloc(root, path.name)
    if root.tag == "system":
        return read_nccl(root, path.name)
    if root.tag == "graphs":
        raise ValueError("an NCCL graph file, not a topology; write one with NCCL_TOPO_DUMP_FILE")
    raise ValueError(f"XML with <{root.tag}> at its top; give {FORMATS}")
