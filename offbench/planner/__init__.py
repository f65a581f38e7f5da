"""Predict: the engine's own schedules, simulated on a described link before anything is built or run.

    sources -> inputs -> simulate -> choose -> text

No torch anywhere in here.
"""

from offbench.planner.inputs import Compute, Layout, Links
from offbench.planner.result import Simulated, Waits
from offbench.planner.simulate import simulate

__all__ = ["Compute", "Layout", "Links", "Simulated", "Waits", "simulate"]
