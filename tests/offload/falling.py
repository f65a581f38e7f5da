"""An adversary on whose device activations make the peak: memory falls with every layer's backward."""

from __future__ import annotations

from typing import Any

from offbench.offload.adversary import AdversarialStreams
from offbench.offload.flow import FlowEngine


class Falling(AdversarialStreams):
    """By `layer` bytes a layer, so that state has as much room from a backward's third layer on. The loss takes far
    more, so that nothing stands in the way of a forward, and backward asks for no memory: the next step() is the first
    to wait until all is written back."""

    def __init__(self, *args: Any, layer: int = 6000, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer = layer
        self.ahead: list[int] = []
        """What each step() found of its state."""
        self._own = self._top = 1 << 30
        self._layers = 0

    def watch(self, engine: FlowEngine) -> None:
        """Call it before the engine is used."""
        self._engine = engine
        engine._make_room = lambda step: None
        before, after, step = engine.before_backward, engine.after_backward, engine.step

        def before_backward(chunks) -> None:
            self._own = self._top - self._layers * self.layer if self._layers else 2 * self._top
            self._layers += 1
            before(chunks)
            self._own = min(self._own, self._top)

        def after_backward() -> None:
            after()
            self._own, self._layers = self._top, 0

        def spy_step(works) -> None:
            self.ahead.append(engine._allowance.ahead_bytes)
            step(works)

        engine.before_backward, engine.after_backward, engine.step = before_backward, after_backward, spy_step

    def allocated(self) -> int:
        """What it holds, and all staging."""
        return self._own + self._engine._allowance.staged_bytes
