"""The house: lint, types, pinned versions, and the files a reader expects."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
)


def check(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    check("ruff", "check", "offbench", "tests")


def test_ruff_would_format_nothing() -> None:
    check("ruff", "format", "--check", "offbench", "tests")


@pytest.mark.skipif(
    not torch.__version__.startswith(PINS["torch"]), reason="types are checked against the pinned torch"
)
def test_mypy_strict_finds_nothing() -> None:
    check("mypy")


def test_names_that_tests_take_from_our_modules_exist() -> None:
    """Also in tests that this machine skips: nothing else here would see a name that moved."""
    gone = [
        f"{path.name}:{node.lineno}: {node.value.id}.{node.attr}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for tree in [ast.parse(path.read_text())]
        for modules in [our_modules(tree)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (module := modules.get(node.value.id)) is not None
        and not hasattr(module, node.attr)
    ]
    assert gone == []


def our_modules(tree: ast.Module) -> dict[str, ModuleType]:
    """By the name a file gives them; names it takes from them are looked up as well."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "offbench":
            parent = importlib.import_module(node.module or "")
            for alias in node.names:
                name = f"{parent.__name__}.{alias.name}"
                found[alias.asname or alias.name] = (
                    importlib.import_module(name) if not hasattr(parent, alias.name) else getattr(parent, alias.name)
                )
    return {name: value for name, value in found.items() if isinstance(value, ModuleType)}


def direct_dependencies() -> set[str]:
    project = PROJECT["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["dev"], *PROJECT["build-system"]["requires"]]
    return {re.split(r"[<>=!~ ]", name)[0] for name in named}


def test_every_direct_dependency_is_pinned_and_nothing_else() -> None:
    assert set(PINS) == direct_dependencies()


def test_version_and_licence_agree() -> None:
    from offbench import __version__

    assert PROJECT["project"]["version"] == __version__
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_readme_names_commands_that_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(?:.*`)?make (\w+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    from offbench.cli import main

    for command in set(re.findall(r"offbench (\w+) ", readme)) & {"run", "report", "arms"}:
        assert main([command, "--help"]) == 0
