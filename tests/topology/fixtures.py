"""Where real machine descriptions of others lie, where they lie at all. They are read in place and never copied."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def _beside_the_repository() -> Path:
    """A folder `fixtures` in a folder beside the repository, told by its list of facts."""
    lists = sorted(Path(__file__).parents[3].glob("*/fixtures/expected.json"))
    return lists[0].parent if lists else Path("fixtures")


ROOT = Path(os.environ.get("OFFBENCH_FIXTURES") or _beside_the_repository())


def fixture(name: str) -> Path:
    """The file of that name; skips the test where it is absent."""
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{name} is not here; set OFFBENCH_FIXTURES to its folder")
    return path


def expected() -> dict[str, Any]:
    """Facts per XML file; {} where there are none."""
    path = ROOT / "expected.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}
