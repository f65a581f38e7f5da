"""What a launch does after its window, when no figure of it can change any more. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Extras:
    """Steps after the window: asked for by the command line, done by every rank."""

    watch: bool = True
    """Four steps: how far the host is ahead, small copies, and where reserved memory lies."""
    check_window: bool = False
    """Two more windows check `step_s`."""
    split: bool = True
    """Rank 0 traces two steps for the record, on a GPU."""
    profile: Path | None = None
    """Folder for traces of these steps, of all ranks, and for one step's memory; None: none is kept."""

    def variables(self, device: str) -> dict[str, str]:
        """As a launch's environment has them."""
        return {
            "OFFBENCH_WATCH": "1" if self.watch else "",
            "OFFBENCH_CHECK_WINDOW": "1" if self.check_window else "",
            "OFFBENCH_SPLIT": "1" if self.split and device == "cuda" else "",
            "OFFBENCH_PROFILE": str(self.profile.absolute()) if self.profile is not None else "",
        }

    @staticmethod
    def of(env: Mapping[str, str] = os.environ) -> Extras:
        """As a rank finds them; without a launch's variables only the watched steps."""
        profile = env.get("OFFBENCH_PROFILE")
        return Extras(
            watch=env.get("OFFBENCH_WATCH", "1") == "1",
            check_window=bool(env.get("OFFBENCH_CHECK_WINDOW")),
            split=bool(env.get("OFFBENCH_SPLIT")),
            profile=Path(profile) if profile else None,
        )


USUAL = Extras()
