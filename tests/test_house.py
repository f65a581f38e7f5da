"""The house: lint, types, pinned versions, and the files a reader expects."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

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
