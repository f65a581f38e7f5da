"""The rows of prime-rl#4427: what `--table seed` runs, and what was published for them.

`python -m offbench.seed FOLDER` writes the published rows as records. tok/s is the sum over 8 GPUs; peak is over the
whole run, first step included, as its author reports it; resident size is per rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offbench import arms
from offbench.config import GIB, ArmSpec, Mode, RunSpec, Window, Workload
from offbench.record import Host, Peak, RunRecord

REFERENCE = "prime-rl#4427"


@dataclass(frozen=True)
class SeedRow:
    """One row; figures are null where the tables give none."""

    arm: str
    numa: bool
    first_step: Literal["bounded", "whole"]
    activation_offload: bool
    tok_s: float | None = None
    step_s: float | None = None
    peak_gib: float | None = None
    label: str | None = None

    @property
    def arm_spec(self) -> ArmSpec:
        """The row's arm with upstream's defaults."""
        return arms.ARMS[self.arm].resolve(numa=self.numa, first_step=self.first_step, pieces=1)


TABLE_A = (
    SeedRow("none", False, "whole", False, 57_800, 2.26, 81.3),
    SeedRow("main", False, "whole", False, 26_800, 4.90, 63.2),
    SeedRow("chunked", False, "whole", False, 31_800, 4.11, 63.2, "chunked (prime-rl#4008)"),
    SeedRow("chunked", False, "bounded", False, 31_300, 4.19, 52.8, "chunked (prime-rl#4154)"),
    SeedRow("chunked", True, "whole", False, 33_800, 3.87, 63.2, "chunked (prime-rl#4426)"),
    SeedRow("overlap", False, "whole", False, 32_800, 4.00, 63.6),
    SeedRow("overlap", True, "whole", False, 37_300, 3.52, 63.6),
    SeedRow("chunked", True, "whole", False, 33_800, 3.87, 63.2, "prime-rl#4427, overlap off"),
)
"""Optimizer state offloaded, activations kept."""

TABLE_B = (
    SeedRow("main", False, "whole", True, 23_700, 5.53),
    SeedRow("chunked", False, "whole", True, 30_300, 4.33),
    SeedRow("overlap", False, "whole", True, 31_900, 4.11),
    SeedRow("overlap", True, "whole", True, 35_000, 3.74),
)
"""Activations offloaded as well. There is no row without optimizer offload, so `--table seed` adds one."""

RSS_GIB = {False: 41, True: 45}
"""Resident size of a rank by activation offload."""


def cases() -> list[SeedRow]:
    """The distinct things to run: both tables, and `none` with activation offload as the baseline of the second."""
    rows = [*TABLE_A, SeedRow("none", False, "whole", True), *TABLE_B]
    return list({(row.arm_spec, row.activation_offload): row for row in rows}.values())


def published(rows: tuple[SeedRow, ...]) -> Iterator[RunRecord]:
    """The rows as records with `source: published`."""
    for order, row in enumerate(rows):
        spec = RunSpec(
            workload=Workload(ep=8, activation_offload=row.activation_offload),
            arm=row.arm_spec,
            window=Window(warmup=5, steps=15),
            mode=Mode(kind="real", device="cuda", world=8, nproc=8),
        )
        yield RunRecord(
            run_id=spec.run_id,
            order=order,
            source="published",
            reference=REFERENCE,
            label=row.label,
            status="ok",
            spec=spec,
            step_s=row.step_s,
            tok_s=row.tok_s,
            tokens_per_step=spec.tokens_per_step,
            peak=Peak(run_bytes=None if row.peak_gib is None else round(row.peak_gib * GIB)),
            host=Host(rss_bytes=RSS_GIB[row.activation_offload] * GIB),
            env={"gpu": "NVIDIA H200"},
        )


FILES = {"seed-table-a.jsonl": TABLE_A, "seed-table-b.jsonl": TABLE_B}


def write(folder: Path) -> None:
    """Write the two files of published rows into a folder."""
    for name, rows in FILES.items():
        lines = [record.model_dump_json(exclude_none=True) + "\n" for record in published(rows)]
        (folder / name).write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
