"""The entry of each rank: started by torchrun as `python -m offbench.worker`, with OFFBENCH_SPEC (a RunSpec as JSON)
and OFFBENCH_OUT (the run's folder) in the environment.

Rank 0 writes `progress.jsonl` and `result.json`, a failing rank `failure-<rank>.json`. What a rank does is in
`offbench.rank`, imported only once this process is sure to die with its parent: importing torch takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from offbench.failure import die_with_parent, let_samplers_attach, record_failure, write_json


class Progress:
    """What this rank is doing; rank 0 tells the runner, line by line."""

    def __init__(self, out: Path, rank: int) -> None:
        self.phase = "start"
        self._file = (out / "progress.jsonl").open("a", encoding="utf-8") if rank == 0 else None

    def enter(self, phase: str, step: int = 0, of: int = 0, tok_s: float | None = None) -> None:
        """Say that `phase` begins, or that its step `step` of `of` is done."""
        self.phase = phase
        if self._file is not None:
            line = {"phase": phase, "step": step, "of": of, "tok_s": tok_s, "time": time.time()}
            print(json.dumps(line), file=self._file, flush=True)


def main() -> int:
    """Run one rank; the exit code is 0 only when everything was measured and handed over."""
    die_with_parent()
    let_samplers_attach()
    out = Path(os.environ["OFFBENCH_OUT"])
    local_rank = int(os.environ["LOCAL_RANK"])
    write_json(out / f"rank-{local_rank}.json", {"rank": local_rank, "pid": os.getpid()})
    progress = Progress(out, local_rank)
    try:
        from offbench.config import RunSpec
        from offbench.hardware import visible_gpus
        from offbench.whereabouts import Whereabouts

        spec = RunSpec.model_validate_json(Path(os.environ["OFFBENCH_SPEC"]).read_text(encoding="utf-8"))
        gpus, _ = visible_gpus(os.environ) if spec.mode.device == "cuda" else ((), None)
        where = Whereabouts.take(local_rank, [gpu.bus_id for gpu in gpus[: spec.mode.nproc]], spec.arm.numa)

        from offbench.rank import run  # and torch: the threads it starts inherit what was bound

        run(spec, local_rank, out, progress, where)
    except BaseException as error:
        record_failure(out, local_rank, error, progress.phase)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
