"""none: optimizer state stays on the GPU; the baseline of every comparison."""

from __future__ import annotations

from offbench.arms.arm import Arm
from offbench.offload.schedule import Schedule

ARM = Arm(
    name="none",
    moves="nothing",
    when="-",
    memory="all state",
    schedule=lambda spec: Schedule("none", offloaded=False),
)
