"""On a GPU: compiled training, no hidden wait of the host, and activation offload over the link, bit for bit."""

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from offbench.workload.parallel import build
from offbench.workload.rehearsal import init_rehearsal
from tests.workload import jobs

# Inductor of torch 2.11 uses a deprecated part of torch.jit; tracing reads .grad of tensors that have none.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@contextmanager
def rehearsal(**workload):
    """A job of rank 0 of 8, experts split 8 ways, on the GPU of this process."""
    init_rehearsal(0, 8)
    spec = jobs.spec(8, kind="rehearsal", ep=8, seq_len=256, **workload)
    spec = spec.model_copy(update={"mode": spec.mode.model_copy(update={"device": "cuda"})})
    try:
        yield build(spec, 0, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("routing", ["balanced", "natural"])
def test_compiled_and_eager_training_agree(routing):
    seen = []
    for compiled in (True, False):
        with rehearsal(routing=routing, compile=compiled) as job:
            loss = jobs.backward(job)
            seen.append((float(loss), float(job.clip()[0])))
    assert seen[0] == pytest.approx(seen[1], rel=2e-2)


def test_the_host_waits_for_token_counts_only():
    """An event per layer and pass is not flagged; a copy that waits for the device would be."""
    with rehearsal(routing="balanced") as job, warnings.catch_warnings():
        jobs.backward(job)
        job.clip()
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
        try:
            jobs.backward(job, step=1)
            job.clip()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_activation_offload_changes_no_bit():
    seen = []
    torch.use_deterministic_algorithms(True)
    try:
        for offload in (False, True):
            with rehearsal(routing="natural", activation_offload=offload) as job:
                loss = jobs.backward(job)
                seen.append([loss, *jobs.gradients(job).values()])
                if offload:
                    assert job.activation_offload.out_bytes == job.activation_offload.in_bytes > 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
