"""A worker for launcher tests: does what $STAND_IN says, without torch, and writes the files a worker writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    out, rank = Path(os.environ["OFFBENCH_OUT"]), int(os.environ["RANK"])
    spec = json.loads(Path(os.environ["OFFBENCH_SPEC"]).read_text())
    (out / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "pid": os.getpid()}))
    if rank == 0:
        with (out / "progress.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "build", "step": 0, "of": 0, "tok_s": None, "time": time.time()}) + "\n")
    act = os.environ["STAND_IN"]
    if act in {"crash", "die"} and rank == 1:  # the first one may be slower to start
        while not (out / "waiting-0").exists():
            time.sleep(0.01)
    if act == "ok" and rank == 0:
        seen = {"arm": spec["arm"]["name"], "omp": os.environ["OMP_NUM_THREADS"]}
        (out / "result.json").write_text(json.dumps({"status": "ok", "step_s": 1.0, "env": seen}))
    if act == "die" and rank == 1:
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "crash" and rank == 1:
        failure = {"rank": 1, "time_ns": time.time_ns(), "type": "ValueError", "message": "bad", "phase": "build"}
        (out / "failure-1.json").write_text(json.dumps(failure | {"stack": "here", "oom": False, "peer": False}))
        sys.exit(1)
    if act in {"hang", "crash", "die"}:
        if act == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_for_ever(out / f"waiting-{rank}")


def wait_for_ever(sign: Path) -> None:
    """Leave a helper in a session of its own, as a compiler pool may, and the sign; never return."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    sign.touch()
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
