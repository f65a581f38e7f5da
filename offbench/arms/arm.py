"""What an arm is: a name, a Schedule, its options with upstream's defaults, and the words that describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offbench.config import ArmSpec
from offbench.errors import UsageError
from offbench.offload.schedule import Schedule

OPTIONS = (
    "chunk_bytes",
    "pieces",
    "state_budget",
    "slots",
    "staging_bytes",
    "loss_bytes",
    "lead",
    "ahead",
    "first_step",
)


@dataclass(frozen=True)
class Arm:
    """One way to hold and move optimizer state. No torch is needed to describe or resolve it."""

    name: str
    moves: str
    """What moves each step."""
    when: str
    """When it moves."""
    memory: str
    """State bytes on the GPU while the update runs."""
    schedule: Callable[[ArmSpec], Schedule]
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Options this arm understands, with their defaults; all others stay null in its spec."""
    exact: bool = True
    """Bitwise equal to the same AdamW without offload."""
    unproven: str = ""
    """Where nobody has shown that yet; empty when it has been shown everywhere."""

    def resolve(
        self,
        numa: bool = False,
        fsdp_copies: str = "stock",
        readbacks: str = "copy",
        activation_copies: str = "copy",
        gradient_pool: str = "stock",
        memory_limit: int | None = None,
        **options: object,
    ) -> ArmSpec:
        """The arm's spec with the given options over its defaults; options of other arms are left out.

        Raises UsageError for a name that is no option of any arm.
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise UsageError(f"unknown arm option {unknown[0]}; there are {', '.join(OPTIONS)}")
        chosen = {
            key: options.get(key) if options.get(key) is not None else value for key, value in self.defaults.items()
        }
        axes = {
            "numa": numa,
            "fsdp_copies": fsdp_copies,
            "readbacks": readbacks,
            "activation_copies": activation_copies,
            "gradient_pool": gradient_pool,
            "memory_limit": memory_limit,
        }
        return ArmSpec.model_validate({"name": self.name, **axes, **chosen})
