"""Offloaded AdamW for FSDP2, and the mechanisms under it: chunks, host store, streams, engine.

    from offbench.arms import find
    from offbench.offload import OffloadedAdamW

Importing the package loads no torch until one of its names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbench.offload.adamw import OffloadedAdamW
    from offbench.offload.gradient_pool import GradientPool
    from offbench.offload.schedule import Schedule

__all__ = ["GradientPool", "OffloadedAdamW", "Schedule"]


def __getattr__(name: str) -> Any:
    if name == "OffloadedAdamW":
        from offbench.offload.adamw import OffloadedAdamW

        return OffloadedAdamW
    if name == "GradientPool":
        from offbench.offload.gradient_pool import GradientPool

        return GradientPool
    if name == "Schedule":
        from offbench.offload.schedule import Schedule

        return Schedule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
