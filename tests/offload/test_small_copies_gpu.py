"""On a CUDA device: FSDP2's uploads and the read-backs wait behind bulk copies, and as kernels they do not.

Rank 0 of 8 trains two layers of the big model under arm overlap. Its copies are repeated, so that the link is busy in
both directions during most of a step. What waited for what is read from a profiler's trace, and once more from the
figures that every record holds.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from offbench import arms, profiler, rank
from offbench.config import MIB, Mode, RunSpec, Window, Workload
from offbench.device import Device
from offbench.offload.readback import Mailbox
from offbench.offload.small_copies import kernel_copies
from offbench.record import SmallCopies
from offbench.trace import TraceSummary, summarize
from offbench.trace.command import read_events
from offbench.workload.experts import Experts
from offbench.workload.parallel import Job, build
from offbench.workload.rehearsal import init_rehearsal

WAYS = {"stock": "copy", "kernel": "kernel"}
"""FSDP2's copies, and the read-backs that go with them here."""
WORLD, LAYERS, REPEAT = 8, 2, 4.0
LONG = 1e-3
"""Seconds; the smallest bulk copy in the way takes several times as long."""
SYNTHETIC = Path(__file__).parent.parent / "data" / "traces" / "synthetic-one-gpu.json"

Seen = dict[str, tuple[TraceSummary, SmallCopies]]


def behind_bulk(found: TraceSummary) -> tuple[float, float]:
    """The longest that a small copy in, and out, waited while bulk copies of the same way ran; seconds."""
    assert found.bulk_in.count, "no bulk copies in to wait behind"
    assert found.bulk_out.count, "no bulk copies out to wait behind"
    return found.small_in.longest_behind_bulk_s or 0.0, found.small_out.longest_behind_bulk_s or 0.0


def spec_of(readbacks: str, device: str = "cuda", model: str = "qwen3-30b-a3b", seq_len: int = 512) -> RunSpec:
    return RunSpec(
        workload=Workload(model=model, layers=LAYERS, seq_len=seq_len, ep=WORLD, compile=False),
        arm=arms.ARMS["overlap"].resolve(readbacks=readbacks, chunk_bytes=64 * MIB),
        window=Window(warmup=1, steps=1),
        mode=Mode.model_validate({"kind": "rehearsal", "device": device, "world": WORLD, "nproc": 1}),
    )


def read_back(job: Job, spec: RunSpec) -> None:
    """Let the expert counts go this way from now on; all layers share a mailbox."""
    for module in job.model.modules():
        if isinstance(module, Experts) and module.ep is not None and module.ep.mailbox is not None:
            module.ep.mailbox = Mailbox(module.ep.mailbox.buffer, job.device, spec.arm.readbacks)


def course(place: torch.device, folder: Path, **chosen: Any) -> dict[str, tuple[Path, SmallCopies]]:
    """Trace and figures of the same trainer, one way after the other."""
    device, found = Device.of(place), {}
    init_rehearsal(0, WORLD)
    spec = spec_of("copy", **chosen)
    job = build(spec, 0, place)
    optimizer = rank.make_optimizer(spec, job, REPEAT)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for way, readbacks in WAYS.items():
        spec = spec_of(readbacks, **chosen)
        read_back(job, spec)
        with kernel_copies(way == "kernel"):
            recorder = profiler.TracedRecorder(device, spec.arm.readbacks)
            rank.train_step(job, optimizer, scheduler, recorder, None, 0)

            def step(number: int, recorder: profiler.TracedRecorder = recorder) -> None:
                rank.train_step(job, optimizer, scheduler, recorder, None, number)

            profiler.profile(step, 1, folder / f"{way}.json.gz", place)
            found[way] = folder / f"{way}.json.gz", rank.watch(job, optimizer, spec, device, folder)[1]
    optimizer.detach()
    dist.destroy_process_group()
    return found


def _child(_: int, folder: str, queue: mp.SimpleQueue) -> None:
    torch.cuda.set_device(0)
    found = course(torch.device("cuda", 0), Path(folder))
    queue.put({way: (summarize(read_events(path)), figures) for way, (path, figures) in found.items()})


@pytest.mark.gpu
def test_as_kernels_no_small_copy_waits_behind_bulk_copies() -> None:
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_child, (folder, queue), nprocs=1, start_method="spawn")
    seen: Seen = queue.get()
    print({way: (behind_bulk(summary), figures) for way, (summary, figures) in seen.items()})
    stock, kernel = (seen[way][0] for way in WAYS)
    assert min(behind_bulk(stock)) > LONG, "nothing was in the way: this run can show nothing"
    assert max(behind_bulk(kernel)) < LONG / 10
    before, after = (seen[way][1] for way in WAYS)
    assert (after.uploads_per_step, after.readbacks_per_step) == (0, 0)
    assert after.by_kernel_per_step == (before.uploads_per_step or 0) + (before.readbacks_per_step or 0)
    assert before.readbacks_per_step == 2 * LAYERS + 1, "expert counts of forward and recompute; loss and norm"
    waited, free = before.longest_wait_s, after.longest_wait_s
    assert waited is not None
    assert free is not None
    assert waited > LONG
    assert free < waited / 4


def test_what_waits_behind_bulk_in_a_known_trace() -> None:
    """The trace by hand has an upload and a read-back that wait; without them bulk copies are left, and small ones in
    line behind bulk ones of their own stream, as an optimizer's smallest tensors are."""
    events = json.loads(SYNTHETIC.read_text())["traceEvents"]
    assert behind_bulk(summarize(events)) == (pytest.approx(900e-6), pytest.approx(1000e-6))
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    bulk = {
        way: next(e for e in copies if way in e["name"] and e["args"]["bytes"] > MIB * 4) for way in ("HtoD", "DtoH")
    }
    quiet = [e for e in events if e not in copies or e in bulk.values()]
    for number, (way, big) in enumerate(bulk.items(), start=10_000):
        arguments = big["args"] | {"bytes": 2048, "correlation": number}
        quiet.append(big | {"name": f"Memcpy {way}", "ts": big["ts"] + big["dur"], "dur": 2, "args": arguments})
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": big["ts"], "dur": 1, "tid": 1}
        quiet.append(call | {"args": {"correlation": number}})
    found = summarize(quiet)
    assert (found.small_in.count, found.small_out.count) == (1, 1)
    assert behind_bulk(found) == (0.0, 0.0)
